"""The trainer's own process on the tiny policy: real Ray, FSDP2 and vLLM; stopped by SIGTERM, started again,
and given damaged files."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from infra import processes
from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.models.checkpoint import load_full_weights
from rlcore.segment.journal import read_journal
from rlcore.segment.lease import Control, Lease
from rlcore.segment.spec import EXIT_DONE, EXIT_PREEMPTED, SegmentManifest, SegmentSpec
from rlcore.segment.store import LocalCheckpointStore
from tasks.hang import HangWatch, end_stuck_trainer
from tests.integration.test_train_tiny import dataset, experiment
from tests.shell import left_of

__all__ = ["dataset"]  # a fixture

STEPS = 6


def start(spec: SegmentSpec, mark: str = "") -> subprocess.Popen[bytes]:
    """``mark``: of all that the trainer starts, as a flow would mark it."""
    path = spec.run_dir / "spec.json"
    path.write_text(spec.model_dump_json())
    log = (spec.run_dir / "trainer.log").open("ab")
    command = [sys.executable, "-m", "rlcore.segment", "run", str(path)]
    if mark:
        return processes.start(command, env=os.environ, mark=mark, output=log, ends_with_parent=True)
    return subprocess.Popen(command, stdout=log, stderr=log)


def manifests(run_dir: Path) -> list[SegmentManifest]:
    files = sorted((run_dir / "segments").glob("*.json"))
    return [SegmentManifest.model_validate_json(file.read_text()) for file in files]


def spec_of(run_dir: Path, model: Path, dataset: Path, config: ExperimentConfig) -> SegmentSpec:
    return SegmentSpec(
        run_id="run",
        run_dir=run_dir,
        experiment=config,
        dataset=DatasetRef(
            path=str(dataset),
            digest="d",
            source="s",
            num_problems=24,
            num_rejected=0,
            num_images=24,
            max_prompt_tokens=60,
        ),
        model=ModelRef(path=str(model), digest="m", source="tiny", num_parameters=1),
    )


def log_of(run_dir: Path) -> str:
    return (run_dir / "trainer.log").read_text()


@pytest.mark.slow
def test_a_stopped_trainer_commits_and_the_next_one_goes_on(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    config = experiment(**{"training.steps": STEPS, "segment.steps": 4, "resources.workers": 1})
    spec = spec_of(tmp_path, tiny_model, dataset, config)
    control = Control(tmp_path / "control.json")
    control.beat(9)
    mark = f"segment-{secrets.token_hex(3)}"
    trainer = start(spec, mark)
    while not read_journal(tmp_path / "journal.jsonl"):
        assert trainer.poll() is None, log_of(tmp_path)[-2000:]
        time.sleep(0.05)
    assert any("raylet" in command for command in left_of(mark))
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(60) == EXIT_PREEMPTED, log_of(tmp_path)[-2000:]
    deadline = time.monotonic() + 30
    while left := left_of(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    processes.kill(mark)  # its folder
    (stopped,) = manifests(tmp_path)
    assert not stopped.complete
    assert 1 <= stopped.last_step < 4

    control.beat(9)
    assert start(spec).wait(180) == EXIT_DONE, log_of(tmp_path)[-2000:]
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
    assert "GOES ON WITH ANOTHER" not in log_of(tmp_path)


@pytest.mark.slow
def test_five_kinds_of_damage_cost_their_steps_and_change_nothing(
    tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    """Every checkpoint but the first is damaged, each in another way; the trainer finds its way back and trains those
    steps again, to the same weights."""
    reward = tmp_path / "letters.py"  # random weights are never right, but not all equally wordy
    reward.write_text(
        "def reward(text, problem, num_tokens, finish_reason):\n"
        "    return sum(map(str.isalpha, text)) / max(1, len(text))\n"
    )
    config = experiment(
        **{
            "training.steps": 6,
            "segment.steps": 1,
            "segment.keep_checkpoints": 6,
            "resources.workers": 1,
            "reward.name": "user",
            "reward.file": str(reward),
        }
    )
    spec = spec_of(tmp_path, tiny_model, dataset, config)
    Control(tmp_path / "control.json").beat(9)
    assert start(spec).wait(180) == EXIT_DONE, log_of(tmp_path)[-2000:]
    folders = [tmp_path / "checkpoints" / f"step-{step:06d}" for step in range(1, 7)]
    weights = load_full_weights(folders[5])
    rewards = [record.metrics["reward/mean"] for record in read_journal(tmp_path / "journal.jsonl")]
    committed = manifests(tmp_path)
    assert len(set(rewards)) == 6

    shard = Path("train_state") / "__0_0.distcp"
    whole = (folders[1] / shard).read_bytes()
    (folders[1] / shard).write_bytes(whole[:-1])
    (folders[2] / shard).write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    (folders[3] / "pass_rates.json").unlink()
    text = (folders[4] / "manifest.json").read_text()
    (folders[4] / "manifest.json").write_text(text[: len(text) // 2])
    (folders[5] / "manifest.json").unlink()

    Control(tmp_path / "control.json").beat(9)
    assert start(spec).wait(180) == EXIT_DONE, log_of(tmp_path)[-2000:]
    assert log_of(tmp_path).count("A DAMAGED CHECKPOINT IS MOVED ASIDE") == 5
    assert "run run from step 1" in log_of(tmp_path)
    again = manifests(tmp_path)
    assert [m.model_copy(update={"checkpoint": None}) for m in again] == [
        m.model_copy(update={"checkpoint": None}) for m in committed
    ]
    assert again[0] == committed[0]
    replayed = load_full_weights(folders[5])
    assert all(torch.equal(replayed[name], value) for name, value in weights.items())
    journal = read_journal(tmp_path / "journal.jsonl")
    assert [record.step for record in journal] == [1, 2, 3, 4, 5, 6]
    assert [record.metrics["reward/mean"] for record in journal] == rewards
    assert [record.step for record in read_journal(tmp_path / "journal.cut-1.jsonl")] == [2, 3, 4, 5, 6]


@pytest.mark.slow
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

    wait_for_step(1)
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
