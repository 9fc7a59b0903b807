"""Files with the columns that published benchmarks have. Every row is invented, and every image drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.data.synthetic.geometry import draw_problem, png_bytes

Row = dict[str, Any]


def _png(index: int) -> bytes:
    return png_bytes(draw_problem("test", index, 0).picture)


def _image(index: int) -> dict[str, object]:
    return {"bytes": _png(index), "path": None}


def _mathvista() -> list[Row]:
    common = {"image": "images/1.jpg", "unit": None, "precision": None, "metadata": {"split": "testmini"}, "query": "-"}
    return [
        {
            **common, "pid": "1", "question": "Which bar is taller?", "decoded_image": _image(0), "answer": "blue",
            "choices": ["red", "blue"], "question_type": "multi_choice", "answer_type": "text",
        },
        {
            **common, "pid": "2", "question": "How long is the rod?", "decoded_image": _image(1), "answer": "1.5",
            "choices": None, "question_type": "free_form", "answer_type": "float", "unit": "cm", "precision": 1.0,
        },
    ]  # fmt: skip


def _mathverse() -> list[Row]:
    common = {"metadata": {"split": "testmini", "subject": "Plane Geometry"}, "query_wo": "-", "problem_index": "1"}
    return [
        {
            **common, "sample_index": "1", "problem_version": "Text Dominant", "image": _image(0), "answer": "B",
            "question": "What is x?\nChoices:\nA:30\nB:60", "question_type": "multi-choice", "question_for_eval": "x?",
            "query_cot": "Reason first.\nQuestion: What is x?\nChoices:\nA:30\nB:60",
        },
        {
            **common, "sample_index": "2", "problem_version": "Vision Only", "question": "", "image": _image(1),
            "answer": "7", "question_type": "free-form", "question_for_eval": "How long is y?",
            "query_cot": "Reason first. The question is in the image.",
        },
    ]  # fmt: skip


def _mmmu() -> list[Row]:
    images = {f"image_{number}": None for number in range(1, 8)}
    common = {"explanation": "?", "img_type": "['Diagrams']", "topic_difficulty": "Easy", **images}
    return [
        {
            **common, "id": "validation_Art_1", "question": "Which of them continues <image 1>?", "image_1": _image(0),
            "image_2": _image(1), "options": "['<image 2>', \"the painter's own\"]", "answer": "B",
            "subfield": "Drawing", "question_type": "multiple-choice",
        },
        {
            **common, "id": "validation_Math_1", "question": "<image 1> How much is it?", "image_1": _image(2),
            "options": "[]", "answer": "['1/2', '0.5']", "question_type": "open", "subfield": "Arithmetic",
        },
    ]  # fmt: skip


def _worked(answer: object, **more: object) -> list[Row]:
    return [{"problem": f"What is {n} + 1?", "answer": answer, "solution": "-", **more} for n in range(2)]


_TABLES: Mapping[str, Callable[[], list[Row]]] = {
    "mathvista": _mathvista,
    "mathverse": _mathverse,
    "mmmu": _mmmu,
    "superclevr": lambda: [
        {"image": _image(n), "question": "How many things are in the image?", "ground_truth": n + 2} for n in range(2)
    ],
    "geometry3k": lambda: [
        {"images": [_image(n)], "problem": "<image>Find x.", "answer": r"2 \sqrt { 3 }"} for n in range(2)
    ],
    "math500": lambda: _worked("2", subject="Algebra", level=1, unique_id="test/algebra/1.json"),
    "gsm8k": lambda: [{"question": f"{n} and 1 apples?", "answer": f"{n} + 1.\n#### {n + 1}"} for n in range(2)],
    "aime24": lambda: _worked("033", id=60, url="-", year="2024"),
    "aime25": lambda: [
        {"problem_idx": n, "problem": "Find m + n.", "answer": 70 + n, "problem_type": ["Algebra"]} for n in range(2)
    ],
    "countdown": lambda: [{"target": 24, "nums": [4, 6, 1]}, {"target": 9, "nums": [2, 3, 4, 4]}],
}
SPLITS = {"mathvista": "testmini", "mathverse": "testmini", "mmmu": "validation"}
NAMES = (*_TABLES, "geoqa")


def write_suite(folder: Path, name: str) -> None:
    """Write the suite's rows to ``folder/NAME``, as a download of its hub dataset or repository lies there."""
    own = folder / name
    own.mkdir(parents=True)
    if name == "geoqa":
        pictures = own / "Geo170K/images/test"
        pictures.mkdir(parents=True)
        rows = []
        for n in range(2):
            (pictures / f"{n}.png").write_bytes(_png(n))
            path = f"./Geo170K/images/test/{n}.png"
            rows.append({"image_path": path, "question": "What is the angle?", "ground_truth": f"{40 + n}°"})
        (own / "geoqa_test_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    split = SPLITS.get(name, "test" if name not in ("aime24", "aime25", "countdown") else "train")
    pq.write_table(pa.Table.from_pylist(_TABLES[name]()), own / f"{split}-00000-of-00001.parquet")


def write_suites(folder: Path) -> None:
    """``write_suite`` for every suite."""
    for name in NAMES:
        write_suite(folder, name)
