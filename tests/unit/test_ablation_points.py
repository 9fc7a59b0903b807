"""The loop over jobs: slots, further tries, what is done already, an interrupt. The runner is a fake behind the
Protocol; the result files are real."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from rlcore.ablation.plan import Job, make_plan
from rlcore.ablation.table import PointNumbers, make_rows
from rlcore.artifacts import EvalReport
from rlcore.config import AblationConfig
from rlcore.errors import ConfigError, DivergedError, TrainerFailedError
from tasks.ablating import _markdown
from tasks.ablation import Ablation, existing_ablation, open_ablation
from tasks.ablation_points import run_jobs
from tasks.experiments import load_experiment
from tasks.runs import Run

TINY = "grpo-geo3k-tiny"


@pytest.fixture
def ablation(tmp_path: Path) -> Ablation:
    settings = AblationConfig(points=(("training.learning_rate=1",), ("training.learning_rate=2",)), seeds=(0, 1))
    return Ablation(make_plan("study", TINY, (), settings, partial(load_experiment, TINY)), tmp_path)


def report_at(step: int) -> EvalReport:
    return EvalReport(
        policy="p", step=step, dataset_digest="d", num_problems=1, samples_per_problem=1, accuracy=0, accuracy_low=0,
        accuracy_high=0, reward=0, reward_low=0, reward_high=0, truncated=0, ungraded=0, table="t", seconds=1,
    )  # fmt: skip


class FakeRunner:
    """Ends each job at the second look; ``fails`` says with what each try of a run ends."""

    def __init__(self, ablation: Ablation, slots: int, fails: dict[str, list[Exception | None]]) -> None:
        self.ablation, self.slots, self.fails = ablation, slots, fails
        self.started: list[str] = []
        self.most = 0
        self.stopped = False
        self.looked: set[str] = set()

    def free(self, at_work: int) -> bool:
        self.most = max(self.most, at_work)
        return at_work < self.slots

    def start(self, job: Job) -> None:
        self.started.append(self.ablation.run_id(job))

    def ended(self, job: Job) -> bool:
        run_id = self.ablation.run_id(job)
        if run_id not in self.looked:
            self.looked.add(run_id)
            return False
        self.looked.remove(run_id)
        endings = self.fails.get(run_id, [])
        error = endings.pop(0) if endings else None
        if error is None:
            run = Run(run_id=run_id, run_dir=Path(run_id), experiment=job.point.experiment)
            with self.ablation.noted_failure(job):
                self.ablation.note(job, run, "m", report_at(job.steps))
        else:
            with pytest.raises(type(error)), self.ablation.noted_failure(job):
                raise error
        return True

    def stop(self) -> None:
        self.stopped = True


def names(jobs: list[Job]) -> list[str]:
    return [f"{job.point.name}-s{job.seed}" for job in jobs]


def test_a_failed_point_is_tried_again_alone_and_one_beyond_help_is_not(ablation: Ablation) -> None:
    fails: dict[str, list[Exception | None]] = {
        "study-p01-s0": [TrainerFailedError("once")],
        "study-p01-s1": [TrainerFailedError("first"), TrainerFailedError("and last")],
        "study-p02-s0": [DivergedError("gradients are nan")],
    }
    runner = FakeRunner(ablation, 2, fails)
    jobs = ablation.plan.jobs(["base", "p01", "p02"], 0)
    failed = run_jobs(ablation, jobs, runner, lambda: None, lambda _: None)
    assert names(failed) == ["p02-s0", "p01-s1"]
    assert runner.most == 2
    assert {run_id: runner.started.count(run_id) for run_id in runner.started} == {
        "study-base-s0": 1, "study-p01-s0": 2, "study-p02-s0": 1, "study-base-s1": 1, "study-p01-s1": 2,
        "study-p02-s1": 1,
    }  # fmt: skip
    assert ablation.failure(jobs[1]) is None, "its second try went well"
    found = ablation.failure(jobs[2])
    assert found is not None
    assert (found.kind, found.message, found.final) == ("DivergedError", "gradients are nan", True)
    assert sorted(item.run_id for item in ablation.results()) == [
        "study-base-s0", "study-base-s1", "study-p01-s0", "study-p02-s1",
    ]  # fmt: skip

    again = FakeRunner(ablation, 2, {})
    assert run_jobs(ablation, jobs, again, lambda: None, lambda _: None) == []
    assert again.started == ["study-p02-s0", "study-p01-s1"], "what is done is not done again"


def test_a_failure_without_a_message_is_in_the_report(ablation: Ablation) -> None:
    silent, told = ablation.plan.jobs(["p01"], 0)
    for job, error in ((silent, AssertionError()), (told, TrainerFailedError("at first\nand in the end"))):
        with pytest.raises(type(error)), ablation.noted_failure(job):
            raise error
    points = ablation.plan.points
    rows = make_rows([PointNumbers(point.name, point.label, "failed", accuracy={}, gpu_hours=0.0) for point in points])
    lines = _markdown(ablation, rows).splitlines()
    assert f"- {silent.point.label}, seed 0, to step {silent.steps}: AssertionError" in lines
    assert f"- {told.point.label}, seed 1, to step {told.steps}: TrainerFailedError: and in the end" in lines


def test_an_interrupt_stops_what_is_at_work(ablation: Ablation) -> None:
    runner = FakeRunner(ablation, 1, {})

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(ablation, ablation.plan.jobs(["base"], 0), runner, lambda: None, interrupted)
    assert runner.stopped


def test_another_ablation_of_the_same_name_is_refused_and_an_impossible_one_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=r"ablation rungs: Input should be greater than or equal to 1"):
        open_ablation(TINY, None, "study", points=[["training.learning_rate=1"]], rungs=0)
    with pytest.raises(ConfigError, match="neither a grid nor points"):
        open_ablation(TINY, None, "study", grid=None)
    assert not (tmp_path / "ablations").exists()
    with pytest.raises(ConfigError, match=r"no ablation 'study' under .*Found: none"):
        existing_ablation("study")

    first = open_ablation(TINY, ["training.steps=40"], "study", points=[["training.learning_rate=1"]], seeds=[1])
    again = open_ablation(TINY, ["training.steps=40"], "study", points=[["training.learning_rate=1"]], seeds=[1])
    assert first == again == existing_ablation("study")
    with pytest.raises(
        ConfigError, match=r'(?s)asked for as\n  grpo-geo3k-tiny training\.steps=40 .*"seeds":\[1\].*and now as'
    ):
        open_ablation(TINY, ["training.steps=40"], "study", points=[["training.learning_rate=1"]], seeds=[2])
