"""Synthetic geometry: the same picture every time, no picture in two splits, answers that follow from the picture."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlcore.config import DataConfig
from rlcore.data.synthetic import SPLITS
from rlcore.data.synthetic.geometry import CELL, KINDS, SyntheticProblem, draw_problem, split_of
from rlcore.data.synthetic.sources import SYNTHETIC, write_synthetic
from rlcore.errors import DataError

SOME = 60


def problems_of(split: str, seed: int = 0) -> list[SyntheticProblem]:
    return [draw_problem(split, index, seed) for index in range(SOME)]  # type: ignore[arg-type]


def pixel_hash(problem: SyntheticProblem) -> str:
    return hashlib.sha256(repr(problem.picture.size).encode() + problem.picture.tobytes()).hexdigest()


def sides_by_symmetry(picture: Image.Image) -> int:
    """Corners of a regular polygon: how often the outline's distance from the middle swings in one turn."""
    ys, xs = np.nonzero(np.asarray(picture.convert("L")) < 128)
    # The middle of the box is off for a turned triangle; the outline's own centre of mass is not.
    angle, distance = np.arctan2(ys - ys.mean(), xs - xs.mean()), np.hypot(xs - xs.mean(), ys - ys.mean())
    swing = {n: abs(((distance - distance.mean()) * np.exp(1j * n * angle)).sum()) for n in range(3, 7)}
    return max(swing, key=swing.__getitem__)


def test_same_arguments_same_problem() -> None:
    for split in SPLITS:
        first, again = draw_problem(split, 5, 3), draw_problem(split, 5, 3)
        assert first.picture.tobytes() == again.picture.tobytes()
        assert (first.question, first.answer, first.numbers) == (again.question, again.answer, again.numbers)


def test_seed_and_index_change_the_picture() -> None:
    pictures = {pixel_hash(draw_problem("train", index, seed)) for index in (0, 4, 8) for seed in (0, 1)}
    assert len(pictures) == 6


def test_splits_share_no_picture_even_across_seeds() -> None:
    seen = {split: {pixel_hash(p) for seed in (0, 1) for p in problems_of(split, seed)} for split in SPLITS}
    for split, pictures in seen.items():
        others = set().union(*(seen[other] for other in SPLITS if other != split))
        assert not pictures & others
        assert len(pictures) > 1.8 * SOME  # hardly a picture twice


def test_a_picture_knows_its_split() -> None:
    for split in SPLITS:
        assert {split_of(problem.picture) for problem in problems_of(split)} == {split}


def test_kinds_take_turns() -> None:
    assert [problem.kind for problem in problems_of("test")[: 2 * len(KINDS)]] == 2 * list(KINDS)


def test_pictures_fit_the_patch_grid_and_are_never_resized() -> None:
    for problem in problems_of("train"):
        width, height = problem.picture.size
        assert width % (2 * CELL) == 0
        assert height % (2 * CELL) == 0
        assert 56 * 56 <= width * height <= 112 * 112


@pytest.mark.parametrize("kind", ["triangle", "straight-line", "segment"])
def test_answers_follow_from_the_numbers_in_the_picture(kind: str) -> None:
    reckon = {
        "triangle": lambda a, b: 180 - a - b,
        "straight-line": lambda a: 180 - a,
        "segment": lambda a, b: a + b,
    }[kind]
    for problem in problems_of("train"):
        if problem.kind == kind:
            assert int(problem.answer) == reckon(*problem.numbers) > 0
            assert eval(problem.reasoning) == int(problem.answer)


def test_polygons_have_as_many_sides_as_the_answer_says() -> None:
    polygons = [problem for problem in problems_of("train") if problem.kind == "polygon"]
    assert [sides_by_symmetry(problem.picture) for problem in polygons] == [int(p.answer) for p in polygons]


def test_the_question_alone_does_not_tell_the_answer() -> None:
    answers: dict[str, set[str]] = {}
    for problem in problems_of("train"):
        answers.setdefault(problem.question, set()).add(problem.answer)
        assert not any(letter.isdigit() for letter in problem.question)
        assert len(problem.question) <= 12  # a token per byte
    assert min(len(different) for different in answers.values()) >= 3


def write(folder: Path, split: str, problems: int, seed: int) -> Path:
    """A file of this many problems; training has eight times as many as the other splits."""
    count = problems if split == "train" else 8 * problems
    return write_synthetic(folder, SYNTHETIC, split, DataConfig(synthetic_problems=count, synthetic_seed=seed))


def test_file_has_the_schema_of_geometry3k(tmp_path: Path) -> None:
    table = pq.read_table(write(tmp_path / "new", "validation", 8, seed=2))
    assert table.column_names == ["id", "kind", "problem", "answer", "images"]
    assert str(table.schema.field("images").type.value_type) == "struct<bytes: binary, path: string>"
    assert table.num_rows == 8
    for index, row in enumerate(table.to_pylist()):
        problem = draw_problem("validation", index, 2)
        assert row["problem"] == f"<image>{problem.question}"
        assert row["answer"] == problem.answer
        (image,) = row["images"]
        assert image["bytes"].startswith(b"\x89PNG")
        with Image.open(io.BytesIO(image["bytes"])) as picture:
            assert picture.tobytes() == problem.picture.tobytes()


def test_file_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    first = write(tmp_path / "a", "test", 4, seed=0)
    again = write(tmp_path / "b", "test", 4, seed=0)
    assert first.read_bytes() == again.read_bytes()


def test_the_warm_start_split_is_not_public(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Allowed: train, validation, test"):
        write(tmp_path, "warmup", 4, seed=0)
