"""A real trainer on a machine that has nothing but the store: the same steps, the same weights."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from infra.settings import Settings
from rlcore.failures import EXIT_DONE
from rlcore.segment.journal import read_journal
from rlcore.segment.lease import Control
from tasks.driver.mirror import RunMirror, safe_step
from tasks.open import find_checkpoint
from tasks.run import existing_run
from tasks.store.made import store_of
from tests.integration.tiny_run import experiment
from tests.integration.trainer_process import log_of, manifests, spec_of, start
from tests.stores import BUCKET, S3, s3_server
from tests.train_states import load_full_weights


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[S3]:
    with s3_server(tmp_path / "s3.log") as server:
        yield server


def test_a_run_goes_on_from_the_store_to_the_same_weights(
    s3: S3, tiny_model: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is mirrored when its first segment is committed, while the trainer waits; then it ends. Another machine
    has that copy alone."""
    for name, value in {**s3.variables, "RLFLOW_STORE": f"s3://{BUCKET}/lab"}.items():
        monkeypatch.setenv(name, value)
    reward = tmp_path / "letters.py"  # random weights are never right, but not all equally wordy
    reward.write_text(
        "def reward(text, problem, num_tokens, finish_reason):\n"
        "    return sum(map(str.isalpha, text)) / max(1, len(text))\n"
    )
    config = experiment(
        **{
            "training.steps": 4, "segment.steps": 2, "resources.workers": 1,
            "reward.name": "user", "reward.file": str(reward),
        }
    )  # fmt: skip
    here = Settings(data_dir=tmp_path / "here")
    run_dir = here.runs_dir / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "experiment.json").write_text(config.model_dump_json())
    run = existing_run("run", here)
    control = Control(run_dir / "control.json")
    control.beat(0)
    trainer = start(spec_of(run_dir, tiny_model, dataset, config))
    deadline = time.monotonic() + 600
    while not manifests(run_dir):
        assert trainer.poll() is None, log_of(run_dir)[-2000:]
        assert time.monotonic() < deadline
        control.beat(0)
        time.sleep(0.1)
    store = store_of(here)
    assert store is not None
    RunMirror(run, store, here).sync_all()
    assert safe_step(run, here) == 2
    control.beat(9)
    assert trainer.wait(600) == EXIT_DONE, log_of(run_dir)[-2000:]
    assert safe_step(run, here) == 2, "of four that are committed"
    weights = load_full_weights(Path(manifests(run_dir)[-1].checkpoint.path))
    rewards = [record.metrics["reward/mean"] for record in read_journal(run_dir / "journal.jsonl")]
    assert len(set(rewards)) == 4
    shutil.rmtree(here.data_dir)

    there = Settings(data_dir=tmp_path / "there")
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(there.data_dir))
    moved = existing_run("run", there)
    assert find_checkpoint.fn(moved).step == 2
    Control(moved.run_dir / "control.json").beat(9)
    assert start(spec_of(moved.run_dir, tiny_model, dataset, config)).wait(240) == EXIT_DONE, log_of(moved.run_dir)
    assert "run run from step 2" in log_of(moved.run_dir)
    assert "continues with another" not in log_of(moved.run_dir)
    again = load_full_weights(Path(manifests(moved.run_dir)[-1].checkpoint.path))
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    journal = read_journal(moved.run_dir / "journal.jsonl")
    assert [record.step for record in journal] == [1, 2, 3, 4]
    assert [record.metrics["reward/mean"] for record in journal] == rewards
