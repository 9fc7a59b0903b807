"""The synthetic sources, and the parquet files that they are written to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcore.config import DataConfig
from rlcore.data.synthetic import Split, check_split

SYNTHETIC, COUNTDOWN, SUMS = "synthetic-geometry", "countdown", "sums"
SYNTHETIC_SOURCES = {SYNTHETIC: "geometry.py", COUNTDOWN: "arithmetic.py", SUMS: "arithmetic.py"}
"""Name of a synthetic source -> the file of this folder that generates it."""


def check_synthetic(name: str, split: str, data: DataConfig) -> None:
    """Generate one problem, so that the errors of ``write_synthetic`` are raised before anything is written."""
    next(_rows(name, check_split(name, split), 1, data))


def write_synthetic(folder: Path, name: str, split: str, data: DataConfig) -> Path:
    """Write the problems of a source to ``folder/SPLIT.parquet`` and return that path.

    The training split has ``data.synthetic_problems`` problems, validation and test an eighth of that each. The same
    arguments give the same file, byte for byte.

    Raises:
        DataError: an unknown split, or settings that allow no problem.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = check_split(name, split)
    count = data.synthetic_problems if split == "train" else max(1, data.synthetic_problems // 8)
    rows = list(_rows(name, wanted, count, data))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(_schema(name))), path)
    return path


def _rows(name: str, split: Split, count: int, data: DataConfig) -> Iterator[dict[str, object]]:
    from rlcore.data.synthetic.arithmetic import generate_countdown, generate_sum
    from rlcore.data.synthetic.geometry import draw_problem, png_bytes

    seed = data.synthetic_seed
    for index in range(count):
        if name == SYNTHETIC:
            problem = draw_problem(split, index, seed)
            image = {"bytes": png_bytes(problem.picture), "path": f"{problem.problem_id}.png"}
            yield {
                "id": problem.problem_id,
                "kind": problem.kind,
                "problem": f"<image>{problem.question}",
                "answer": problem.answer,
                "images": [image],
            }
            continue
        made = (
            generate_sum(split, index, seed) if name == SUMS else generate_countdown(split, index, seed, data.countdown)
        )
        row: dict[str, object] = {"id": made.problem_id, "problem": made.question, "answer": made.answer}
        yield row if name == SUMS else {**row, "nums": list(made.numbers), "target": made.target}


def _schema(name: str) -> list[tuple[str, Any]]:
    import pyarrow as pa

    text = pa.string()
    if name == SYNTHETIC:
        images = pa.list_(pa.struct([("bytes", pa.binary()), ("path", text)]))
        return [("id", text), ("kind", text), ("problem", text), ("answer", text), ("images", images)]
    columns: list[tuple[str, Any]] = [("id", text), ("problem", text), ("answer", text)]
    return columns if name == SUMS else [*columns, ("nums", pa.list_(pa.int64())), ("target", pa.int64())]
