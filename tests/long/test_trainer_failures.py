"""The real trainer on the tiny policy, with two ranks: paused by a health rule, robbed of a rank, out of disk."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore.adjustments import Adjustments, Intervention
from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.failures import EXIT_PAUSED, EXIT_STORAGE, EXIT_WORKER_LOST
from rlcore.process import pid_of
from rlcore.segment.journal import read_journal
from rlcore.segment.lease import Control
from rlcore.segment.spec import SegmentSpec
from rlcore.specs import JobError
from tests.integration.tiny_run import experiment
from tests.integration.trainer_process import manifests, start


def spec(run_dir: Path, model: Path, data: Path, adjustments: Adjustments, **overrides: Any) -> SegmentSpec:
    return SegmentSpec(
        run_id="run",
        run_dir=run_dir,
        experiment=experiment(**overrides),
        dataset=DatasetRef(
            path=str(data), digest="d", source="s", num_problems=24, num_rejected=0, num_images=24, max_prompt_tokens=60
        ),
        model=ModelRef(path=str(model), digest="m", source="tiny", num_parameters=1),
        adjustments=adjustments,
    )


def report(run_dir: Path) -> JobError:
    return JobError.model_validate_json((run_dir / "trainer_error.json").read_text())


def log(run_dir: Path) -> str:
    return (run_dir / "trainer.log").read_text()[-3000:]


def test_a_pause_commits_and_a_killed_rank_is_named(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    rules = [{"metric": "rollout/completion_tokens_max", "above": 0.0, "for_steps": 2, "action": "pause"}]
    settings = {"training.steps": 40, "segment.steps": 20, "health": rules}
    control = Control(tmp_path / "control.json")
    control.beat(9)
    assert start(spec(tmp_path, tiny_model, dataset, Adjustments(), **settings)).wait(300) == EXIT_PAUSED, log(tmp_path)
    (paused,) = manifests(tmp_path)
    assert (paused.last_step, paused.complete) == (2, False)
    assert report(tmp_path).kind == "HealthError"

    change = Intervention(step=2, learning_rate_factor=0.5, seed=77, rule="r")
    adjustments = Adjustments(tokens_per_microbatch=512, interventions=(change,), rollbacks=1, healthy_from=100)
    control.beat(9)
    trainer = start(spec(tmp_path, tiny_model, dataset, adjustments, **settings))
    while len(read_journal(tmp_path / "journal.jsonl")) < 3:
        assert trainer.poll() is None, log(tmp_path)
        time.sleep(0.05)
    (victim,) = (tmp_path / "stacks" / "live").glob("rank-1-*.txt")
    os.kill(pid_of(victim), signal.SIGKILL)
    assert trainer.wait(60) == EXIT_WORKER_LOST, log(tmp_path)
    assert report(tmp_path).kind == "WorkerLostError"
    assert report(tmp_path).message.startswith(f"rank 1 (pid {pid_of(victim)} on ")
    rates = [record.metrics["optim/learning_rate"] for record in read_journal(tmp_path / "journal.jsonl")]
    assert rates[:3] == pytest.approx([1e-3, 1e-3, 5e-4])
    assert not (tmp_path / "lease.json").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A run's folder whose checkpoints lie on a disk of 4 MiB."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield tmp_path
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_in_its_class_and_leaves_nothing_staged(
    tiny_model: Path, dataset: Path, small_disk: Path
) -> None:
    Control(small_disk / "control.json").beat(9)
    settings = {"training.steps": 2, "segment.steps": 1}
    trainer = start(spec(small_disk, tiny_model, dataset, Adjustments(), **settings))
    assert trainer.wait(300) == EXIT_STORAGE, log(small_disk)
    found = report(small_disk)
    assert found.kind == "StorageError"
    assert "MiB free" in found.message
    assert not list((small_disk / "checkpoints").iterdir())
    assert not manifests(small_disk)
