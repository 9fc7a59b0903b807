"""The trainer's own process on the tiny policy: real Ray, FSDP2 and vLLM; stopped by SIGTERM, started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcore.artifacts import CheckpointRef, DatasetRef, ModelRef
from rlcore.segment.journal import read_journal
from rlcore.segment.lease import Control
from rlcore.segment.spec import EXIT_DONE, EXIT_PREEMPTED, SegmentManifest, SegmentSpec
from rlcore.segment.store import LocalCheckpointStore
from tests.integration.test_train_tiny import dataset, experiment

__all__ = ["dataset"]  # a fixture

STEPS = 6


def start(spec: SegmentSpec) -> subprocess.Popen[bytes]:
    path = spec.run_dir / "spec.json"
    path.write_text(spec.model_dump_json())
    log = (spec.run_dir / "trainer.log").open("ab")
    return subprocess.Popen([sys.executable, "-m", "rlcore.segment", "run", str(path)], stdout=log, stderr=log)


def manifests(run_dir: Path) -> list[SegmentManifest]:
    files = sorted((run_dir / "segments").glob("*.json"))
    return [SegmentManifest.model_validate_json(file.read_text()) for file in files]


@pytest.mark.slow
def test_a_stopped_trainer_commits_and_the_next_one_goes_on(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    config = experiment(**{"training.steps": STEPS, "segment.steps": 4, "resources.workers": 1})
    data = DatasetRef(
        path=str(dataset), digest="d", source="s", num_problems=24, num_rejected=0, num_images=24, max_prompt_tokens=60
    )
    model = ModelRef(path=str(tiny_model), digest="m", source="tiny", num_parameters=1)

    def spec(first: int, parent: CheckpointRef | None) -> SegmentSpec:
        return SegmentSpec(
            run_id="run",
            run_dir=tmp_path,
            experiment=config,
            dataset=data,
            model=model,
            first_segment=first,
            parent=parent,
        )

    control = Control(tmp_path / "control.json")
    control.beat(9)
    trainer = start(spec(0, None))
    while not read_journal(tmp_path / "journal.jsonl"):
        assert trainer.poll() is None, (tmp_path / "trainer.log").read_text()[-2000:]
        time.sleep(0.05)
    trainer.send_signal(signal.SIGTERM)
    assert trainer.wait(60) == EXIT_PREEMPTED, (tmp_path / "trainer.log").read_text()[-2000:]
    (stopped,) = manifests(tmp_path)
    assert not stopped.complete
    assert 1 <= stopped.last_step < 4

    control.beat(9)
    assert start(spec(0, stopped.checkpoint)).wait(180) == EXIT_DONE, (tmp_path / "trainer.log").read_text()[-2000:]
    first, second = manifests(tmp_path)
    assert (first.first_step, first.last_step, first.complete) == (0, 4, True)
    assert (second.first_step, second.last_step, second.complete) == (4, STEPS, True)
    assert second.trainer_starts == 2
    assert [record.step for record in read_journal(tmp_path / "journal.jsonl")] == list(range(1, STEPS + 1))
    assert not (tmp_path / "lease.json").exists()
    newest = LocalCheckpointStore(tmp_path, "run").latest()
    assert newest is not None
    assert newest.step == STEPS
    assert (Path(newest.path) / "canary.json").exists()
