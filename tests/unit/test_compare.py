"""Comparisons of evaluated policies: what is paired, what is left out and said, and where evaluations are found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from infra.settings import Settings
from rlcore.artifacts import EvalReport
from rlcore.errors import ConfigError
from rlcore.evaluation.comparison import Evaluated, compare_on_suite
from rlcore.evaluation.records import ValidationRecord, record_folder, write_record
from rlcore.evaluation.report import summarise
from rlcore.evaluation.rows import EvalRow, write_rows
from tasks.champion import Evaluation
from tasks.compare import compare_policies, format_comparisons
from tasks.experiments import load_experiment
from tasks.run import append_line


def rows(right: Sequence[float], first: int = 0, answer: str = "1") -> list[EvalRow]:
    return [
        EvalRow(f"p{first + i}", 0, f"question {first + i}", answer, "c", r, r, None, True, "stop", 3)
        for i, r in enumerate(right)
    ]


def evaluated(policy: str, of: Sequence[EvalRow], digest: str = "d") -> Evaluated:
    return Evaluated(policy, "validation", digest, 1, of)


def report(folder: Path, of: Sequence[EvalRow], step: int = 0, digest: str = "digest") -> EvalReport:
    """Writes the table and returns its report."""
    table = folder / "completions.parquet"
    write_rows(of, table)
    return summarise(
        of, policy=str(folder), step=step, dataset_digest=digest, table=str(table), seconds=1.0, at=float(step)
    )


# ---- on one suite


def test_thirteen_gains_of_thirteen_decide_one_comparison_and_not_two() -> None:
    """The capital after 13 gains is 54.9: above 2 / 0.05 = 40 of one comparison, below 80 of each of two."""
    base, other = evaluated("a", rows([0.0] * 13)), evaluated("b", rows([1.0] * 13))
    one = compare_on_suite(base, [other]).policies[1].against_first
    assert one is not None
    assert (one.verdict, one.decided_after, one.difference, one.problems) == ("better", 13, 1.0, 13)
    assert (one.confidence, one.needed_e_value) == (0.95, 20.0)
    two = compare_on_suite(base, [other, evaluated("c", rows([0.0] * 13))]).policies[1].against_first
    assert two is not None
    assert (two.verdict, two.confidence, two.needed_e_value) == ("undecided", 0.975, 40.0)
    assert two.e_value == one.e_value
    assert two.more_problems == 1  # (1.5^14 + ...) / 4 = 81.0


def test_what_does_not_match_is_left_out_and_named() -> None:
    base = evaluated("a", [*rows([0.0] * 4), *rows([0.0], first=9)])
    other = evaluated("b", [*rows([1.0] * 3), *rows([0.0], first=3, answer="2")], digest="other")
    found = compare_on_suite(base, [other])
    against = found.policies[1].against_first
    assert against is not None
    assert (against.problems, against.difference) == (3, 1.0)
    assert (found.policies[0].problems, found.policies[1].accuracy) == (5, 0.75)
    assert found.notes == (
        "a and b have differently prepared data (digests d and other)",
        "b lacks 1 problem (p9); left out of the difference",
        "b has another question or answer for 1 problem (p3); left out",
    )
    with pytest.raises(ConfigError, match="no problem in common on validation: 1 and 1 problems"):
        compare_on_suite(evaluated("a", rows([1.0])), [evaluated("b", rows([1.0], first=1))])


# ---- where evaluations are found


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """With a run that was evaluated at steps 0 and 40, on a benchmark, and by a process of its own."""
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    settings = Settings()
    run = settings.runs_dir / "run"
    run.mkdir(parents=True)
    (run / "experiment.json").write_text(load_experiment("grpo-geo3k-tiny").model_dump_json())
    for step, right in ((0, [0.0] * 20), (40, [1.0] * 20)):
        write_record(run, ValidationRecord(suite="s", report=report(record_folder(run, step), rows(right), step)))
    sums = report(tmp_path / "sums", rows([1.0] * 4), 40, "sums")
    append_line(run / "evaluations.jsonl", Evaluation(benchmark="sums", key="k", report=sums).model_dump_json())
    job = settings.evaluations_dir / "evaluate-1"
    again = report(job, rows([1.0] * 6), 40, "other").model_copy(update={"policy": str(run / "checkpoints" / "40")})
    (job / "report.json").write_text(again.model_dump_json())
    return settings


def suites(names: Sequence[str], settings: Settings) -> dict[str, list[tuple[str, int | None, float]]]:
    return {
        item.suite: [(p.policy, p.step, p.accuracy) for p in item.policies]
        for item in compare_policies(names, settings)
    }


def test_a_run_is_its_newest_evaluation_of_each_suite_or_that_of_a_step(settings: Settings) -> None:
    assert suites(["run:0", "run"], settings) == {"validation": [("run:0", 0, 0.0), ("run", 40, 1.0)]}
    assert suites(["run:40", "run"], settings) == {
        name: [("run:40", 40, 1.0), ("run", 40, 1.0)] for name in ("validation", "sums", "data other")
    }
    with pytest.raises(ConfigError, match=r"run run has no evaluation of step 7 .* Evaluated steps: 0, 40\."):
        compare_policies(["run", "run:7"], settings)


def test_a_folder_or_a_file_of_completions_is_an_evaluation(settings: Settings, tmp_path: Path) -> None:
    write_rows(rows([0.0] * 4), tmp_path / "mine.parquet")
    assert suites(["mine.parquet", "sums", "runs/run"], settings) == {
        "validation": [("mine.parquet", 0, 0.0), ("sums", 0, 1.0), ("runs/run", 40, 1.0)]
    }
    job = str(settings.evaluations_dir / "evaluate-1")
    assert suites(["run", job], settings) == {"data other": [("run", 40, 1.0), (job, 40, 1.0)]}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"^empty has no completions\.parquet. Allowed: RUN"):
        compare_policies(["run", "empty"], settings)


def test_one_policy_and_no_common_suite_are_refused(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least two different policies, found run, run"):
        compare_policies(["run", "run"], settings)
    write_rows(rows([0.0], first=50), tmp_path / "far.parquet")
    with pytest.raises(ConfigError, match=r"no suite on which run and another.*Found: run: validation \(step 40, data"):
        compare_policies(["run", "far.parquet"], settings)


def test_the_table_and_the_json_say_the_same(settings: Settings) -> None:
    found = compare_policies(["run:0", "run"], settings)
    text = format_comparisons(found)
    assert text.splitlines()[0] == "suite validation"
    assert "better than the first: decided after 13 of 20 problems" in text
    assert "An e-value of 20 decides, at whatever" in text
    (suite,) = json.loads(format_comparisons(found, json=True))["suites"]
    assert suite["policies"][1]["against_first"]["decided_after"] == 13
