"""Runs beside a bucket of a real S3 server, with the fake trainer: what is in it, and what a machine makes of it that
has nothing else."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.train_grpo import grpo_geo3k
from infra.settings import Settings
from infra.store import Store
from rlcore.config import ExperimentConfig
from rlcore.segment.resume import segment_manifest
from rlcore.segment.spec import SegmentEnd, segment_path
from rlcore.segment.store import LocalCheckpointStore, read_manifest, verify_checkpoint
from tasks import mirroring
from tasks.mirroring import RunMirror, safe_step
from tasks.runs import Run, existing_run, newest_checkpoint
from tasks.stored import TakenOverError, fetched, mirrored_step, restore_checkpoint, restore_run
from tests.flows.conftest import _prefect, data_dir, empty_mlflow
from tests.stores import BUCKET, S3, s3_server

__all__ = ["_prefect", "data_dir", "empty_mlflow"]  # fixtures
pytestmark = pytest.mark.slow

SMALL = ["training.steps=5", "segment.steps=2", "segment.keep_checkpoints=2", "data.template=math"]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture
def store(s3: S3, data_dir: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A place of the test's own in the bucket, and an MLflow database that outlives the data folder."""
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    uri = f"s3://{BUCKET}/{request.node.name}"
    monkeypatch.setenv("RLFLOW_STORE", uri)
    database = data_dir.parent / "mlflow.db"
    shutil.copy(data_dir / "mlflow" / "mlflow.db", database)
    monkeypatch.setenv("RLFLOW_MLFLOW_URI", f"sqlite:///{database}")
    return Store(uri)


def trainings(data_dir: Path) -> list[str]:
    return [line for line in calls(data_dir) if line.startswith("train")]


def calls(data_dir: Path) -> list[str]:
    path = data_dir / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def steps(*numbers: int) -> list[str]:
    return [f"step-{number:06d}" for number in numbers]


def published(mlflow_run_id: str, key: str = "reward/mean") -> list[int]:
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    return sorted(point.step for point in client.get_metric_history(mlflow_run_id, key))


def test_a_machine_that_has_nothing_goes_on_from_the_store_as_the_same_run(store: Store, data_dir: Path) -> None:
    first = grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="moved")
    assert store.sealed_below("runs/moved/checkpoints") == steps(2, 4, 5), "as on this disk: the fake trainer keeps all"
    names = store.files_below("runs/moved")
    assert {"finished", "journal.jsonl", "report/report.html", "segments/0002.json", "trainer.log"} <= set(names)
    assert not {"lease.json", "control.json", "mirror.json"} & set(names)
    artifacts = MlflowClient(tracking_uri=Settings().tracking_uri).get_run(first.mlflow_run_id).info.artifact_uri
    assert artifacts.startswith(f"{store.uri}/mlflow/"), "with a database and no server, MLflow itself takes ./mlruns"
    segments = data_dir / "runs" / "moved" / "segments"
    before = {path.name: json.loads(path.read_text()) for path in segments.iterdir()}
    shutil.rmtree(data_dir)

    found = newest_checkpoint(existing_run("moved", Settings()))  # as the flows evaluate and merge begin
    assert found.path == first.checkpoint
    assert verify_checkpoint(found).step == 5
    assert fetched(Path(first.merged_model), Settings())

    summary = grpo_geo3k("grpo-geo3k-tiny", steps=9, overrides=["segment.steps=3", *SMALL[2:]], run_id="moved")
    assert (summary.steps, summary.segments) == (9, 5)
    assert trainings(data_dir) == ["train from segment 3"]
    assert not [line for line in calls(data_dir) if line in ("evaluate 0", "merge 5")], "found in the store"
    assert summary.mlflow_run_id == first.mlflow_run_id
    assert published(first.mlflow_run_id) == list(range(1, 10))
    assert published(first.mlflow_run_id, "eval/accuracy") == [0, 5, 9]
    assert store.sealed_below("runs/moved/checkpoints") == steps(5, 8, 9), "two are kept, and what is on this disk"
    assert {name: json.loads((segments / name).read_text()) for name in before} == before
    (change,) = map(json.loads, (data_dir / "runs" / "moved" / "changes.jsonl").read_text().splitlines())
    assert change["step"] == 5


def test_an_absent_endpoint_holds_up_no_step_and_no_step_is_published_that_could_be_lost(
    store: Store, s3: S3, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint refuses everything from the first commit on, until the trainer has ended."""
    monkeypatch.setattr(mirroring, "_FIRST_DELAY", 0.5)
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.3")
    run_dir, told = data_dir / "runs" / "outage", []
    whole = Store.push

    def refuses(self: Store, folder: Path, key: str, **known: object) -> None:
        if "checkpoints" in key and not (run_dir / "segments" / "0002.json").exists():
            told.append(mirrored_step(run_dir, Settings()))
            raise mirroring.StorageError("the endpoint does not answer")
        whole(self, folder, key, **known)

    monkeypatch.setattr(Store, "push", refuses)
    seen: list[int] = []

    def watch() -> None:
        while not (run_dir / "finished").exists():
            found = run_dir / "mlflow.json"
            published_step = json.loads(found.read_text())["published_step"] if found.exists() else None
            if published_step is not None and not (run_dir / "segments" / "0002.json").exists():
                seen.append(published_step)
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    summary = grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="outage")
    assert told
    assert set(told) == {0}
    assert seen
    assert set(seen) == {0}, "segments were committed here, and a loss of this machine would have taken them back"
    assert trainings(data_dir) == ["train from segment 0"]
    assert published(summary.mlflow_run_id) == [1, 2, 3, 4, 5]
    assert store.sealed_below("runs/outage/checkpoints") == steps(2, 4, 5)


@pytest.fixture
def bucket(s3: S3, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    return Store(f"s3://{BUCKET}/{request.node.name}")


def machine(folder: Path, bucket: Store) -> tuple[Run, Settings]:
    settings = Settings(data_dir=folder, store=bucket.uri)
    return Run(run_id="run", run_dir=settings.runs_dir / "run", experiment=ExperimentConfig(name="toy")), settings


def commit(run: Run, step: int, segment: int) -> Path:
    """As the trainer does."""
    checkpoints = LocalCheckpointStore(run.run_dir, run.run_id)
    staging = checkpoints.stage(step)
    (staging / "weights").write_bytes(os.urandom(100))
    end = SegmentEnd(segment, step - 2, complete=True)
    digests = {"experiment_digest": "e", "dataset_digest": "d", "model_digest": "m"}
    made = checkpoints.commit(staging, step=step, policy_version=step, end=end, trainer_state={}, **digests)
    path = segment_path(run.run_dir, segment)
    path.parent.mkdir(exist_ok=True)
    path.write_text(segment_manifest(made, read_manifest(made)).model_dump_json())
    return Path(made.path)


def test_a_machine_that_was_thought_dead_stops_once_another_has_gone_on(bucket: Store, tmp_path: Path) -> None:
    old, at_old = machine(tmp_path / "old", bucket)
    commit(old, 2, 0)
    mirror = RunMirror(old, bucket, at_old)
    mirror.sync_all()
    assert safe_step(old, at_old) == 2

    new, at_new = machine(tmp_path / "new", bucket)
    restore_run("run", at_new)
    restore_checkpoint(new.run_dir, at_new)
    commit(new, 4, 1)
    RunMirror(new, bucket, at_new).sync_all()
    assert safe_step(new, at_new) == 4
    names = bucket.files_below("runs/run")

    commit(old, 4, 1)
    with pytest.raises(TakenOverError, match="another machine has taken over run run"):
        mirror.sync()
    with pytest.raises(TakenOverError):
        safe_step(old, at_old)  # what the driver asks each second
    shutil.rmtree(segment_path(old.run_dir, 1).parent)
    commit(old, 2, 0)
    with pytest.raises(TakenOverError):
        RunMirror(old, bucket, at_old).sync()  # started again, and behind
    assert bucket.files_below("runs/run") == names


def test_a_damaged_checkpoint_is_not_sent_and_nothing_says_that_it_was(
    bucket: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, settings = machine(tmp_path, bucket)
    commit(run, 2, 0)
    (commit(run, 4, 1) / "weights").write_bytes(bytes(100))
    mirror = RunMirror(run, bucket, settings)
    mirror.sync_all()
    assert "A DAMAGED CHECKPOINT IS NOT SENT" in caplog.text
    assert bucket.sealed_below("runs/run/checkpoints") == steps(2)
    assert safe_step(run, settings) == 0, "the newest segment's is not there, so nothing of the run says so"
    commit(run, 6, 2)
    mirror.sync_all()
    assert safe_step(run, settings) == 6
    assert bucket.sealed_below("runs/run/checkpoints") == steps(2, 6)
