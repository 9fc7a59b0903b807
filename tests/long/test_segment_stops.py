"""The trainer's own process, stopped by SIGTERM and started again, and with a disk that does not answer."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from pathlib import Path

from infra import processes
from rlcore.failures import EXIT_DONE, EXIT_PREEMPTED
from rlcore.segment.journal import read_journal
from rlcore.segment.lease import Control, Lease
from rlcore.segment.store import LocalCheckpointStore
from tasks.driver.health import HangWatch, end_stuck_trainer
from tests.integration.tiny_run import experiment
from tests.integration.trainer_process import log_of, manifests, spec_of, start
from tests.left import still_running

STEPS = 6


def wait_for_log(trainer: subprocess.Popen[bytes], run_dir: Path, words: str) -> None:
    while words not in log_of(run_dir):
        assert trainer.poll() is None, log_of(run_dir)[-2000:]
        time.sleep(0.02)


def test_a_stopped_trainer_commits_and_the_next_one_goes_on(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    config = experiment(**{"training.steps": STEPS, "segment.steps": 4, "resources.workers": 1})
    spec = spec_of(tmp_path, tiny_model, dataset, config)
    control = Control(tmp_path / "control.json")
    control.beat(9)
    mark = f"segment-{secrets.token_hex(3)}"
    trainer = start(spec, mark)
    wait_for_log(trainer, tmp_path, "Ray is ready")
    assert any("raylet" in command for command in still_running(mark))
    while not read_journal(tmp_path / "journal.jsonl"):
        assert trainer.poll() is None, log_of(tmp_path)[-2000:]
        time.sleep(0.05)
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(60) == EXIT_PREEMPTED, log_of(tmp_path)[-2000:]
    deadline = time.monotonic() + 30
    while left := still_running(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    processes.kill(mark)  # its folder
    (stopped,) = manifests(tmp_path)
    assert not stopped.complete
    assert 1 <= stopped.last_step < 4

    control.beat(9)
    assert start(spec).wait(600) == EXIT_DONE, log_of(tmp_path)[-2000:]
    first, second = manifests(tmp_path)
    assert (first.first_step, first.last_step, first.complete) == (0, 4, True)
    assert (second.first_step, second.last_step, second.complete) == (4, STEPS, True)
    journal = read_journal(tmp_path / "journal.jsonl")
    assert [record.step for record in journal] == list(range(1, STEPS + 1))
    assert [record.step for record in journal if record.metrics["time/checkpoint_blocked"]] == [5]
    assert sum(record.metrics["time/checkpoint_written"] > 0 for record in journal) <= 1  # the last one's is in no step
    assert not (tmp_path / "lease.json").exists()
    newest = LocalCheckpointStore(tmp_path, "run").latest()
    assert newest is not None
    assert newest.step == STEPS
    assert (Path(newest.path) / "canary.json").exists()
    assert "continues with another" not in log_of(tmp_path)


def test_a_commit_that_the_disk_never_answers_is_a_hang(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    """A pipe in the place of a file keeps whoever opens it waiting, as a disk does that does not answer. The trainer
    renews its lease all the while; its driver is not deceived."""
    config = experiment(**{"training.steps": 4, "segment.steps": 2, "resources.workers": 1})
    Control(tmp_path / "control.json").beat(9)
    mark = f"segment-{secrets.token_hex(3)}"
    trainer = start(spec_of(tmp_path, tiny_model, dataset, config), mark)
    lease, folder = Lease(tmp_path / "lease.json"), tmp_path / "checkpoints" / "step-000002"

    def wait_for_step(step: int) -> None:
        while len(read_journal(tmp_path / "journal.jsonl")) < step:
            assert trainer.poll() is None, log_of(tmp_path)[-2000:]
            time.sleep(0.01)

    wait_for_log(trainer, tmp_path, "the sampler has the weights of step 0")
    folder.mkdir(parents=True)
    os.mkfifo(folder / "manifest.json")
    wait_for_step(4)
    watch = HangWatch(tmp_path / "lease.json", 0.1)
    renewals = set()
    while not watch.stuck():
        assert trainer.poll() is None, log_of(tmp_path)[-2000:]
        renewals.add(lease.read().renewed_at)
        time.sleep(0.05)
    assert len(renewals) >= 3
    assert not manifests(tmp_path)
    error = end_stuck_trainer(tmp_path, mark, 0.1)
    trainer.wait()
    (dump,) = (tmp_path / "stacks" / "hang-1").glob("trainer-*.txt")
    assert "in finish" in str(error)
    assert "in _read_manifest" in dump.read_text()
