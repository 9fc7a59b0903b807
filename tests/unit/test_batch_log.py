"""What is kept of a rollout batch for people, and what a checkpoint says about the code that made it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rlcore.rollout.groups import Group
from rlcore.segment.batch_log import write_batch
from rlcore.segment.store import code_digest, installed_versions
from rlcore.types import Completion, ImageRef, Problem, Score


def group(name: str, *texts: str) -> Group:
    completions = tuple(
        Completion.one_turn(np.arange(3 + place, dtype=np.int32), np.zeros(3 + place, np.float32), text, "length", 7)
        for place, text in enumerate(texts)
    )
    scores = tuple(Score(place / 2, {"accuracy": place / 4}, graded=place > 0) for place in range(len(texts)))
    problem = Problem(name, f"{name}?", (ImageRef("a" * 64, 28, 28),), f"answer of {name}", "test")
    return Group(0, problem, "0", 0, np.array([1], np.int32), completions, scores)


def test_the_first_two_problems_are_kept_whole_and_all_that_were_trained_on_by_name(tmp_path: Path) -> None:
    first, second, third = group("p1", "x", "y"), group("p2", "z"), group("p3", "w")
    write_batch(tmp_path, 20, [first, second, third], [third, first])
    rows = json.loads((tmp_path / "samples" / "step-000020.json").read_text())
    assert [(row["problem_id"], row["completion"]) for row in rows] == [("p1", "x"), ("p1", "y"), ("p2", "z")]
    assert rows[1] == {
        "problem_id": "p1", "question": "p1?", "answer": "answer of p1", "images": ["a" * 64], "completion": "y",
        "tokens": 4, "finish_reason": "length", "reward": 0.5, "parts": {"accuracy": 0.25}, "graded": True,
    }  # fmt: skip
    assert not rows[0]["graded"]
    assert json.loads((tmp_path / "trained" / "step-000020.json").read_text()) == {"problems": ["p3", "p1"]}


def test_the_digest_is_of_the_names_and_contents_of_modules_and_templates(tmp_path: Path) -> None:
    def made(name: str, **files: str) -> str:
        folder = tmp_path / name
        for file, text in files.items():
            path = folder / file.replace("__", "/").replace("_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return code_digest(folder)

    first = made("first", a_py="1", data__t_jinja="2")
    assert len(first) == 16
    assert made("same", a_py="1", data__t_jinja="2", notes_txt="whatever") == first
    assert made("code", a_py="3", data__t_jinja="2") != first
    assert made("template", a_py="1", data__t_jinja="3") != first
    assert made("name", b_py="1", data__t_jinja="2") != first
    assert made("place", a_py="1", other__t_jinja="2") != first


def test_versions_are_of_what_is_installed() -> None:
    assert installed_versions(["numpy", "no-such-package"]) == {"numpy": np.__version__}
