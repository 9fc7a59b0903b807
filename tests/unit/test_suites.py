"""Every suite loads from a file with the columns of the published one, and a right answer to each problem counts."""

from __future__ import annotations

from pathlib import Path
from string import ascii_uppercase

import pytest

from rlcore.config import ExperimentConfig, build_experiment
from rlcore.config.data import DataConfig, LayoutConfig
from rlcore.data.prepare.files import source_files
from rlcore.data.prepare.layout import lay_out
from rlcore.data.table import load_problems
from rlcore.errors import ConfigError, DataError
from rlcore.evaluation.suites import all_suites, read_suite, suites_called
from rlcore.jobs.prepare import prepare
from rlcore.rewards import make_reward
from rlcore.specs import PrepareSpec
from rlcore.types import Problem
from tests.published_layouts import NAMES, write_suite

BASE = build_experiment({"name": "suites", "model": {"path": "tiny", "tiny": {"task": "geometry"}}}, [])


def _prepare(folder: Path, name: str, base: ExperimentConfig = BASE) -> tuple[ExperimentConfig, list[Problem]]:
    write_suite(folder, name)
    experiment = all_suites()[name].experiment(base, folder=str(folder))
    source = experiment.data.validation
    spec = PrepareSpec(
        result=folder / "result.json",
        source=source,
        source_path=folder / name,
        split="validation",
        data=experiment.data,
        model=experiment.model,
        datasets_dir=folder / "datasets",
    )
    return experiment, load_problems(Path(prepare(spec).path))


def test_there_is_a_fixture_for_every_suite() -> None:
    assert sorted(NAMES) == sorted(all_suites())


ANSWERS = {
    "mathvista": (r"\boxed{B}", r"\boxed{1.52}"),
    "mathverse": (r"\boxed{B}", r"\boxed{7}"),
    "mmmu": (r"\boxed{the painter's own}", "Answer: 0.5"),
    "geoqa": ("<answer>40</answer>", "<answer>41</answer>"),
    "superclevr": ("<answer>2</answer>", "<answer>3 things</answer>"),
    "geometry3k": (r"\boxed{2\sqrt{3}}", r"\boxed{2 \sqrt{3}}"),
    "math500": (r"\boxed{2}", r"\boxed{2}"),
    "gsm8k": ("It is 1.", "#### 2"),
    "aime24": (r"\boxed{33}", r"\boxed{033}"),
    "aime25": (r"\boxed{70}", r"\boxed{71}"),
    "countdown": ("<answer>4 * 6 * 1</answer>", "<answer>4 + 4 + 3 - 2</answer>"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_suite_loads_and_grades(tmp_path: Path, name: str) -> None:
    experiment, problems = _prepare(tmp_path, name)
    assert len(problems) == len(ANSWERS[name]) == 2
    reward = make_reward(experiment.reward, max_completion_tokens=64)
    for problem, right in zip(problems, ANSWERS[name], strict=True):
        assert reward(f"<think>So.</think> {right}", problem, 9, "stop").parts["accuracy"] == 1
        wrong = right.translate(str.maketrans("0123456789AB", "5678901234BA")).replace("painter", "potter")
        assert reward(f"<think>So.</think> {wrong}", problem, 9, "stop").parts["accuracy"] == 0
    column = experiment.evaluation.group_column
    assert column is None or all(column in problem.extra for problem in problems)


def test_texts_of_the_problems(tmp_path: Path) -> None:
    _, (choice, value) = _prepare(tmp_path, "mathvista")
    assert choice.question == "<image>Which bar is taller?\n\nChoices:\n(A) red\n(B) blue"
    assert (choice.problem_id, choice.answer) == ("1", "B")
    assert value.question == "<image>How long is the rod? (Unit: cm) Round to 1 decimal(s)."
    _, (choice, opened) = _prepare(tmp_path, "mmmu")
    assert choice.question == "Which of them continues <image>?\n\nChoices:\n(A) <image>\n(B) the painter's own"
    assert len(choice.images) == 2
    assert (opened.answer, opened.extra["answers"]) == ("1/2", ["0.5"])
    _, games = _prepare(tmp_path, "countdown")
    assert games[0].question == "Using the numbers 4, 6, 1, make 24."


def _laid_out(layout: LayoutConfig, **row: object) -> dict[str, object]:
    return dict(lay_out(row, DataConfig(layout=layout)))


def test_images_come_in_the_order_of_their_references() -> None:
    layout = LayoutConfig(image_columns=("image_1", "image_2", "image_3"))
    row = _laid_out(layout, problem="<image 2>, <image 1>, <image 2>, <image 9>", answer="1",
                    image_1="one", image_2="two", image_3="three")  # fmt: skip
    assert row == {
        "problem": "<image><image>, <image>, <image>, <image 9>",
        "images": ["three", "two", "one", "two"],
        "answer": "1",
    }


@pytest.mark.parametrize(
    ("cell", "choices"),
    [
        (["a", "b"], ["a", "b"]),
        ("['a', \"b's\"]", ["a", "b's"]),
        ("[]", None),
        ("[0, 1]", None),  # an interval or a pair
        ("['a'", None),
        ("[__import__('os')]", None),
        (None, None),
    ],
)
def test_choices_are_a_list_or_the_text_of_one(cell: object, choices: list[str] | None) -> None:
    row = _laid_out(LayoutConfig(choices_column="options"), problem="?", answer="A", options=cell)
    assert row.get("choices") == choices


def test_an_answer_that_no_choice_has_is_rejected() -> None:
    layout = LayoutConfig(choices_column="options", choice_given_as="text")
    assert _laid_out(layout, problem="?", answer="c", options=["a", "b"])["answer"] is None


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    base = BASE.model_copy(update={"data": BASE.data.model_copy(update={"layout": LayoutConfig(choices_column="x")})})
    write_suite(tmp_path, "math500")
    data = base.data
    spec = PrepareSpec(result=tmp_path / "r.json", source="x", source_path=tmp_path / "math500", split="validation",
                       data=data, model=base.model, datasets_dir=tmp_path / "datasets")  # fmt: skip
    with pytest.raises(DataError, match="'x'"):
        prepare(spec.model_copy(update={"source": f"{tmp_path / 'math500'}@test"}))


def _accuracy(given: str, answer: str, **extra: object) -> float:
    reward = make_reward(
        build_experiment({"name": "x", "reward": {"name": "choice_or_value"}}, []).reward, max_completion_tokens=8
    )
    problem = Problem("p", "?", (), answer, "source", extra)
    return reward(given, problem, 1, "stop").parts["accuracy"]


@pytest.mark.parametrize(
    ("given", "right"),
    [
        (r"\boxed{C}", True),
        (r"\boxed{(C) 12 cm}", True),
        ("<answer>12 cm</answer>", True),
        ("Answer: c is wrong, 12 cm", False),  # more than the choice
        (r"\boxed{A}", False),
        (r"\boxed{same}", False),  # two choices have this text
        (r"\boxed{Z}", False),
        ("12 cm", False),  # nowhere stated
    ],
)
def test_a_choice_is_named_by_letter_or_text(given: str, *, right: bool) -> None:
    choices = ["same", "same", "12 cm", "15 cm"]
    assert _accuracy(given, "C", choices=choices) == right


def test_values() -> None:
    assert _accuracy(r"\boxed{yes}", "Yes") == 1
    assert _accuracy(r"\boxed{3.14159}", "3.14", precision=2.0) == 1
    assert _accuracy(r"\boxed{3.2}", "3.1", precision=1.0) == 0
    assert _accuracy(r"\boxed{30}", "30°") == 1
    assert _accuracy(r"\boxed{B}", "B") == 1
    assert _accuracy(r"\boxed{a}", "B") == 0
    assert _accuracy("", "0") == 0
    letters = ascii_uppercase[:10]
    assert [_accuracy(rf"\boxed{{{letter}}}", "J", choices=list("0123456789")) for letter in letters] == [0] * 9 + [1]


def test_names_of_suites_and_groups() -> None:
    both = [suite.name for suite in suites_called(["gsm8k", "math-text"])]
    assert both[0] == "gsm8k"
    assert len(both) == len(set(both)) > 4
    with pytest.raises(ConfigError, match="no suite 'gsm'.*gsm8k.*math-text"):
        suites_called(["gsm"])
    groups = {group for suite in all_suites().values() for group in suite.groups}
    assert not groups & all_suites().keys()


def test_what_belongs_to_the_model_stays() -> None:
    own = {"data": {"system_prompt": "Hi", "template": "r1v"}, "reward": {"name": "math", "thoughts": "strip"}}
    base = build_experiment({"name": "x", **own}, [])
    of_suite = all_suites()["aime25"].experiment(base, problems=4, overrides=["evaluation.samples=2"])
    assert (of_suite.data.system_prompt, of_suite.data.template, of_suite.reward.thoughts) == ("Hi", "math", "strip")
    assert (of_suite.evaluation.problems, of_suite.evaluation.samples) == (4, 2)
    assert of_suite.data.validation == "MathArena/aime_2025@train"


def test_an_empty_layout_adds_the_missing_markers() -> None:
    data = build_experiment({"name": "x"}, ["data.layout={}"]).data
    row = {"problem": "How many?", "answer": 2, "images": ["a.png", "b.png"]}
    assert lay_out(row, data)["problem"] == "<image><image>How many?"
    assert lay_out({**row, "problem": "One <image>, one <image>."}, data)["problem"] == "One <image>, one <image>."


def test_sources() -> None:
    suites = all_suites()
    assert suites["countdown"].source(None) == "Jiayi-Pan/Countdown-Tasks-3to4@train[327680:328704]"
    with pytest.raises(ConfigError, match="--data"):
        suites["geoqa"].source(None)


def test_a_folder_without_the_suite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no copy of the suite gsm8k: looked for gsm8k, gsm8k\.parquet"):
        all_suites()["gsm8k"].source(str(tmp_path))
    (tmp_path / "gsm8k.jsonl").touch()
    assert all_suites()["gsm8k"].source(str(tmp_path)) == str(tmp_path / "gsm8k.jsonl")


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("title = 3")
    with pytest.raises(ConfigError, match=r"own\.toml describes no suite"):
        read_suite(tmp_path / "own.toml")


def test_a_split_of_any_name_is_found(tmp_path: Path) -> None:
    for name in ("test-00000.parquet", "testmini-00000.parquet"):
        (tmp_path / name).touch()
    assert [path.name for path in source_files(tmp_path, "testmini")] == ["testmini-00000.parquet"]
    assert [path.name for path in source_files(tmp_path, "test")] == ["test-00000.parquet"]
