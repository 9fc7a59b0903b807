"""What ``rlflow top`` reads from the folders of runs, and how it shows it."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from infra import load as machine
from infra.load import GpuLoad, MachineLoad, machine_load, parse_gpus
from infra.processes import this_process
from infra.settings import Settings
from rlcore.failures import Failure
from rlcore.files import write_json_atomically
from rlcore.segment.journal import MetricJournal, StepRecord
from rlcore.segment.lease import Lease
from tasks.cli import app
from tasks.driver.failures import FailureLog, FailureRecord
from tasks.driver.progress import pace
from tasks.experiments import load_experiment
from tasks.run import Driver, note_end, open_run
from tasks.watch import facts
from tasks.watch.facts import RunView, Signs, State, Watch, spread, state_of, tail
from tasks.watch.table import describe_load, page, sparkline

NOTHING = Signs(
    finished=False, trainer=False, driver=False, trained=False, waits_until=0.0, ended=None, outage=False
)  # fmt: skip
LOAD = MachineLoad(
    cpu=0.25, memory_used=3 * 2**30, memory_total=8 * 2**30, disk_free=5 * 2**30,
    gpus=(GpuLoad(0, "H100", 0.875, 40 * 2**30, 80 * 2**30), GpuLoad(1, "MIG", None, 0, 0)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("signs", "state"),
    [
        ({}, State.CRASHED),
        ({"ended": "KILLED"}, State.STOPPED),
        ({"ended": "FAILED"}, State.FAILED),
        ({"ended": "FAILED", "outage": True}, State.WAITS),
        ({"ended": "FAILED", "driver": None}, State.AWAY),
        ({"finished": True, "driver": True, "trainer": True}, State.FINISHED),
        ({"trainer": True}, State.TRAINS),
        ({"driver": True, "trainer": True, "trained": True}, State.TRAINS),
        ({"driver": True, "trained": True}, State.EVALUATES),
        ({"driver": True}, State.PREPARES),
        ({"driver": True, "waits_until": 101.0}, State.WAITS),
        ({"driver": True, "waits_until": 99.0}, State.PREPARES),
        ({"driver": None}, State.AWAY),
    ],
)
def test_a_state_follows_from_signs(signs: dict[str, object], state: State) -> None:
    assert state_of(replace(NOTHING, **signs), now=100.0) is state


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    return Settings()


def make(settings: Settings, name: str, rewards: list[float], *, start: int = 1) -> Path:
    """A run that this process drives, with a step every two seconds."""
    run = open_run(load_experiment("grpo-geo3k-tiny"), name, settings)
    at = iter(range(1_000_000, 10**9, 2000))
    journal = MetricJournal(run.run_dir / "journal.jsonl", now_ms=lambda: next(at))
    for step, reward in enumerate(rewards, start):
        journal.step(step, {"reward/mean": reward})
    return run.run_dir


def view_of(settings: Settings, name: str) -> RunView:
    (view,) = [view for view in Watch(settings).look() if view.run_id == name]
    return view


def leave(folder: Path) -> None:
    """Let the driver be a process that does not live."""
    gone = Driver(
        flow_run_id=None, deployed=True, pid=2**22 + 1, started=0.0, host=this_process().host, at=time.time()
    )  # fmt: skip
    (folder / "drivers.jsonl").write_text(gone.model_dump_json() + "\n")


def test_a_run_is_followed_through_its_life(settings: Settings) -> None:
    folder = make(settings, "run", [])
    assert view_of(settings, "run").state is State.PREPARES
    lease = Lease(folder / "lease.json")
    lease.acquire("token")
    make(settings, "run", [0.25, 0.5, 0.75])
    view = view_of(settings, "run")
    steps = load_experiment("grpo-geo3k-tiny").training.steps
    assert (view.state, view.step, view.steps) == (State.TRAINS, 3, steps)
    assert (view.rewards, view.seconds_per_step) == ((0.25, 0.5, 0.75), 2.0)
    assert view.seconds_left == 2.0 * (steps - 3)
    lease.release()
    failed = FailureRecord(
        at=datetime.now(UTC), failure=Failure.OUT_OF_MEMORY, step=3, attempt=1, delay=60.0, error="no memory"
    )  # fmt: skip
    run = open_run(load_experiment("grpo-geo3k-tiny"), "run", settings)
    FailureLog(run.run_dir).add(failed)
    view = view_of(settings, "run")
    assert (view.state, view.failures, view.seconds_left) == (State.WAITS, 1, None)
    assert view.last_warning == f"{Failure.OUT_OF_MEMORY} after step 3"
    write_json_atomically(folder / "health.jsonl", json.dumps(["reward/mean below 0.5", 7, 0]) + "\n")
    assert view_of(settings, "run").last_warning == "step 7: reward/mean below 0.5"
    leave(folder)
    assert view_of(settings, "run").state is State.CRASHED
    note_end(run, "KILLED", KeyboardInterrupt())
    assert view_of(settings, "run").state is State.STOPPED
    note_end(run, "FAILED", ValueError("wrong\nthing"))
    view = view_of(settings, "run")
    assert (view.state, view.last_warning) == (State.FAILED, "ValueError: wrong")
    (folder / "finished").touch()
    view = view_of(settings, "run")
    assert (view.state, view.warnings) == (State.FINISHED, 1)


def test_an_old_note_of_an_end_does_not_count_after_a_new_start(settings: Settings) -> None:
    folder = make(settings, "run", [0.5])
    run = open_run(load_experiment("grpo-geo3k-tiny"), "run", settings)
    note_end(run, "KILLED", KeyboardInterrupt())
    by_a_clock_ahead = time.time() + 300
    write_json_atomically(folder / "ended.json", json.dumps({"at": by_a_clock_ahead, "status": "KILLED", "error": ""}))
    time.sleep(0.01)
    leave(folder)
    assert view_of(settings, "run").state is State.CRASHED


def test_an_outage_lets_recover_start_the_run_again(settings: Settings) -> None:
    folder = make(settings, "run", [0.5])
    leave(folder)
    note_end(open_run(load_experiment("grpo-geo3k-tiny"), "run", settings), "FAILED", OSError("away"))
    leave(folder)
    time.sleep(0.01)
    now = time.time()
    write_json_atomically(folder / "outage.json", json.dumps({"at": now, "failure": "server", "error": "away"}))
    assert view_of(settings, "run").state is State.WAITS


def test_a_damaged_run_is_shown_and_hides_no_other(settings: Settings) -> None:
    make(settings, "good", [0.5])
    (settings.runs_dir / "bad").mkdir()
    (settings.runs_dir / "bad" / "experiment.json").write_text("{")
    assert {view.run_id: view.state for view in Watch(settings).look()} == {
        "good": State.PREPARES, "bad": State.UNREADABLE,
    }  # fmt: skip


def test_only_the_end_of_a_journal_is_read_and_half_a_line_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    records = [StepRecord(step, 1000 * step, {"m": float(step)}) for step in range(1, 2001)]
    path.write_text("".join(record.line() for record in records) + '{"step": 2001, "timest')
    assert tail(path) == records[-11:]
    assert pace(tail(path)) == 1.0
    monkeypatch.setattr(facts, "_TAIL_BYTES", len(records[-1].line()) * 3)
    assert [record.step for record in tail(path)] == [1999, 2000]
    found = [record.step for record in spread(path, 24)]
    assert found[0] == 1
    assert len(found) == 24
    gaps = [later - earlier for earlier, later in zip(found, found[1:], strict=False)]
    assert max(gaps) - min(gaps) <= 10  # numbers have one to four digits
    assert tail(tmp_path / "none") == []
    assert spread(tmp_path / "none", 24) == []


def test_a_short_journal_is_read_whole_and_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    records = [StepRecord(step, step, {"m": 0.5}) for step in (1, 2, 3)]
    path.write_text("".join(record.line() for record in records))
    assert spread(path, 24) == records


def test_a_finished_run_is_read_once_until_its_journal_changes(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = facts.read_view
    monkeypatch.setattr(facts, "read_view", lambda folder, now: read.append(folder.name) or real(folder, now))
    (make(settings, "done", [0.5]) / "finished").touch()
    make(settings, "going", [0.5])
    watch = Watch(settings)
    for _ in range(3):
        watch.look()
    assert sorted(read) == ["done", "going", "going", "going"]
    make(settings, "done", [0.75], start=2)
    assert {view.run_id: view.step for view in watch.look()} == {"done": 2, "going": 1}


def test_a_sparkline_goes_from_the_lowest_to_the_highest_value() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-3.0, math.nan, 4.0]) == "▁ █"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == sparkline([math.inf]) == ""


def test_the_load_of_gpus_is_what_nvidia_smi_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "0, NVIDIA H100 80GB HBM3, 87, 40960, 81920\n1, NVIDIA H100 80GB HBM3, [N/A], [N/A], [N/A]\n"
    assert parse_gpus(text) == (
        GpuLoad(0, "NVIDIA H100 80GB HBM3", 0.87, 40 * 2**30, 80 * 2**30),
        GpuLoad(1, "NVIDIA H100 80GB HBM3", None, 0, 0),
    )
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '%s' '{text}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [gpu.index for gpu in machine_load(tmp_path).gpus] == [0, 1]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert machine_load(tmp_path).gpus == ()


def test_the_share_of_the_cpu_is_one_of_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.psutil, "cpu_percent", lambda _: 25.0)
    memory = SimpleNamespace(total=8, available=5)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
    load = machine_load(tmp_path)
    assert (load.cpu, load.memory_used, load.memory_total) == (0.25, 3, 8)
    assert load.disk_free > 0


def printed(views: list[RunView], rows: int = 20, width: int = 160) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(page(views, LOAD, rows))
    return console.export_text()


def test_the_table_shows_the_load_and_the_first_runs() -> None:
    view = RunView(
        "toy-1", "toy", State.TRAINS, 30, 40, 1.0, {"reward/mean": 0.12345}, rewards=(0.0, 1.0), seconds_per_step=6.5,
        warnings=1, last_warning="step 7: m above 2",
    )  # fmt: skip
    text = printed([view, replace(view, run_id="toy-2", state=State.FINISHED), replace(view, run_id="toy-3")], rows=2)
    assert "3 runs, 2 at work (1 finished, 2 trains)" in text
    assert "GPU 0 H100: 88%, memory 40.0 of 80.0 GiB" in text
    assert "GPU 1 MIG: use unknown" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("toy-")]
    assert " ".join(rows[0]) == "toy-1 trains 30 of 40 0.123 ▁█ 6.5 1:05 step 7: m above 2"
    assert " ".join(rows[1]) == "toy-2 finished 30 of 40 0.123 ▁█ 6.5 step 7: m above 2"
    assert "1 more runs: --rows shows them" in text
    assert describe_load(LOAD)[0] == "CPU 25%, memory 3.0 of 8.0 GiB, disk 5 GiB free"


def test_a_run_with_a_name_of_its_own_has_its_experiment_beside_it() -> None:
    view = RunView("mine", "toy", State.CRASHED, 0, 40, 1.0, {})
    assert "mine  toy         crashed  0 of 40" in printed([view])
    assert "experiment" not in printed([replace(view, run_id="toy-1")])


def test_the_command_prints_one_table_and_sorts_by_work(
    settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    (make(settings, "grpo-geo3k-tiny-done", [0.5]) / "finished").touch()
    make(settings, "grpo-geo3k-tiny-at-work", [0.5])
    app(["top", "--once"], standalone_mode=False)
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("grpo-")]
    assert lines == ["grpo-geo3k-tiny-at-work", "grpo-geo3k-tiny-done"]


def test_ctrl_c_ends_the_table(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    make(settings, "run", [0.5])
    monkeypatch.setattr("tasks.cli.watch.time.sleep", sleep)
    app(["top", "--every", "0.5"], standalone_mode=False)
    assert looks == [0.5, 0.5, 0.5]


def test_a_delay_that_is_over_is_no_wait(settings: Settings) -> None:
    folder = make(settings, "run", [0.5])
    old = datetime.now(UTC) - timedelta(minutes=5)
    FailureLog(folder).add(
        FailureRecord(at=old, failure=Failure.WORKER_LOST, step=0, attempt=1, delay=60.0, error="gone")
    )
    assert view_of(settings, "run").state is State.PREPARES
