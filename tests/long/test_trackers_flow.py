"""Trackers beside MLflow around the flow: one that is away stops nothing, and catches up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.train_grpo import train_grpo
from infra import processes
from infra.settings import Settings
from infra.tracking.extra import tracker_mark
from tasks.driver import publish as publishing

SMALL = ["training.steps=5", "segment.steps=2", "data.template=math"]


def test_a_tracker_that_is_away_stops_nothing_and_catches_up(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusing_port: int
) -> None:
    monkeypatch.setenv("RLFLOW_TRACKERS", "tensorboard, wandb")
    monkeypatch.setenv("RLFLOW_TRACKER_PYTHON", sys.executable)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{refusing_port}")
    monkeypatch.setenv("WANDB_API_KEY", "local-" + 40 * "0")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    monkeypatch.setattr(publishing, "_LAST_WAIT_SECONDS", 12.0)
    summary = train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="tracked")
    assert MlflowClient(tracking_uri=Settings().tracking_uri).get_run(summary.mlflow_run_id).info.status == "FINISHED"
    assert "The run is complete without it; wandb may catch up later." in caplog.text
    states = data_dir / "runs" / "tracked" / "trackers"
    assert json.loads((states / "tensorboard.json").read_text()) == {"published_step": 5}
    assert not (states / "wandb.json").exists()

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(publishing, "_LAST_WAIT_SECONDS", 60.0)
    publishing.publish_run("tracked", Settings())
    assert json.loads((states / "wandb.json").read_text()) == {"published_step": 5}
    for name in ("tensorboard", "wandb"):
        assert not processes.marked(tracker_mark(data_dir / "runs" / "tracked", name))


def test_a_tracker_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_TRACKERS", "comet")
    with pytest.raises(ValueError, match=r"(?s)trackers.*'tensorboard', 'wandb' or 'swanlab'"):
        Settings()
