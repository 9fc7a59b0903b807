"""Geometry3K, prepared and resized as an experiment does it: two processes per split."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlcore.artifacts import Artifact, DatasetRef
from rlcore.config import DataConfig, ModelConfig
from rlcore.data.pixels import ImageStore
from rlcore.data.prepare.folder import dataset_key
from rlcore.data.table import load_problems
from rlcore.specs import JobSpec, PrepareSpec, ResizeSpec
from tests.data_sets import DataSets

CHECKOUT = Path(__file__).parents[2]


def run_job(module: str, spec: JobSpec) -> DatasetRef:
    path = spec.result.with_suffix(".spec")
    path.write_text(spec.model_dump_json())
    command = [sys.executable, "-m", module, str(path)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return DatasetRef.model_validate_json(spec.result.read_text())


def specs(data_sets: DataSets, tmp_path: Path, split: str) -> tuple[PrepareSpec, dict[str, Artifact | object]]:
    common = {"data": DataConfig(), "model": ModelConfig(), "datasets_dir": tmp_path / "datasets"}
    file = data_sets.file(f"geometry3k/{split}")
    prepare = PrepareSpec(result=tmp_path / f"raw-{split}", source=str(file), source_path=file, split=split, **common)
    return prepare, {"result": tmp_path / split, "processes": 2, **common}


def test_all_of_geometry3k_is_usable(tmp_path, data_sets):
    refs = {}
    for split in ("train", "validation"):
        prepare, rest = specs(data_sets, tmp_path, split)
        raw = run_job("rlcore.jobs.prepare", prepare)
        refs[split] = run_job("rlcore.jobs.resize", ResizeSpec(dataset=raw, **rest))

    for split, ref in refs.items():
        counts = data_sets.counts[f"geometry3k/{split}"]
        assert (ref.num_problems, ref.num_rejected, ref.num_images) == (counts.rows, 0, counts.images)

    train = refs["train"]
    problems = load_problems(Path(train.path))
    assert len({problem.problem_id for problem in problems}) == train.num_problems
    store = ImageStore(Path(train.path))
    for problem in problems[:: 50 if data_sets.kind == "real" else 1]:
        for image in problem.images:
            assert store.read(image).size == (image.width, image.height)
            assert image.width % 28 == image.height % 28 == 0

    prepare, _ = specs(data_sets, tmp_path, "train")
    assert (tmp_path / "datasets" / f"raw-{dataset_key(prepare)}").is_dir()
