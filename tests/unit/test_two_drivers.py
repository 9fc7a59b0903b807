"""Two drivers of one run: they follow one trainer, and neither kills the trainer that the other one has started.

The trainer is that of ``tests/flows/fake_interpreter.py``. Each driver is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra import processes
from infra.settings import Settings
from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.errors import RlflowError
from rlcore.segment.lease import Control, LeaseInfo, holder_alive
from rlcore.segment.spec import SegmentManifest
from tasks import train as training
from tasks.experiments import load_experiment
from tasks.run import Run, existing_run, open_run
from tests.flows.interpreter import fake_interpreter

DATASET = DatasetRef(
    path="/train", digest="train-digest", source="files", num_problems=8, num_rejected=1, num_images=3,
    max_prompt_tokens=9,
)  # fmt: skip
START = ModelRef(path="/start", digest="start-digest", source="tiny", num_parameters=1000)
_PAUSE = 0.3  # seconds between a driver's look for a trainer and its start of one: any other driver looks meanwhile


def drive(run_id: str, *, late: bool) -> None:
    """One driver, without Prefect: it trains all segments, and tries again after each failure.

    ``late``: after a failure it waits until the other driver has started the next trainer.
    """
    segment = training.train_segment.fn

    def late_segment(run: Run, *rest: object) -> SegmentManifest:
        try:
            return segment(run, *rest)
        except RlflowError:
            wait_for_trainer(run)
            raise

    training.announce_checkpoint = lambda *_: None
    training.train_segment = late_segment if late else segment
    training._TICK_SECONDS = 0.05
    kill = processes.kill

    def slow_kill(mark: str) -> None:
        time.sleep(_PAUSE)
        kill(mark)

    processes.kill = slow_kill
    run = existing_run(run_id, Settings())
    failures = []
    while True:
        try:
            segments = training.train_all_segments(run, DATASET, START)
        except RlflowError as error:
            failures.append(type(error).__name__)
        else:
            break
    said = {"last_steps": [item.last_step for item in segments], "failures": failures}
    sys.stdout.write(json.dumps(said) + "\n")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RLFLOW_TRAINER_PYTHON", str(fake_interpreter(tmp_path)))
    monkeypatch.setenv("RLFLOW_RETRY_DELAY_SCALE", "0")
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.3")  # so that both drivers meet the trainer
    settings = ["training.steps=5", "segment.steps=2", "data.template=math"]
    return open_run(load_experiment("grpo-geo3k-tiny", settings), "shared", Settings())


def wait_for_trainer(run: Run) -> None:
    """Wait until a trainer of the run lives."""
    deadline = time.monotonic() + 60
    while holder_alive(run.run_dir / "lease.json") is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def both(run: Run, *, first_is_late: bool) -> list[dict[str, list[object]]]:
    """What each of two drivers says. They start at the same moment, or the second follows the trainer of the first,
    which is late."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.test_two_drivers", run.run_id]
    drivers = [subprocess.Popen([*command, *["late"] * first_is_late], stdout=subprocess.PIPE, text=True)]
    if first_is_late:
        wait_for_trainer(run)
    drivers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    said = [driver.communicate(timeout=120)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0]
    assert not processes.marked(run.trainer_mark)
    return [json.loads(text.splitlines()[-1]) for text in said]


def starts(run: Run) -> list[str]:
    return (run.run_dir.parent.parent / "calls.txt").read_text().splitlines()


@pytest.mark.parametrize("first_is_late", [False, True])
def test_drivers_that_find_no_trainer_or_the_same_dead_one_start_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, first_is_late: bool
) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "crash")
    said = both(run, first_is_late=first_is_late)
    assert [item["last_steps"] for item in said] == [[2, 4, 5]] * 2
    assert all(len(item["failures"]) <= 1 for item in said), said
    assert starts(run) == ["train from segment 0", "train from segment 1"]


def test_an_interrupt_leaves_a_trainer_on_another_machine_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = LeaseInfo(token="theirs", pid=1, started=1.0, host="another", renewed_at=time.time())
    (run.run_dir / "lease.json").write_text(holder.model_dump_json())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train_segment", training.train_segment.fn)
    monkeypatch.setattr(training, "_tick", interrupted)
    killed: list[str] = []
    monkeypatch.setattr(processes, "kill", killed.append)
    with pytest.raises(KeyboardInterrupt):
        training.train_all_segments(run, DATASET, START)
    said = Control(run.run_dir / "control.json").read()
    assert said is not None
    assert not said.stop
    assert not killed
    assert (run.run_dir / "lease.json").exists()


if __name__ == "__main__":
    drive(sys.argv[1], late=sys.argv[2:] == ["late"])
