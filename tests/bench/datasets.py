"""How long a dataset takes to be ready: ``python -m tests.bench.datasets FOLDER`` with Geometry3K's parquet files.

Seconds of each job by split, the start of its process included, as an experiment runs them: prepare (read, check,
deduplicate, store) and resize, in two processes. One JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlcore.artifacts import DatasetRef
from rlcore.config import DataConfig, ModelConfig
from rlcore.job import JobSpec, PrepareSpec, ResizeSpec


def main(files: Path, folder: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    shared = {"data": DataConfig(), "model": ModelConfig(), "datasets_dir": folder / "datasets"}
    for split in ("train", "validation"):
        source = files / f"{split}.parquet"
        place = {"source": str(source), "source_path": source, "split": split}
        raw, prepared = timed("rlcore.data.problems", PrepareSpec(result=folder / f"raw-{split}", **place, **shared))
        resize = ResizeSpec(result=folder / split, dataset=raw, processes=2, **shared)
        ref, resized = timed("rlcore.data.images", resize)
        found[split] = {"problems": ref.num_problems, "images": ref.num_images, "prepare": prepared, "resize": resized}
    return found


def timed(module: str, spec: JobSpec) -> tuple[DatasetRef, float]:
    path = spec.result.with_suffix(".spec")
    path.write_text(spec.model_dump_json())
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", module, str(path)], check=True, stderr=subprocess.DEVNULL)
    return DatasetRef.model_validate_json(spec.result.read_text()), time.perf_counter() - start


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        sys.stdout.write(json.dumps(main(Path(sys.argv[1]), Path(scratch)), indent=1) + "\n")
