"""How long a dataset takes to be ready: ``python -m tests.bench.datasets FOLDER`` with Geometry3K's parquet files, or
``--tiny`` with a few drawn problems in files of the same form.

Seconds of each job by split, the start of its process included, as an experiment runs them: prepare (read, check,
deduplicate, store) and resize, in two processes. One JSON object.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
from pyarrow import parquet

from rlcore.artifacts import DatasetRef
from rlcore.config import DataConfig, ModelConfig
from rlcore.data.synthetic import Split
from rlcore.data.synthetic.geometry import draw_problem
from rlcore.specs import JobSpec, PrepareSpec, ResizeSpec

SPLITS: tuple[Split, ...] = ("train", "validation")


def main(files: Path, folder: Path) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    shared = {"data": DataConfig(), "model": ModelConfig(), "datasets_dir": folder / "datasets"}
    for split in SPLITS:
        source = files / f"{split}.parquet"
        place = {"source": str(source), "source_path": source, "split": split}
        raw, prepared = timed("rlcore.jobs.prepare", PrepareSpec(result=folder / f"raw-{split}", **place, **shared))
        resize = ResizeSpec(result=folder / split, dataset=raw, processes=2, **shared)
        ref, resized = timed("rlcore.jobs.resize", resize)
        found[split] = {"problems": ref.num_problems, "images": ref.num_images, "prepare": prepared, "resize": resized}
    return found


def timed(module: str, spec: JobSpec) -> tuple[DatasetRef, float]:
    path = spec.result.with_suffix(".spec")
    path.write_text(spec.model_dump_json())
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", module, str(path)], check=True, stderr=subprocess.DEVNULL)
    return DatasetRef.model_validate_json(spec.result.read_text()), time.perf_counter() - start


def write_tiny(folder: Path) -> Path:
    """Four drawn problems a split, in the columns of Geometry3K's files."""
    folder.mkdir()
    for split in SPLITS:
        rows = []
        for number in range(4):
            drawn, picture = draw_problem(split, number, 0), io.BytesIO()
            drawn.picture.save(picture, format="PNG")
            image = {"bytes": picture.getvalue(), "path": None}
            rows.append({"problem": f"<image>{drawn.question}", "answer": drawn.answer, "images": [image]})
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="?", metavar="FOLDER", help="of train and validation.parquet")
    parser.add_argument("--tiny", action="store_true", help="a few drawn problems")
    arguments = parser.parse_args()
    if arguments.tiny == (arguments.files is not None):
        parser.error("give the folder of the parquet files, or --tiny")
    with tempfile.TemporaryDirectory() as scratch:
        files = arguments.files or write_tiny(Path(scratch) / "files")
        sys.stdout.write(json.dumps(main(files, Path(scratch)), indent=1) + "\n")
