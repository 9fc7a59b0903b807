"""Runs with a mirror in a bucket, of moto over http and of OpenStack Swift over TLS, and the fake trainer: what is in
it, and what a machine makes of it that has nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import s3fs
from mlflow import MlflowClient
from mlflow.store.artifact.s3_artifact_repo import _cached_get_s3_client

from flows.train_grpo import train_grpo
from infra.errors import StorageAwayError, StorageRefusedError
from infra.settings import Settings
from infra.store.bucket import Store
from rlcore.artifacts import ModelRef
from rlcore.config import ExperimentConfig
from rlcore.segment.resume import segment_manifest
from rlcore.segment.spec import SegmentEnd, segment_path
from rlcore.segment.store import LocalCheckpointStore, read_manifest, verify_checkpoint
from tasks.driver import mirror as mirroring
from tasks.driver.failures import Failure, failure_of
from tasks.driver.mirror import RunMirror, mirror_run, safe_step, wait_until_mirrored
from tasks.open import find_checkpoint
from tasks.run import Run, existing_run
from tasks.store.made import fetch, made
from tasks.store.restore import TakenOverError, mirrored_step, restore_checkpoint, restore_run
from tests.stores import BUCKET, S3, Plug, s3_server, warnings_of_tries
from tests.swift import swift_server

SMALL = ["training.steps=5", "segment.steps=2", "segment.keep_checkpoints=2", "data.template=math"]


MOTO, SWIFT = "moto", "swift over TLS"
once = pytest.mark.parametrize("s3", [MOTO], indirect=True)  # test_store shows the outages and errors of both servers


@pytest.fixture(scope="module", params=[MOTO, SWIFT])
def s3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    folder = tmp_path_factory.mktemp("s3")
    with s3_server(folder / "log") if request.param == MOTO else swift_server(folder) as server:
        yield server


def place_of(request: pytest.FixtureRequest) -> str:
    """A prefix of the test's own in the bucket."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    return f"s3://{BUCKET}/{name}"


@pytest.fixture
def store(s3: S3, data_dir: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An MLflow database that outlives the data folder."""
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    uri = place_of(request)
    monkeypatch.setenv("RLFLOW_STORE", uri)
    database = data_dir.parent / "mlflow.db"
    shutil.copy(data_dir / "mlflow" / "mlflow.db", database)
    monkeypatch.setenv("RLFLOW_MLFLOW_URI", f"sqlite:///{database}")
    return Store(uri)


@pytest.fixture(autouse=True)
def _no_client_of_another_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """s3fs, MLflow and boto3 keep clients and keys, whatever endpoint and keys the environment names later."""
    # botocore's pauses between its tries would be most of each outage
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    s3fs.S3FileSystem.clear_instance_cache()
    _cached_get_s3_client.cache_clear()
    yield
    s3fs.S3FileSystem.clear_instance_cache()
    _cached_get_s3_client.cache_clear()


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
    first = train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="moved")
    assert store.sealed_below("runs/moved/checkpoints") == steps(2, 4, 5), "as on this disk: the fake trainer keeps all"
    names = store.files_below("runs/moved")
    assert {"finished", "journal.jsonl", "report/report.html", "segments/0002.json", "trainer.log"} <= set(names)
    assert {"validation/step-000005/report.json", "validation/step-000005/completions.parquet"} <= set(names)
    assert not {"lease.json", "control.json", "mirror.json"} & set(names)
    artifacts = MlflowClient(tracking_uri=Settings().tracking_uri).get_run(first.mlflow_run_id).info.artifact_uri
    assert artifacts.startswith(f"{store.uri}/mlflow/"), "with a database and no server, MLflow itself takes ./mlruns"
    segments = data_dir / "runs" / "moved" / "segments"
    before = {path.name: json.loads(path.read_text()) for path in segments.iterdir()}
    shutil.rmtree(data_dir)

    found = find_checkpoint.fn(existing_run("moved", Settings()))  # as the flows evaluate and merge begin
    assert found.path == first.checkpoint
    assert verify_checkpoint(found).step == 5
    assert fetch(Path(first.merged_model), Settings())

    summary = train_grpo("grpo-geo3k-tiny", steps=9, overrides=["segment.steps=3", *SMALL[2:]], run_id="moved")
    assert (summary.steps, summary.segments) == (9, 5)
    assert trainings(data_dir) == ["train from segment 3"]
    assert not [line for line in calls(data_dir) if line in ("evaluate 0", "validate 0", "merge 5")], "in the store"
    assert summary.mlflow_run_id == first.mlflow_run_id
    assert published(first.mlflow_run_id) == list(range(1, 10))
    assert published(first.mlflow_run_id, "eval/accuracy") == [0, 2, 4, 5, 8, 9]
    assert store.sealed_below("runs/moved/checkpoints") == steps(5, 8, 9), "two are kept, and what is on this disk"
    assert {name: json.loads((segments / name).read_text()) for name in before} == before
    (change,) = map(json.loads, (data_dir / "runs" / "moved" / "changes.jsonl").read_text().splitlines())
    assert change["step"] == 5


@once
def test_an_absent_endpoint_holds_up_no_step_and_no_step_is_published_that_could_be_lost(
    store: Store, s3: S3, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network is away from before the first commit until the trainer has ended."""
    plug = Plug(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", plug.address)
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(mirroring, "_FIRST_DELAY", 0.5)
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.5")
    run_dir = data_dir / "runs" / "outage"
    seen: list[int] = []
    ended = threading.Event()

    def watch(told: list[str]) -> None:
        while not (run_dir / "journal.jsonl").exists() and not ended.is_set():
            time.sleep(0.02)
        plug.pull_out()
        while not (told and (run_dir / "segments" / "0002.json").exists()) and not ended.is_set():
            found = run_dir / "mlflow.json"
            if found.exists():
                seen.append(json.loads(found.read_text())["published_step"])
            seen.append(mirrored_step(run_dir, Settings()))
            time.sleep(0.05)
        plug.put_in()

    with warnings_of_tries() as told:
        watcher = threading.Thread(target=watch, args=(told,), daemon=True)
        watcher.start()
        try:
            summary = train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="outage")
        finally:
            ended.set()
            watcher.join()
    assert "training goes on" in told[0]
    assert seen
    assert set(seen) == {0}, "segments were committed here, and a loss of this machine would have taken them back"
    assert trainings(data_dir) == ["train from segment 0"]
    assert published(summary.mlflow_run_id) == [1, 2, 3, 4, 5]
    assert store.sealed_below("runs/outage/checkpoints") == steps(2, 4, 5)


@pytest.fixture
def bucket(s3: S3, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    for name, value in s3.variables.items():
        monkeypatch.setenv(name, value)
    return Store(place_of(request))


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
    made = checkpoints.commit(staging, step=step, end=end, trainer_state={}, **digests)
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


@once
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


def test_a_damaged_checkpoint_in_the_store_falls_back_to_the_one_before_it(
    bucket: Store, s3: S3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, at_old = machine(tmp_path / "old", bucket)
    commit(old, 2, 0)
    RunMirror(old, bucket, at_old).sync_all()
    commit(old, 4, 1)
    (old.run_dir / "lease.json.lock").touch()
    RunMirror(old, bucket, at_old).sync_all()
    assert "lease.json.lock" not in bucket.files_below("runs/run")
    key = "runs/run/checkpoints/step-000004"
    s3.files().pipe_file(f"{bucket.uri.removeprefix('s3://')}/{key}/weights", b"half")

    new, at_new = machine(tmp_path / "new", bucket)
    restore_run("run", at_new)
    restore_checkpoint(new.run_dir, at_new)
    assert [path.name for path in (new.run_dir / "checkpoints").iterdir()] == steps(2)
    assert "A DAMAGED CHECKPOINT IS SKIPPED" in caplog.text
    assert f"{key}/weights has SHA-256" in caplog.text
    segment_path(new.run_dir, 1).unlink()  # as the trainer does, before it takes these steps again
    weights = (commit(new, 4, 1) / "weights").read_bytes()
    RunMirror(new, bucket, at_new).sync_all()
    assert bucket.pull(key, tmp_path / "back")
    assert (tmp_path / "back" / "weights").read_bytes() == weights


@once
def test_at_the_end_of_a_run_a_refusal_is_reported_at_once_and_an_outage_only_once(
    bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing_port: int
) -> None:
    run, settings = machine(tmp_path, Store("s3://nobody-made-it/x"))
    commit(run, 2, 0)
    with (
        pytest.raises(StorageRefusedError, match="Make the bucket") as refused,
        mirror_run(run, settings.model_copy(update={"store_wait_seconds": 3600.0})),
    ):
        wait_until_mirrored(run, 2, settings)
    assert failure_of(refused.value) == Failure.BAD_INPUT, "never tried again"

    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{refusing_port}")
    s3fs.S3FileSystem.clear_instance_cache()
    run, settings = machine(tmp_path, bucket)
    impatient = settings.model_copy(update={"store_wait_seconds": 0.5})
    with pytest.raises(StorageAwayError, match="within 0.5 s"), mirror_run(run, impatient):
        wait_until_mirrored(run, 2, impatient)
    with pytest.raises(RuntimeError, match="nothing sends"):
        wait_until_mirrored(run, 2, impatient)


@once
def test_the_thread_that_sends_outlives_what_a_library_raises(
    bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, settings = machine(tmp_path, bucket)
    commit(run, 2, 0)
    monkeypatch.setattr(mirroring, "_FIRST_DELAY", 0.1)
    sync, tries = RunMirror.sync, iter([KeyError("of a library")])

    def fails_once(self: RunMirror, *, last: bool = False) -> bool:
        for error in tries:
            raise error
        return sync(self, last=last)

    monkeypatch.setattr(RunMirror, "sync", fails_once)
    with mirror_run(run, settings):
        wait_until_mirrored(run, 2, settings)
    assert "training goes on, the next try is in 0 s: KeyError: 'of a library'" in caplog.text


@once
def test_an_outage_behind_a_job_does_not_repeat_the_job(
    s3: S3, bucket: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge takes hours; its upload is tried again alone."""
    plug = Plug(s3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", plug.address)
    s3fs.S3FileSystem.clear_instance_cache()
    for name, value in (("DATA_DIR", str(tmp_path)), ("STORE", bucket.uri), ("RETRY_DELAY_SCALE", "0.1")):
        monkeypatch.setenv(f"RLFLOW_{name}", value)
    folder, jobs = Settings().models_dir / "merged", []

    def job() -> ModelRef:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        jobs.append("merge")
        plug.pull_out()
        return ModelRef(path=str(folder), digest="d", source="s", num_parameters=1)

    with warnings_of_tries(plug.put_in) as told:
        made("merge-key", folder, job, ModelRef)
    assert jobs == ["merge"]
    assert len(told) == 1
    assert told[0].startswith("store: the next try is in 1 s: ")
    assert bucket.sealed_below("models") == ["merged"]
