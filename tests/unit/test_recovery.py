"""decide(): every row of the table; and the files that its facts come from."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from mlflow import MlflowClient
from prefect.client.schemas.objects import State, StateType

from infra import processes
from infra.processes import alone
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef
from rlcore.config import RecoveryConfig
from rlcore.files import write_json_atomically
from rlcore.segment.lease import Control, ControlState, Unchanged
from rlcore.segment.spec import SegmentManifest, segment_path
from rlcore.specs import JobError
from tasks.ablation.study import open_ablation
from tasks.driver.failures import unopened_run
from tasks.driver.jobs import end_what_is_left, jobs_mark
from tasks.experiments import load_experiment
from tasks.recovery.act import Watch, carry_out, last_failure, observe, recover_runs, recoveries, reschedule
from tasks.recovery.decide import Action, Facts, FlowRunFacts, LastFailure, decide
from tasks.run import append_line, drivers, note_driver, open_run, tracker_of

DEPLOYED = FlowRunFacts(flow_run_id="f", state_id="s", state=StateType.CRASHED, deployed=True)
CRASHED = Facts(
    run_id="run",
    finished=False,
    steps=10,
    committed_step=4,
    flow_run=DEPLOYED,
    driver_running=False,
    silent_seconds=5.0,
    sign_seen=False,
    trainer=None,
    failure=None,
    outage=None,
    recoveries=0,
    allowed=RecoveryConfig(attempts=3, silence_seconds=120.0),
)


def in_state(state: StateType, **changes: object) -> Facts:
    return replace(CRASHED, flow_run=replace(DEPLOYED, state=state), **changes)


RUNNING, FAILED = StateType.RUNNING, StateType.FAILED
ROWS = [
    ("crashed", CRASHED, "reschedule", r"^CRASHED; try 1 of 3 goes on from step 4$"),
    ("its trainer lives", replace(CRASHED, trainer="pid 7"), "reschedule", "follows the trainer pid 7"),
    ("silent", in_state(RUNNING, silent_seconds=121.0), "reschedule", "gone or silent for 121 s"),
    ("silent elsewhere", in_state(RUNNING, silent_seconds=121.0, driver_running=None), "reschedule", "try 1 of 3"),
    ("stuck before it started", in_state(StateType.PENDING, silent_seconds=121.0), "reschedule", "^PENDING, but"),
    (
        "out of memory",
        replace(CRASHED, failure=LastFailure("out of memory", False)),
        "reschedule",
        "after out of memory; try",
    ),
    (
        "may succeed next time",
        in_state(FAILED, failure=LastFailure("hang", False)),
        "reschedule",
        "FAILED after hang",
    ),
    ("the last try", replace(CRASHED, recoveries=2), "reschedule", "try 3 of 3"),
    ("tries used up", replace(CRASHED, recoveries=3), "leave", "3 recoveries without a step beyond 4"),
    ("finished", replace(CRASHED, finished=True), "leave", "^finished$"),
    ("unknown to the server", replace(CRASHED, flow_run=None), "leave", "no flow run that this Prefect server knows"),
    ("from a terminal", replace(CRASHED, flow_run=replace(DEPLOYED, deployed=False)), "leave", "in a terminal"),
    ("completed, marker lost", in_state(StateType.COMPLETED), "leave", "complete"),
    ("cancelled", in_state(StateType.CANCELLED), "leave", "cancelled by a person"),
    ("being cancelled", in_state(StateType.CANCELLING), "leave", "being cancelled"),
    ("paused", in_state(StateType.PAUSED), "leave", "paused"),
    ("rescheduled already", in_state(StateType.SCHEDULED), "leave", "waits for a worker"),
    ("alive", in_state(RUNNING, driver_running=True, silent_seconds=1.0), "leave", "driver lives"),
    ("alive though silent", in_state(RUNNING, driver_running=True, silent_seconds=500.0), "leave", "driver lives"),
    ("alive though crashed", replace(CRASHED, driver_running=True), "leave", "driver lives"),
    ("maybe alive elsewhere", in_state(RUNNING, driver_running=None, silent_seconds=40.0), "watch", "for 40 of 120 s"),
    ("alive elsewhere", in_state(RUNNING, driver_running=None, sign_seen=True), "leave", "a sign of life"),
    ("gone, but the worker may still say why", in_state(RUNNING, silent_seconds=3.0), "watch", "silent for 3 of 120"),
    ("gone, and the worker said so", in_state(StateType.CRASHED, sign_seen=True), "reschedule", "^CRASHED; try 1"),
    ("failed elsewhere", in_state(FAILED), "leave", "failed outside the trainer"),
    (
        "MLflow was away, and is back",
        in_state(FAILED, outage=""),
        "reschedule",
        r"^FAILED after an outage; try 1 of 3 goes on from step 4$",
    ),
    (
        "the trainer's tries were used up by an outage that is over",
        in_state(FAILED, outage="", failure=LastFailure("storage outage", True)),
        "reschedule",
        "FAILED after an outage",
    ),
    ("MLflow is still away", in_state(FAILED, outage="no answer at x"), "leave", "that lasts.*: no answer at x$"),
    ("an outage time and again", in_state(FAILED, outage="", recoveries=3), "leave", "tries used up"),
    ("diverged", replace(CRASHED, failure=LastFailure("diverged", True)), "leave", "^diverged: another try would fail"),
    ("failed for good", in_state(FAILED, failure=LastFailure("hang", True)), "leave", "^hang: another try"),
]


@pytest.mark.parametrize(("facts", "action", "reason"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_decision(facts: Facts, action: str, reason: str) -> None:
    decision = decide(facts)
    assert decision.action is Action(action)
    assert re.search(reason, decision.reason), decision.reason


def test_every_state_of_prefect_has_a_row() -> None:
    assert {row[1].flow_run.state for row in ROWS if row[1].flow_run} == set(StateType)


def test_a_run_remembers_who_drove_it(tmp_path: Path) -> None:
    run = open_run(load_experiment("grpo-geo3k-tiny"), "run", Settings(data_dir=tmp_path))
    (driver,) = drivers(run)
    assert (driver.pid, driver.deployed, driver.flow_run_id) == (os.getpid(), False, None)
    assert driver.is_running() is True
    later = driver.model_copy(update={"started": driver.started + 60})  # the same pid, another process
    append_line(run.run_dir / "drivers.jsonl", later.model_dump_json())
    elsewhere = driver.model_copy(update={"host": "elsewhere"})
    append_line(run.run_dir / "drivers.jsonl", elsewhere.model_dump_json())
    assert [item.is_running() for item in drivers(run)] == [True, False, None]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeServer:
    """What the recover flow asks of Prefect's client."""

    flow_run: SimpleNamespace
    heartbeat: float | None = None
    states: list[State] = field(default_factory=list)

    def read_flow_run(self, _flow_run_id: UUID) -> SimpleNamespace:
        return self.flow_run

    def read_events(self, _filter: object, limit: int) -> SimpleNamespace:
        beats = [] if self.heartbeat is None else [datetime.fromtimestamp(self.heartbeat, UTC)]
        return SimpleNamespace(events=[SimpleNamespace(occurred=at) for at in beats[:limit]])

    def set_flow_run_state(self, _flow_run_id: UUID, state: State, force: bool) -> None:
        assert force
        self.states.append(state)


def test_facts_of_a_killed_flow_and_its_one_reschedule(tmp_path: Path) -> None:
    run = open_run(load_experiment("grpo-geo3k-tiny"), "run", Settings(data_dir=tmp_path))
    (driver,) = drivers(run)
    flow_run_id, long_ago = uuid4(), time.time() - 1000
    dead = {"flow_run_id": str(flow_run_id), "deployed": True, "pid": 2**22 + 1, "at": long_ago}
    append_line(run.run_dir / "drivers.jsonl", driver.model_copy(update=dead).model_dump_json())
    state = SimpleNamespace(type=StateType.RUNNING, timestamp=datetime.fromtimestamp(long_ago, UTC))
    flow_run = SimpleNamespace(id=flow_run_id, state=state, state_id=uuid4(), deployment_id=uuid4())
    server, clock = FakeServer(flow_run, heartbeat=time.time() - 200), Clock()
    watch = Watch(Unchanged(clock))
    facts = observe(run, watch, server)
    assert (facts.driver_running, facts.trainer, facts.failure, facts.finished) == (False, None, None, False)
    assert decide(facts).action is Action.WATCH  # the signs are of other clocks: their age says nothing
    clock.now += 121
    facts = observe(run, watch, server)
    decision = decide(facts)
    assert decision.action is Action.RESCHEDULE
    assert reschedule(run, facts, decision, server)
    assert [item.name for item in server.states] == ["AwaitingRetry"]
    assert observe(run, watch, server).recoveries == 1
    assert [item.committed_step for item in recoveries(run)] == [0]
    flow_run.state_id = uuid4()  # a person was faster
    assert not reschedule(run, facts, decision, server)
    assert len(server.states) == 1
    Control(run.run_dir / "control.json").beat(1)
    assert "sign of life" in decide(observe(run, watch, server)).reason
    run.finished_marker.touch()
    assert decide(observe(run, watch, server)).reason == "finished"


@pytest.mark.parametrize("skew", [-300.0, 0.0, 300.0])
@pytest.mark.parametrize("sign", ["driver's beat", "Prefect's heartbeat", "state"])
def test_a_driver_on_another_host_is_known_to_live_or_to_be_lost_whatever_its_clock_says(
    tmp_path: Path, skew: float, sign: str
) -> None:
    run = open_run(load_experiment("grpo-geo3k-tiny"), "run", Settings(data_dir=tmp_path))
    (driver,) = drivers(run)
    there = {"flow_run_id": str(uuid4()), "deployed": True, "host": "elsewhere", "at": time.time() + skew}
    append_line(run.run_dir / "drivers.jsonl", driver.model_copy(update=there).model_dump_json())

    def beat() -> None:
        state = ControlState(through_segment=1, heartbeat=time.time() + skew, stop=False)
        write_json_atomically(run.run_dir / "control.json", state.model_dump_json())

    beat()
    state = SimpleNamespace(type=RUNNING, timestamp=datetime.fromtimestamp(time.time() + skew, UTC))
    flow_run = SimpleNamespace(id=uuid4(), state=state, state_id=uuid4(), deployment_id=uuid4())
    server, clock = FakeServer(flow_run, heartbeat=time.time() + skew), Clock()
    watch = Watch(Unchanged(clock))
    assert decide(observe(run, watch, server)).action is Action.WATCH
    clock.now += 119
    assert decide(observe(run, watch, server)).action is Action.WATCH
    clock.now += 2
    assert decide(observe(run, watch, server)).action is Action.RESCHEDULE
    watch = Watch(Unchanged(clock))
    assert decide(observe(run, watch, server)).action is Action.WATCH
    if sign == "driver's beat":
        beat()
    elif sign == "state":
        flow_run.state_id = uuid4()
    else:
        server.heartbeat = time.time() + skew
    clock.now += 500
    assert decide(observe(run, watch, server)).action is Action.LEAVE


class ManyRuns(FakeServer):
    """Several flow runs; whenever somebody asks for one, ``story`` may change others. It is told how many have been
    rescheduled."""

    def __init__(self, flow_runs: list[SimpleNamespace], story: Callable[[int], None]) -> None:
        self.flow_runs = {str(flow_run.id): flow_run for flow_run in flow_runs}
        self.story = story
        self.states, self.rescheduled, self.heartbeat = [], [], None

    def __enter__(self) -> ManyRuns:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_flow_run(self, flow_run_id: UUID) -> SimpleNamespace:
        self.story(len(self.rescheduled))
        return self.flow_runs[str(flow_run_id)]

    def set_flow_run_state(self, flow_run_id: UUID, state: State, force: bool) -> None:
        super().set_flow_run_state(flow_run_id, state, force)
        self.rescheduled.append(flow_run_id)
        now = SimpleNamespace(type=StateType.SCHEDULED, timestamp=datetime.now(UTC))
        self.flow_runs[str(flow_run_id)].state, self.flow_runs[str(flow_run_id)].state_id = now, uuid4()


def test_a_silent_run_is_watched_and_what_crashes_meanwhile_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("tasks.recovery.act._LOOK_SECONDS", 0.01)
    experiment = load_experiment("grpo-geo3k-tiny", ["recovery.silence_seconds=1"])
    flow_runs = {}
    for name in ("alive", "crashing", "silent"):
        run = open_run(experiment, name, Settings())
        state = SimpleNamespace(type=RUNNING, timestamp=datetime.now(UTC))
        flow_runs[name] = SimpleNamespace(id=uuid4(), state=state, state_id=uuid4(), deployment_id=uuid4())
        (driver,) = drivers(run)
        there = {"flow_run_id": str(flow_runs[name].id), "deployed": True, "host": "elsewhere"}
        append_line(run.run_dir / "drivers.jsonl", driver.model_copy(update=there).model_dump_json())

    def story(rescheduled: int) -> None:
        for name in ("alive", "crashing"):
            Control(Settings().runs_dir / name / "control.json").beat(1)
        if rescheduled == 1:
            flow_runs["crashing"].state.type = StateType.CRASHED

    server = ManyRuns(list(flow_runs.values()), story)
    monkeypatch.setattr("tasks.recovery.act.get_client", lambda **_: server)
    judged = recover_runs.fn()
    assert server.rescheduled == [flow_runs["silent"].id, flow_runs["crashing"].id]
    assert {facts.run_id: decision.action for _, facts, decision in judged} == {
        "alive": Action.LEAVE,
        "crashing": Action.RESCHEDULE,
        "silent": Action.RESCHEDULE,
    }


@pytest.mark.parametrize(
    ("state", "stays"), [(FAILED, True), (StateType.COMPLETED, False), (StateType.CANCELLED, False)]
)
def test_the_note_of_an_unopened_run_is_removed_with_the_end_of_its_flow_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: StateType, stays: bool
) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    run, flow_run_id = unopened_run("run"), uuid4()
    note_driver(run)
    (driver,) = drivers(run)
    there = driver.model_copy(update={"flow_run_id": str(flow_run_id), "deployed": True, "pid": 2**22 + 1})
    (run.run_dir / "drivers.jsonl").write_text(there.model_dump_json())
    flow_run = SimpleNamespace(
        id=flow_run_id, state=SimpleNamespace(type=state), state_id=uuid4(), deployment_id=uuid4()
    )
    carry_out(run, Watch(), FakeServer(flow_run))
    assert run.run_dir.exists() is stays


def test_facts_of_an_ablation_are_those_of_its_runs_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    tiny, points = "grpo-geo3k-tiny", [["training.learning_rate=1"]]
    ablation = open_ablation.fn(tiny, ["training.steps=40"], "study", points=points, seeds=[1, 2])
    base, point = (open_run(load_experiment(tiny), f"study-{name}", Settings()) for name in ("base-s1", "p01-s2"))
    for run, last in ((base, 40), (point, 20)):
        checkpoint = CheckpointRef(
            path=str(run.run_dir), step=last, policy_version=last, manifest_sha256="m", run_id=run.run_id, segment=0
        )
        manifest = SegmentManifest(
            run_id=run.run_id, segment=0, first_step=0, last_step=last, complete=True, checkpoint=checkpoint,
            experiment_digest="e", dataset_digest="d",
        )  # fmt: skip
        write_json_atomically(segment_path(run.run_dir, 0), manifest.model_dump_json())
    facts = observe(ablation.run, Watch(), FakeServer(SimpleNamespace()))
    assert (facts.run_id, facts.committed_step, facts.steps, facts.driver_running) == ("study", 60, 160, True)
    (driver,) = drivers(ablation.run)
    assert driver.pid == os.getpid()


@pytest.mark.parametrize("skew", [-300, 0, 300])
def test_only_a_failure_since_the_last_start_counts(tmp_path: Path, skew: float) -> None:
    """Whatever the clock says of the host that failed."""
    run = open_run(load_experiment("grpo-geo3k-tiny"), "run", Settings(data_dir=tmp_path))
    assert last_failure(run) is None
    for kind, final in (("DivergedError", True), ("TrainerFailedError", False)):
        report = JobError(kind=kind, message="m", traceback="t")
        (run.run_dir / "trainer_error.json").write_text(report.model_dump_json())
        assert last_failure(run) == LastFailure(kind, final)
        note_driver(run)
        assert last_failure(run) is None
    at = datetime.fromtimestamp(time.time() + skew, UTC).isoformat()
    record = {"at": at, "failure": "hang", "step": 0, "attempt": 1, "delay": 5.0, "error": "e"}
    append_line(run.run_dir / "failures.jsonl", json.dumps(record))
    assert last_failure(run) == LastFailure("hang", False)
    append_line(run.run_dir / "failures.jsonl", json.dumps(record | {"delay": None}))
    assert last_failure(run) == LastFailure("hang", True)
    note_driver(run)
    assert last_failure(run) is None


def test_what_prefect_kills_over_its_grace_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook that runs in the worker: trainer and job of the cancelled flow run go, those of others stay."""
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    cancelled, other = (open_run(load_experiment("grpo-geo3k-tiny"), name, Settings()) for name in ("gone", "other"))
    (driver,) = drivers(cancelled)
    (cancelled.run_dir / "drivers.jsonl").write_text(driver.model_copy(update={"pid": 2**22 + 1}).model_dump_json())
    flow_run = SimpleNamespace(id=uuid4(), name="gone")
    tracker = tracker_of(cancelled, Settings())
    marks = [cancelled.trainer_mark, f"{jobs_mark(str(flow_run.id))}1", other.trainer_mark]
    for mark in marks:
        processes.start(["sleep", "60"], env=dict(os.environ), mark=mark, ends_with_parent=True)
    end_what_is_left(None, flow_run, None)
    assert [len(processes.marked(mark)) for mark in marks] == [0, 0, 1]
    mlflow = MlflowClient(tracking_uri=Settings().tracking_uri)
    assert mlflow.get_run(tracker.mlflow_run_id).info.status == "KILLED"
    end_what_is_left(None, SimpleNamespace(id=uuid4(), name="other"), None)  # this very process drives it
    assert len(processes.marked(marks[2])) == 1
    end_what_is_left(None, SimpleNamespace(id=uuid4(), name="never opened"), None)
    processes.kill(marks[2])


def test_of_two_recover_flows_one_acts(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    with alone(settings, "recover") as first, alone(settings, "recover") as second:
        assert (first, second) == (True, False)
    with alone(settings, "recover") as after:
        assert after


def test_a_process_of_ours_has_a_temporary_folder_that_goes_with_it() -> None:
    env = dict(os.environ)
    code = "import os, pathlib, time; pathlib.Path(os.environ['TMPDIR'], 'left').touch(); time.sleep(60)"
    for mark in ("temp-test-1", "temp-test-2"):
        processes.start([sys.executable, "-c", code], env=env, mark=mark, ends_with_parent=True)
    folders = [processes.temporary_folder(f"temp-test-{number}") for number in (1, 2)]
    while not all((folder / "left").exists() for folder in folders):
        time.sleep(0.02)
    processes.kill("temp-test-1")
    assert [folder.exists() for folder in folders] == [False, True]
    assert len(processes.marked("temp-test-2")) == 1
    processes.kill_all("temp-test-")
    assert not folders[1].exists()
    assert not processes.marked("temp-test-2")


def test_the_folder_of_a_child_s_child_is_no_deeper(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = processes.temporary_folder("outer")
    monkeypatch.setenv(processes.MARK, "outer")
    monkeypatch.setattr(tempfile, "tempdir", str(outer))
    inner = processes.temporary_folder("trainer-0123456789abcdef")
    assert inner.parent == outer.parent
    session = inner / "ray" / "session_2026-11-21_15-34-45_123456_4194304" / "sockets" / "plasma_store"
    assert len(str(session)) - len(str(inner.parent)) + len("/tmp") <= 107  # a socket's path, under the usual /tmp
