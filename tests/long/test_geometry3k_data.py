"""The real Geometry3K, prepared and resized as an experiment does it: two processes per split."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlcore.artifacts import Artifact, DatasetRef
from rlcore.config import DataConfig, ModelConfig
from rlcore.data.digest import dataset_key
from rlcore.data.images import ImageStore
from rlcore.data.problems import load_problems
from rlcore.job import JobSpec, PrepareSpec, ResizeSpec

CHECKOUT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("RLFLOW_DATA", CHECKOUT.parent / "shared" / "data")) / "geometry3k"


def run_job(module: str, spec: JobSpec) -> DatasetRef:
    path = spec.result.with_suffix(".spec")
    path.write_text(spec.model_dump_json())
    command = [sys.executable, "-m", module, str(path)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return DatasetRef.model_validate_json(spec.result.read_text())


def specs(tmp_path: Path, split: str) -> tuple[PrepareSpec, dict[str, Artifact | object]]:
    common = {"data": DataConfig(), "model": ModelConfig(), "datasets_dir": tmp_path / "datasets"}
    file = FOLDER / f"{split}.parquet"
    prepare = PrepareSpec(result=tmp_path / f"raw-{split}", source=str(file), source_path=file, split=split, **common)
    return prepare, {"result": tmp_path / split, "processes": 2, **common}


def test_all_of_geometry3k_is_usable(tmp_path):
    refs = {}
    for split in ("train", "validation"):
        prepare, rest = specs(tmp_path, split)
        raw = run_job("rlcore.data.problems", prepare)
        refs[split] = run_job("rlcore.data.images", ResizeSpec(dataset=raw, **rest))

    train, validation = refs["train"], refs["validation"]
    assert (train.num_problems, train.num_rejected, train.num_images) == (2101, 0, 1712)
    assert (validation.num_problems, validation.num_rejected, validation.num_images) == (300, 0, 289)

    problems = load_problems(Path(train.path))
    assert len({problem.problem_id for problem in problems}) == 2101
    store = ImageStore(Path(train.path))
    for problem in problems[::50]:
        for image in problem.images:
            assert store.read(image).size == (image.width, image.height)
            assert image.width % 28 == image.height % 28 == 0

    prepare, _ = specs(tmp_path, "train")
    assert (tmp_path / "datasets" / f"raw-{dataset_key(prepare)}").is_dir()
