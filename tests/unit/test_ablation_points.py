"""The loop over jobs: slots, further tries, what is done already, an interrupt. The runner is a fake behind the
Protocol; the result files are real."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, State
from prefect.states import Completed, Failed, Pending

from infra.settings import Settings
from rlcore.ablation.plan import Job, make_plan
from rlcore.ablation.table import PointNumbers, make_rows
from rlcore.artifacts import EvalReport
from rlcore.config import AblationConfig
from rlcore.errors import ConfigError, DivergedError, TrainerFailedError
from tasks.ablation import runners as ablation_points
from tasks.ablation.runners import DEPLOYMENT, DeployedPoints, LocalPoints, cancel_points, point_runner, run_jobs
from tasks.ablation.steps import _markdown
from tasks.ablation.study import Ablation, existing_ablation, note_result, open_ablation
from tasks.experiments import load_experiment
from tasks.run import Run

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
            with self.ablation.note_failure(job):
                note_result.fn(self.ablation, job, run, "m", report_at(job.steps))
        else:
            with pytest.raises(type(error)), self.ablation.note_failure(job):
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
        with pytest.raises(type(error)), ablation.note_failure(job):
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
        open_ablation.fn(TINY, None, "study", points=[["training.learning_rate=1"]], rungs=0)
    with pytest.raises(ConfigError, match="neither a grid nor points"):
        open_ablation.fn(TINY, None, "study", grid=None)
    assert not (tmp_path / "ablations").exists()
    with pytest.raises(ConfigError, match=r"no ablation 'study' under .*Found: none"):
        existing_ablation("study")

    first = open_ablation.fn(TINY, ["training.steps=40"], "study", points=[["training.learning_rate=1"]], seeds=[1])
    again = open_ablation.fn(TINY, ["training.steps=40"], "study", points=[["training.learning_rate=1"]], seeds=[1])
    assert first == again == existing_ablation("study")
    with pytest.raises(
        ConfigError, match=r'(?s)was started with\n  grpo-geo3k-tiny training\.steps=40 .*"seeds":\[1\].*and now has'
    ):
        open_ablation.fn(TINY, ["training.steps=40"], "study", points=[["training.learning_rate=1"]], seeds=[2])


class PrefectClient:
    """Flow runs as the server keeps them: the same key finds the same one."""

    def __init__(self) -> None:
        self.runs: dict[str, FlowRun] = {}  # by key
        self.asked: list[dict[str, object]] = []
        self.forced: list[tuple[UUID, str, bool]] = []

    def __enter__(self) -> PrefectClient:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def read_deployment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(id=f"id of {name}")

    def create_flow_run_from_deployment(self, deployment: str, *, idempotency_key: str, **asked: object) -> FlowRun:
        self.asked.append({"deployment": deployment, **asked})
        run = FlowRun(id=uuid4(), flow_id=uuid4(), name=str(asked["name"]), tags=asked["tags"], state=Pending())
        return self.runs.setdefault(idempotency_key, run)

    def read_flow_run(self, wanted: UUID) -> FlowRun:
        (found,) = [run for run in self.runs.values() if run.id == wanted]
        return found

    def read_flow_runs(self, *, flow_run_filter: FlowRunFilter, limit: int, offset: int, **_: object) -> list[FlowRun]:
        assert flow_run_filter.tags is not None
        (tag,) = flow_run_filter.tags.all_ or ()
        return [run for run in self.runs.values() if tag in run.tags][offset : offset + limit]

    def set_flow_run_state(self, wanted: UUID, state: State[object], force: bool = False) -> None:
        self.forced.append((wanted, state.name or "", force))
        run = self.read_flow_run(wanted)
        run.state = state


def test_a_deployed_point_is_one_flow_run_however_often_it_is_asked_for(
    ablation: Ablation, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = PrefectClient()
    points = DeployedPoints(ablation, client)  # type: ignore[arg-type]
    first, second, third, *_ = ablation.plan.jobs(["base", "p01"], 0)
    assert points.free(10_000)
    points.start(first)
    assert client.asked == [
        {
            "deployment": f"id of {DEPLOYMENT}", "name": "study-base-s0", "tags": ["ablation:study"],
            "parameters": {"ablation": "study", "point": "base", "seed": 0, "steps": first.steps},
        }
    ]  # fmt: skip
    assert list(client.runs) == [f"study-base-s0-{first.steps}"]
    assert not points.ended(first)
    assert not client.forced
    points.start(second)
    points.start(third)
    client.read_flow_run(points.flow_runs["study-base-s0"]).state = Failed()
    assert (points.ended(first), points.ended(second)) == (True, False)
    again = DeployedPoints(ablation, client)  # type: ignore[arg-type]
    again.start(first)
    assert again.flow_runs["study-base-s0"] == points.flow_runs["study-base-s0"]
    assert client.forced == [(points.flow_runs["study-base-s0"], "AwaitingRetry", True)]
    assert not points.ended(first)
    points.stop()

    client.forced.clear()
    client.read_flow_run(points.flow_runs["study-base-s1"]).state = Completed()
    client.runs["other"] = FlowRun(id=uuid4(), flow_id=uuid4(), name="other", tags=["ablation:other"], state=Pending())
    monkeypatch.setattr(ablation_points, "get_client", lambda **_: client)
    monkeypatch.setattr(ablation_points, "_PAGE", 2)
    parent = FlowRun(id=uuid4(), flow_id=uuid4(), name="study")
    cancel_points(None, parent, Pending())  # type: ignore[arg-type]
    cancelled = {points.flow_runs["study-base-s0"], points.flow_runs["study-p01-s0"]}
    assert {(wanted, name) for wanted, name, _ in client.forced} == {(wanted, "Cancelling") for wanted in cancelled}
    client.forced.clear()
    cancel_points(None, parent, Pending())  # type: ignore[arg-type]
    assert not client.forced, "they are told once"


def test_local_points_are_processes_as_many_as_there_are_slots(
    ablation: Ablation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$@"\n[ "$6" = 1 ] && exec sleep 600\nexit 0\n')
    program.chmod(0o755)
    monkeypatch.setattr(ablation_points.sys, "executable", str(program))
    points = LocalPoints(ablation, Settings(data_dir=tmp_path, gpu_slots=2, stop_grace_seconds=30))
    assert (points.free(1), points.free(2)) == (True, False)
    short, long, *_ = ablation.plan.jobs(["base"], 0)
    points.start(short)
    points.start(long)
    deadline = time.monotonic() + 60
    logs = [tmp_path / "logs" / f"study-base-s{seed}.log" for seed in (0, 1)]
    while not (points.ended(short) and logs[1].exists() and logs[1].read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not points.ended(long)
    points.stop()
    assert points.ended(long)
    said = [log.read_text() for log in logs]
    assert said == [f"-m tasks.cli point study base {seed} {short.steps}\n" for seed in (0, 1)]


def test_a_worker_runs_the_points_of_its_ablation_and_a_terminal_its_own(ablation: Ablation) -> None:
    assert isinstance(point_runner(ablation, Settings()), LocalPoints)
