"""Rollouts as traces of MLflow: what they hold, that each is there once, and that an outage costs only them."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from PIL import Image

from infra.errors import ServerError
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef
from rlcore.config import ExperimentConfig
from rlcore.segment.journal import MetricJournal
from rlcore.segment.spec import SegmentManifest, segment_path
from tasks import traces
from tasks.pictures import small_picture
from tasks.run import Run
from tasks.traces import MOST_PIXELS, log_rollouts, rollouts_of

ROW = {
    "problem_id": "p1", "question": "<image>Sides?", "answer": "4", "images": ["aa"], "completion": "\\boxed{4}",
    "tokens": 5, "finish_reason": "stop", "reward": 1.0, "parts": {"accuracy": 1.0}, "graded": True,
}  # fmt: skip


@pytest.fixture
def settings(empty_mlflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("RLFLOW_TRACES", "2")
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")
    (tmp_path / "mlflow").mkdir()
    shutil.copy(empty_mlflow, tmp_path / "mlflow" / "mlflow.db")
    return Settings()


@pytest.fixture
def run(settings: Settings) -> Run:
    """Steps 1 and 2, of which each ends a segment; three rollouts of each were saved."""
    run = Run(run_id="r", run_dir=settings.runs_dir / "r", experiment=ExperimentConfig(name="toy"))
    images = settings.datasets_dir / "d" / "images"
    images.mkdir(parents=True)
    Image.new("RGB", (800, 400), (255, 0, 0)).save(images / "aa.png")
    run.run_dir.mkdir(parents=True)
    (run.run_dir / "spec.json").write_text(json.dumps({"dataset": {"path": str(images.parent)}}))
    (run.run_dir / "samples").mkdir()
    journal = MetricJournal(run.run_dir / "journal.jsonl", now_ms=lambda: 1_700_000_000_000)
    for step in (1, 2):
        journal.step(step, {"reward/mean": 0.5})
        rows = [ROW | {"reward": step + place / 8} for place in range(3)]
        (run.run_dir / "samples" / f"step-{step:06d}.json").write_text(json.dumps(rows))
    commit(run, 1)
    return run


def commit(run: Run, step: int) -> None:
    checkpoint = CheckpointRef(
        path="/c", step=step, policy_version=step, manifest_sha256="m", run_id="r", segment=step - 1
    )  # fmt: skip
    manifest = SegmentManifest(
        run_id="r", segment=step - 1, first_step=step - 1, last_step=step, complete=True, checkpoint=checkpoint,
        experiment_digest="e", dataset_digest="d",
    )  # fmt: skip
    path = segment_path(run.run_dir, step - 1)
    path.parent.mkdir(exist_ok=True)
    path.write_text(manifest.model_dump_json())


def traces_in(settings: Settings) -> list[Any]:
    client = MlflowClient(settings.tracking_uri)
    experiment = client.get_experiment_by_name("toy").experiment_id
    (found,) = client.search_runs([experiment])
    return sorted(
        client.search_traces(locations=[experiment], run_id=found.info.run_id),
        key=lambda trace: trace.info.tags["rlflow.rollout"],
    )


def test_each_segment_s_rollouts_are_traces_once_and_on_its_page(settings: Settings, run: Run) -> None:
    log_rollouts(run, settings)
    assert [trace.info.tags["rlflow.rollout"] for trace in traces_in(settings)] == ["step-1/0", "step-1/1"]
    commit(run, 2)
    for _ in range(2):  # as after a resume
        log_rollouts(run, settings)
    found = traces_in(settings)
    assert [trace.info.tags["rlflow.rollout"] for trace in found] == [f"step-{s}/{n}" for s in (1, 2) for n in (0, 1)]
    (span,) = found[1].data.spans
    image, text = span.inputs["messages"][0]["content"]
    assert text == {"type": "text", "text": "Sides?"}
    assert image["image_url"]["url"].startswith("mlflow-attachment://"), "MLflow keeps the picture as a file"
    assert "image%2Fpng" in image["image_url"]["url"]
    assert span.outputs["choices"][0]["message"]["content"] == "\\boxed{4}"
    assert {name: span.attributes[name] for name in ("step", "reward", "answer", "accuracy", "tokens")} == {
        "step": 1, "reward": 1.125, "answer": "4", "accuracy": 1.0, "tokens": 5,
    }  # fmt: skip
    assert found[1].info.tags["reward"] == "1.125"
    assert found[1].info.timestamp_ms == 1_700_000_000_000


def test_zero_asks_mlflow_for_nothing(settings: Settings, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "tracker_of", None)
    log_rollouts(run, settings.model_copy(update={"traces": 0}))


def test_an_outage_costs_no_more_than_the_traces(
    settings: Settings, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*_: object) -> None:
        raise ServerError("MLflow is away")

    real = traces.tracker_of
    monkeypatch.setattr(traces, "tracker_of", away)
    log_rollouts(run, settings)
    assert "did not accept the rollouts of run r: MLflow is away" in caplog.text
    monkeypatch.setattr(traces, "tracker_of", real)
    log_rollouts(run, settings)
    assert len(traces_in(settings)) == 2


def test_a_picture_is_small_and_one_that_is_gone_is_left_out(settings: Settings, run: Run) -> None:
    url = small_picture(settings.datasets_dir / "d" / "images" / "aa.png", MOST_PIXELS)
    assert Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size == (384, 192)
    (settings.datasets_dir / "d" / "images" / "aa.png").unlink()
    first, second = rollouts_of(run, 1, 2)
    assert (first.images, first.question) == ((), "<image>Sides?")
    assert (first.key, second.key) == ("step-1/0", "step-1/1")
    assert rollouts_of(run, 7, 2) == []
