"""Duplicates between training and evaluation: numbers worked out by hand, and images that differ in known ways."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from rlcore.artifacts import DatasetRef, DuplicatesRef
from rlcore.data.contamination import (
    HASH_BITS,
    NEAR_IMAGE,
    Duplicate,
    ImagePrint,
    ProblemPrint,
    compare_datasets,
    different_bits,
    find_duplicates,
    image_print,
    most_alike,
    problem_print,
    read_pairs,
    summary,
)
from rlcore.data.synthetic.geometry import draw_problem
from rlcore.data.table import IMAGES, PreparedRow, write_rows
from rlcore.errors import ConfigError
from rlcore.evaluation.report import whole_and_clean
from rlcore.evaluation.rows import EvalRow
from rlcore.evaluation.rows import write_rows as write_eval_rows
from rlcore.jobs.duplicates import find
from rlcore.specs import DuplicatesSpec
from rlcore.types import ImageRef, Problem
from tasks.cli.contamination import contamination_tables
from tasks.report.contamination import show_pairs

TEXT = "Tom has 3 apples and buys 4 more at the market"  # 11 words, 7 shingles of 5


def problem(text: str, *images: ImagePrint, name: str = "p") -> ProblemPrint:
    refs = {str(index): image for index, image in enumerate(images)}
    row = Problem(name, text, tuple(ImageRef(key, 1, 1) for key in refs), answer="", source="")
    return problem_print(row, lambda ref: refs[ref.sha256])


def kinds(training: Sequence[ProblemPrint], evaluation: Sequence[ProblemPrint]) -> list[str]:
    return [pair.kind for pair in find_duplicates(training, evaluation)]


def picture(index: int = 0) -> Image.Image:
    return draw_problem("train", index, 0).picture.convert("RGB").resize((252, 196))


def test_case_spaces_and_image_markers_are_no_difference():
    assert kinds([problem(TEXT)], [problem("<image>" + TEXT.upper().replace(" ", "  "))]) == ["exact"]
    assert kinds([problem("Find $x+1$.")], [problem("Find $x-1$.")]) == []  # a symbol is


def test_a_near_text_by_hand():
    # one more word: 7 shingles of 8 are common, 7 / 8 = 0.875; two more words: 7 / 9 = 0.78
    (near,) = find_duplicates([problem(TEXT, name="t")], [problem(TEXT + " today", name="e")])
    assert near == Duplicate("e", "t", "near", 7 / 8, 0)
    assert kinds([problem(TEXT)], [problem(TEXT + " today alone")]) == []


def test_the_best_match_counts_and_the_first_of_equals():
    training = [problem(TEXT + " today", name="near"), problem(TEXT, name="first"), problem(TEXT, name="second")]
    (found,) = find_duplicates(training, [problem(TEXT, name="e")])
    assert (found.training_id, found.kind, found.similarity) == ("first", "exact", 1.0)


def test_the_hash_sees_the_picture_and_not_its_encoding():
    one = picture()
    own = image_print(one)
    assert own.pixels == image_print(one.copy()).pixels
    smaller = image_print(one.resize((126, 98), Image.Resampling.LANCZOS))
    brighter = image_print(one.point(lambda value: min(255, value + 6)))
    for changed in (smaller, brighter):
        assert changed.pixels != own.pixels
        assert different_bits(own.bits, changed.bits) <= NEAR_IMAGE
    others = [different_bits(own.bits, image_print(picture(index)).bits) for index in range(1, 8)]
    noise = np.random.default_rng(0).integers(0, 256, (196, 252, 3), np.uint8)
    assert min(others) > NEAR_IMAGE
    assert abs(int(different_bits(own.bits, image_print(Image.fromarray(noise)).bits)) - HASH_BITS / 2) < 40


def test_the_bits_of_a_gradient_by_hand():
    """Grey values that fall along x alone: all frequencies along y but the 0th are 0."""
    row = np.linspace(255, 0, 64).astype(np.uint8)
    bits = np.unpackbits(image_print(Image.fromarray(np.tile(row, (64, 1)))).bits.view(np.uint8)).reshape(16, 16)
    assert bits[0, 1] == 1  # the slowest wave falls as the values do
    assert bits[0, 0] == 0  # the mean is left out
    assert different_bits(np.array([0, 0, 0, 7], np.uint64), np.array([1, 0, 0, 0], np.uint64)) == 4


def test_images_and_text_decide_together():
    one, other = image_print(picture(0)), image_print(picture(1))
    near = image_print(picture(0).resize((126, 98), Image.Resampling.LANCZOS))
    training = [problem(TEXT, one)]
    assert kinds(training, [problem(TEXT, one)]) == ["exact"]
    assert kinds(training, [problem(TEXT, near)]) == ["near"]
    assert kinds(training, [problem("Find y.", near)]) == ["same_images"]
    assert kinds(training, [problem(TEXT, other)]) == []  # "Find x." alone says nothing
    assert kinds(training, [problem(TEXT)]) == []
    assert kinds(training, [problem(TEXT, one, other)]) == []  # training has only one of its images
    assert kinds([problem(TEXT, one, other)], [problem(TEXT, one)]) == ["same_images"]


def test_a_marked_figure_is_near_and_not_exact():
    marked = picture(0)
    ImageDraw.Draw(marked).point((5, 5), fill=(200, 0, 0))
    pair = find_duplicates([problem(TEXT, image_print(picture(0)))], [problem(TEXT, image_print(marked))])
    assert [found.kind for found in pair] == ["near"]


def test_the_table_by_hand():
    found = [Duplicate("a", "t", "exact", 1.0, 0), Duplicate("b", "t", "same_images", 0.1, 0)]
    table = summary(found, 8)
    assert "| exact: same text, same images | 1 | 12.5% |" in table
    assert "| any of these | 2 | 25.0% |" in table
    assert "| clean | 6 | 75.0% |" in table
    assert "| clean | 0 | 0.0% |" in summary([], 0)


@pytest.mark.parametrize("training", [[], [problem("")]])
def test_nothing_to_compare_with(training):
    assert kinds(training, [problem(TEXT), problem(TEXT, image_print(picture()))]) == []


def test_accuracy_on_the_clean_part_by_hand():
    # a: 1 of 2 right, b: 2 of 2, c: not graded. All 0.5; clean without b: 0.25; the duplicate 1
    right = {"a": [1.0, 0.0], "b": [1.0, 1.0], "c": [None, None]}
    rows = [made_row(name, sample, value) for name, values in right.items() for sample, value in enumerate(values)]
    parts = whole_and_clean(rows, {"b"})
    assert {name: (part.problems, part.accuracy) for name, part in parts.items()} == {
        "all": (3, 0.5),
        "clean": (2, 0.25),
        "duplicates": (1, 1.0),
    }
    assert parts["clean"].low <= 0.25 <= parts["clean"].high
    assert whole_and_clean(rows, ()).keys() == {"all", "clean"}


def made_row(name: str, sample: int, accuracy: float | None) -> EvalRow:
    return EvalRow(name, sample, "", "", "", 0.0, accuracy, None, accuracy is not None, "stop", 1)


def write_dataset(folder: Path, problems: Sequence[tuple[str, bytes | None]], source: str = "files") -> DatasetRef:
    """A resized dataset of texts and pictures."""
    (folder / IMAGES).mkdir(parents=True)
    rows = []
    for index, (text, content) in enumerate(problems):
        images: tuple[ImageRef, ...] = ()
        if content is not None:
            name, image = hashlib.sha256(content).hexdigest(), Image.open(io.BytesIO(content)).convert("RGB")
            image.save(folder / IMAGES / f"{name}.png")
            images = (ImageRef(name, *image.size),)
        row = Problem(f"{folder.name}/{index}", "<image>" * len(images) + text, images, str(index), source)
        rows.append(PreparedRow(row, index, 1, 0))
    write_rows(folder, rows)
    return DatasetRef(
        path=str(folder), digest=folder.name, source=source, num_problems=len(rows), num_rejected=0, num_images=0,
        max_prompt_tokens=1,
    )  # fmt: skip


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind, quality=80)
    return file.getvalue()


def found_by_the_job(train: DatasetRef, evaluation: DatasetRef, out_dir: Path) -> tuple[DuplicatesRef, list[Duplicate]]:
    spec = DuplicatesSpec(
        result=out_dir / "result.json", train=train, evaluation=evaluation, out_dir=out_dir / "made", threads=2
    )
    found = find(spec)
    return found, read_pairs(Path(found.path))


def test_the_job_finds_the_text_the_changed_text_and_the_picture_saved_anew(tmp_path: Path):
    train = write_dataset(
        tmp_path / "train", [(TEXT, None), (TEXT, encoded(picture(0))), ("Find x.", encoded(picture(1)))]
    )
    evaluation = write_dataset(
        tmp_path / "evaluation",
        [
            (TEXT + " today", None),  # near
            (TEXT, encoded(picture(0), "JPEG")),  # near: the same text, and other pixels
            (TEXT.upper(), encoded(picture(0))),  # exact
            ("Find y.", encoded(picture(1), "JPEG")),  # the same picture with another question
            ("Is this one new?", encoded(picture(2))),
        ],
    )
    found, pairs = found_by_the_job(train, evaluation, tmp_path)
    assert (found.problems, found.exact, found.near, found.same_images, found.found) == (5, 1, 2, 1, 4)
    assert found.text == "4 of 5 problems: exact 1, near 2, same_images 1"
    assert [(pair.evaluation_id, pair.training_id, pair.kind) for pair in pairs] == [
        ("evaluation/0", "train/0", "near"),
        ("evaluation/1", "train/1", "near"),
        ("evaluation/2", "train/1", "exact"),
        ("evaluation/3", "train/2", "same_images"),
    ]
    assert found.digest == hashlib.sha256(Path(found.path).read_bytes()).hexdigest()
    assert [pair.evaluation_id[-1] for pair in most_alike(pairs, 3)] == ["2", "1", "0"]
    shown = show_pairs(pairs, Path(train.path), Path(evaluation.path))
    assert [(item.validation.answer, item.training.answer) for item in shown] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "1"),
        ("3", "2"),
    ]


def test_of_drawn_problems_only_exact_duplicates_count(tmp_path: Path):
    """Drawn figures of one kind differ in a number, so nearly all of them are near to each other."""
    drawn = [("Sides?", encoded(draw_problem("train", 4 * index, 0).picture)) for index in range(6)]
    train = write_dataset(tmp_path / "train", drawn[:4], "synthetic-geometry@train")
    same = write_dataset(tmp_path / "same", drawn[3:], "synthetic-geometry@validation")
    found, pairs = found_by_the_job(train, same, tmp_path)
    assert [(pair.evaluation_id, pair.training_id, pair.kind) for pair in pairs] == [("same/0", "train/3", "exact")]
    assert found.text == "1 of 3 problems: exact 1"
    files = write_dataset(tmp_path / "files", drawn[3:])
    assert not compare_datasets(Path(train.path), Path(files.path)).exact_only


def test_the_command_reads_prepared_datasets_and_completions(tmp_path: Path):
    for folder, words in (("train", [TEXT, "1 + 1 = ?"]), ("evaluation", [TEXT, "What is the sum of two and three?"])):
        (tmp_path / folder).mkdir()
        rows = [PreparedRow(Problem(f"{folder}/{i}", text, (), "", "s"), i, 1, 0) for i, text in enumerate(words)]
        write_rows(tmp_path / folder, rows)
    table, pairs = tmp_path / "completions.parquet", tmp_path / "pairs.jsonl"
    write_eval_rows([made_row("evaluation/0", 0, 1.0), made_row("evaluation/1", 0, 0.0)], table)
    text = contamination_tables(tmp_path / "train", tmp_path / "evaluation", completions=table, pairs=pairs)
    assert "| exact: same text, same images | 1 | 50.0% |" in text
    assert "| evaluation/0 | train/0 | exact | 1.00 | 0 |" in text
    assert "| clean | 1 | 0.000 | 0.000 to 0.000 |" in text
    assert json.loads(pairs.read_text()) == {
        "evaluation_id": "evaluation/0", "training_id": "train/0", "kind": "exact", "similarity": 1.0, "bits": 0,
    }  # fmt: skip
    write_eval_rows([made_row("elsewhere", 0, 1.0)], table)
    with pytest.raises(ConfigError, match="problems that the dataset lacks, such as 'elsewhere'"):
        contamination_tables(tmp_path / "train", tmp_path / "evaluation", completions=table, pairs=None)
    with pytest.raises(ConfigError, match="no table of completions"):
        contamination_tables(tmp_path / "train", tmp_path / "evaluation", completions=pairs, pairs=None)
