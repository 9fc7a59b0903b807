"""Evaluation while training: when it is due, what it leaves, and what a resume keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlcore.artifacts import DatasetRef, EvalReport, ModelRef
from rlcore.config import EvaluationConfig, ExperimentConfig, build_experiment
from rlcore.evaluation.records import (
    ValidationRecord,
    as_step_record,
    cut_records,
    has_plateaued,
    read_records,
    suite_digest,
)
from rlcore.evaluation.validation import Validation
from rlcore.training.loop import train
from rlcore.training.run import TrainState
from rlcore.types import Completion, Problem, SampledGroup, SampleRequest, Score
from tests.quiet_grader import QuietGrader
from tests.unit import toy_run as toy

PROBLEMS = [Problem(f"v{index}", f"question {index}", (), "1", "test") for index in range(4)]
DATASET = DatasetRef(
    path="/data", digest="validation", source="s", num_problems=4, num_rejected=0, num_images=0, max_prompt_tokens=9
)
BASE = ModelRef(path="/model", digest="base", source="tiny", num_parameters=1)


class Engine:
    """Every completion is its request's problem; counts what the trainer's samplers are asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        self.calls.append(f"generate {len(requests)}")
        for place, request in enumerate(requests):
            done = Completion.one_turn(
                np.zeros(3, np.int32), np.zeros(3, np.float32), request.problem.problem_id, "stop", 0
            )
            yield {place: SampledGroup(np.zeros(2, np.int32), (done,))}

    def reset_sampler_caches(self) -> None:
        self.calls.append("reset")


class Grader(QuietGrader):
    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        future.set_result([Score(r, {"accuracy": r}, True) for r in (float(c.text == "v0") for c in completions)])
        return future


def validation(run_dir: Path, engine: Engine, stops: Sequence[bool] = ()) -> Validation:
    answers = iter(stops)
    return Validation(
        config=EvaluationConfig(samples=2, temperature=0.5),
        problems=PROBLEMS,
        sampler=engine,
        grader=Grader(),
        run_dir=run_dir,
        suite="suite",
        dataset_digest="validation",
        should_stop=lambda: next(answers, False),
    )


# ---- when


def test_a_number_is_due_after_the_batch_that_reaches_a_multiple_of_it():
    config = EvaluationConfig(every_steps=4)
    assert [step for step in range(1, 13) if config.is_due(step - 1, step)] == [4, 8, 12]
    assert [(a, a + 3) for a in range(0, 12, 3) if config.is_due(a, a + 3)] == [(3, 6), (6, 9), (9, 12)]
    assert [config.is_due_at_segment_end(last=last) for last in (False, True)] == [False, True]


def test_segment_ends_are_due_only_where_they_are_asked_for():
    assert EvaluationConfig().every_steps == "segment"
    assert EvaluationConfig().is_due_at_segment_end(last=False)
    assert not EvaluationConfig().is_due(0, 1000)
    never = EvaluationConfig(every_steps=None)
    assert not never.is_due(0, 1000)
    assert not never.is_due_at_segment_end(last=True)


@pytest.mark.parametrize("wrong", [0, -1, "epoch", 2.5])
def test_other_schedules_are_refused(wrong: object):
    with pytest.raises(ValueError, match="every_steps"):
        EvaluationConfig(every_steps=wrong)


def test_the_loop_evaluates_after_the_sync_of_the_batches_that_are_due(tmp_path: Path):
    config = toy.config(
        training={"problems_per_batch": 4, "mini_batches": 2, "steps": 8}, evaluation={"every_steps": 3},
        segment={"steps": 8}
    )  # fmt: skip
    journal, seen = tmp_path / "journal.jsonl", []
    run = toy.with_updates(config, [0.0] * 8, journal)

    def validate(step: int) -> bool:
        seen.append((step, run.workers.synced, len(toy.metrics_of(journal))))
        return True

    syncs: list[int] = []
    sync = run.workers.sync_weights
    run.workers.synced = None

    def noted(version: int) -> float:
        syncs.append(version)
        run.workers.synced = version
        return sync(version)

    run.workers.sync_weights = noted
    train(replace(run, validate=validate), TrainState(), until_step=8, should_stop=toy.never)
    assert syncs == [2, 4, 6, 8]
    assert seen == [(4, 4, 4), (6, 6, 6)]  # step, the sampler's weights, steps in the journal


# ---- what it leaves


def test_an_evaluation_leaves_one_record_and_an_engine_that_remembers_nothing(tmp_path: Path):
    engine = Engine()
    mine = validation(tmp_path, engine)
    mine.evaluate(0)
    mine.evaluate(8)
    assert engine.calls == ["generate 8", "reset"] * 2
    first, second = read_records(tmp_path)
    assert (first.report.step, second.report.step) == (0, 8)
    assert (first.suite, first.report.accuracy, first.report.num_problems) == ("suite", 0.25, 4)
    assert Path(first.report.table).stat().st_size > 0
    mine.evaluate(8)
    assert engine.calls == ["generate 8", "reset"] * 2  # what is recorded is not repeated
    assert read_records(tmp_path) == [first, second]
    record = as_step_record(second.report)
    assert (record.step, record.timestamp_ms) == (8, round(second.report.at * 1000))
    assert record.metrics["eval/accuracy"] == 0.25
    assert record.metrics["eval/pass_at_2"] == 0.25


def test_a_trainer_that_has_to_stop_leaves_out_the_rest(tmp_path: Path):
    engine = Engine()
    assert not validation(tmp_path, engine, [True]).evaluate(8)
    assert read_records(tmp_path) == []
    assert validation(tmp_path, engine).evaluate(8)
    assert [record.report.step for record in read_records(tmp_path)] == [8]


def test_a_resume_keeps_the_records_up_to_its_step(tmp_path: Path):
    for step in (0, 4, 8):
        validation(tmp_path, Engine()).evaluate(step)
    kept = read_records(tmp_path)[:2]
    half = tmp_path / "validation" / "step-000002"
    half.mkdir()
    (half / "completions.parquet").write_text("half")
    cut_records(tmp_path, 4)
    assert read_records(tmp_path) == kept
    assert sorted(path.name for path in (tmp_path / "validation").iterdir()) == ["step-000000", "step-000004"]


@pytest.mark.parametrize(
    ("accuracies", "patience", "over"),
    [
        ([], 1, False),
        ([0.5], 1, False),
        ([0.5, 0.5], 1, True),  # not above
        ([0.5, 0.6], 1, False),
        ([0.5, 0.6, 0.4], 2, False),
        ([0.5, 0.6, 0.4, 0.6], 2, True),
        ([0.5, 0.6, 0.4, 0.6, 0.7], 2, False),
        ([0.5, 0.6, 0.4, 0.6], None, False),
    ],
)
def test_patience_counts_the_evaluations_since_the_highest(accuracies: list[float], patience: int | None, over: bool):
    report = EvalReport(
        policy="p", step=1, dataset_digest="d", num_problems=2, samples_per_problem=1, accuracy=0.9, accuracy_low=0,
        accuracy_high=1, reward=0, reward_low=0, reward_high=0, truncated=0, ungraded=0, table="t", seconds=1,
    )  # fmt: skip
    records = [ValidationRecord(suite="s", report=report.model_copy(update={"accuracy": a})) for a in accuracies]
    assert has_plateaued(records, patience) is over
    others = [ValidationRecord(suite="other problems", report=report)]
    assert has_plateaued([*others, *records], patience) is (over and bool(records))


def test_a_moved_run_finds_its_tables(tmp_path: Path):
    validation(tmp_path / "old", Engine()).evaluate(0)
    (tmp_path / "old").rename(tmp_path / "new")
    (record,) = read_records(tmp_path / "new")
    assert Path(record.report.table).exists()


# ---- what is the same evaluation


def test_a_suite_is_known_by_what_its_numbers_depend_on():
    def suite(*overrides: str, dataset: DatasetRef = DATASET) -> str:
        return suite_digest(experiment(*overrides), dataset, BASE)

    same = suite()
    for free in ("training.learning_rate=1e-9", "evaluation.every_steps=3", "resources.workers=4", "segment.steps=1",
                 "rollout.kv_cache_mib=9"):  # fmt: skip
        assert suite(free) == same
    for other in ("evaluation.problems=2", "evaluation.temperature=0.5", "rollout.max_completion_tokens=9",
                  'evaluation.group_column="level"'):  # fmt: skip
        assert suite(other) != same
    assert suite(dataset=DATASET.model_copy(update={"digest": "other"})) != same


def test_the_schedule_is_in_no_key_of_an_evaluation():
    """Else every earlier evaluation would be repeated once."""
    assert EvaluationConfig(every_steps=3).suite() == EvaluationConfig().suite()
    assert json.dumps(EvaluationConfig().suite(), sort_keys=True) == (
        '{"problems": null, "samples": 1, "seed": 0, "temperature": 1.0, "top_p": 1.0}'
    )


def experiment(*overrides: str) -> ExperimentConfig:
    return build_experiment({"name": "x", "training": {"steps": 4}, "segment": {"steps": 4}}, list(overrides))
