"""MLflow on SQLite: one run per training run, each step in it exactly once."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import mlflow
import pandas
import pytest
import requests
from botocore.exceptions import EndpointConnectionError
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST

from infra.errors import RegistryError, ServerError, ServerRefusedError, StorageError
from infra.tracking.extra import read_published
from infra.tracking.models import Pyfunc
from infra.tracking.system import system_metrics
from infra.tracking.tracker import DRIFT_TAG, Tracker, _run_exists, check_reachable
from rlcore.segment.journal import StepRecord

Open = Callable[[str], Tracker]


@pytest.fixture(scope="module")
def open_run(tmp_path_factory: pytest.TempPathFactory) -> Open:
    folder = tmp_path_factory.mktemp("tracking")

    def opened(run_id: str) -> Tracker:
        return Tracker.open(
            uri=f"sqlite:///{folder / 'mlflow.db'}",
            artifacts_uri=(folder / "artifacts").as_uri(),
            experiment="tiny",
            run_id=run_id,
            run_dir=folder / "runs" / run_id,
        )

    return opened


def records(last: int) -> list[StepRecord]:
    return [StepRecord(step, 1_700_000_000_000 + step, {"reward/mean": step / 10}) for step in range(1, last + 1)]


def history(tracker: Tracker) -> list[tuple[int, float]]:
    points = client(tracker).get_metric_history(tracker.mlflow_run_id, "reward/mean")
    return [(point.step, point.value) for point in points]


def client(tracker: Tracker) -> MlflowClient:
    return MlflowClient(tracking_uri=tracker._state.uri)


def test_the_same_run_is_found_again(open_run: Open) -> None:
    assert open_run("again").mlflow_run_id == open_run("again").mlflow_run_id
    assert open_run("other").mlflow_run_id != open_run("again").mlflow_run_id


def test_a_run_is_found_by_its_tag_when_the_folder_forgot_it(open_run: Open, tmp_path: Path) -> None:
    first = open_run("forgotten")
    (first._run_dir / "mlflow.json").unlink()
    assert open_run("forgotten").mlflow_run_id == first.mlflow_run_id


@pytest.mark.parametrize("damage", ["", '{"uri": "sqlite', '{"uri": 7}', "[]"])
def test_a_damaged_mlflow_json_is_made_anew_and_nothing_is_counted_twice(
    open_run: Open, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As a full disk or a crash of the machine leaves it."""
    name = f"damaged-{hash(damage)}"
    first = open_run(name)
    first.publish(records(4), through_step=4)
    (first._run_dir / "mlflow.json").write_text(damage)
    again = open_run(name)
    assert "mlflow.json is damaged" in caplog.text
    assert again.mlflow_run_id == first.mlflow_run_id
    again.publish(records(6), through_step=6)
    assert history(again) == [(step, step / 10) for step in range(1, 7)]
    assert open_run(name).published_step == 6


def test_what_a_tracker_has_taken_is_read_from_a_whole_file_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "tensorboard.json"
    assert read_published(state) == 0
    state.write_text('{"published_step": 7}')
    assert read_published(state) == 7
    assert not caplog.text
    for damage in ("", '{"published', "{}", "7"):
        state.write_text(damage)
        assert read_published(state) == 0
    assert "tensorboard.json is damaged" in caplog.text


def test_an_evaluation_before_step_1_is_sent_with_the_first_steps_and_once(open_run: Open) -> None:
    tracker = open_run("from-zero")
    everything = [StepRecord(0, 1_600_000_000_000, {"reward/mean": 0.0}), *records(4)]
    assert tracker.publish(everything, through_step=2) == 2
    assert tracker.publish(everything, through_step=4) == 4
    (tracker._run_dir / "mlflow.json").unlink()
    assert open_run("from-zero").publish(everything, through_step=4) == 4
    assert history(tracker) == [(step, step / 10) for step in range(5)]


def test_each_step_is_there_exactly_once_after_repeated_publishing(open_run: Open) -> None:
    tracker = open_run("repeat")
    assert tracker.publish(records(6), through_step=4) == 4
    assert tracker.publish(records(6), through_step=4) == 4
    (tracker._run_dir / "mlflow.json").unlink()  # as after a kill between sending and remembering
    tracker = open_run("repeat")
    assert tracker.publish(records(6), through_step=6) == 6
    assert history(tracker) == [(step, step / 10) for step in range(1, 7)]


def test_steps_that_a_resume_may_take_back_stay_unpublished(open_run: Open) -> None:
    tracker = open_run("committed")
    tracker.publish(records(6), through_step=2)
    assert [step for step, _ in history(tracker)] == [1, 2]


def test_a_changed_parameter_is_noted_and_does_not_fail(open_run: Open) -> None:
    tracker = open_run("drift")
    tracker.log_params({"training.steps": 4, "seed": 0})
    tracker.log_params({"training.steps": 4, "seed": 1})
    data = client(tracker).get_run(tracker.mlflow_run_id).data
    assert data.params == {"training.steps": "4", "seed": "0"}
    assert '"logged": "0", "now": "1"' in data.tags[DRIFT_TAG]


def test_a_long_digest_is_cut_to_what_mlflow_takes(open_run: Open) -> None:
    tracker = open_run("dataset")
    tracker.log_dataset(name="d", digest="a" * 64, path="/somewhere", context="training", profile={"rows": 3})
    (entry,) = client(tracker).get_run(tracker.mlflow_run_id).inputs.dataset_inputs
    assert entry.dataset.digest == "a" * 36


def test_a_model_is_registered_by_reference_once(open_run: Open, tmp_path: Path) -> None:
    tracker = open_run("model")
    folder = tmp_path / "merged"
    folder.mkdir()
    arguments: dict[str, Any] = {
        "name": "geo", "path": folder, "tags": {"rlflow.step": "4"}, "alias": "verified", "description": "",
        "pyfunc": an_echo(tmp_path),
    }  # fmt: skip
    with pytest.raises(RegistryError, match=r"config\.json"):
        tracker.register_model(**arguments)
    (folder / "config.json").write_text("{}")
    first = tracker.register_model(**arguments)
    assert tracker.register_model(**arguments) == first
    found = client(tracker).get_model_version_by_alias("geo", "verified")
    assert (str(found.version), found.tags["rlflow.path"]) == (first.version, str(folder))
    assert found.source == f"models:/{first.model_id}"
    tags = tracker.tags_at("geo", "verified")
    assert tags is not None
    assert (tags["rlflow.step"], tags["rlflow.path"]) == ("4", str(folder))
    assert tracker.tags_at("geo", "champion") is None
    assert tracker.tags_at("other", "verified") is None


def an_echo(folder: Path) -> Pyfunc:
    """A model that answers with the text of a file and the number of pictures."""
    (folder / "settings").mkdir()
    (folder / "settings" / "text").write_text("seen: ")
    return Pyfunc(
        loader_module="tests.echo_model",
        data=folder / "settings",
        config={"suffix": "!"},
        example={"question": "How many?", "images": ["aGk="]},
        params={"temperature": 0.0, "max_completion_tokens": 7},
        requirements=["mlflow"],
    )


def test_a_registered_version_loads_by_its_alias_with_its_signature_and_example(
    open_run: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = open_run("loads")
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0" * 100_000)
    tracker.register_model(
        name="loads", path=folder, tags={"rlflow.step": "4"}, alias="champion", description="", pyfunc=an_echo(tmp_path)
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracker._uri)
    model = mlflow.pyfunc.load_model("models:/loads@champion")
    question = pandas.DataFrame([{"question": "A?", "images": ["aGk=", "aGk="]}])
    assert model.predict(question)["completion"].tolist() == ["seen: A? 2 7!"]
    assert model.predict(pandas.DataFrame([{"question": "B?"}]))["completion"].tolist() == ["seen: B? 0 7!"]
    assert model.predict(question, params={"max_completion_tokens": 3})["completion"].tolist() == ["seen: A? 2 3!"]
    other = mlflow.pyfunc.load_model("models:/loads@champion", model_config={"suffix": "?"})
    assert other.predict(question)["completion"].tolist() == ["seen: A? 2 7?"]
    with pytest.raises(MlflowException, match="question"):
        model.predict(pandas.DataFrame([{"prompt": "A?"}]))
    info = mlflow.models.get_model_info("models:/loads@champion")
    assert info.saved_input_example_info is not None
    files = [path for path in Path(mlflow.artifacts.download_artifacts("models:/loads@champion")).rglob("*")]
    assert sum(path.stat().st_size for path in files if path.is_file()) < 50_000, "the weights were copied"


def test_a_version_that_cannot_be_loaded_is_registered_again(open_run: Open, tmp_path: Path) -> None:
    """Its logged model was deleted, or it was registered when MLflow got nothing but the path."""
    tracker, folder = open_run("again-registered"), tmp_path / "merged"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    arguments: dict[str, Any] = {
        "name": "again", "path": folder, "tags": {}, "alias": "verified", "description": "",
        "pyfunc": an_echo(tmp_path),
    }  # fmt: skip
    first = tracker.register_model(**arguments)
    client(tracker).set_logged_model_tags(first.model_id, {"mlflow.model.isExternal": "true"})
    second = tracker.register_model(**arguments)
    assert (first.version, second.version) == ("1", "2")
    client(tracker).delete_logged_model(second.model_id)
    assert tracker.register_model(**arguments).version == "3"
    assert str(client(tracker).get_model_version_by_alias("again", "verified").version) == "3"


def test_a_checkpoint_is_one_logged_model_and_its_numbers_belong_to_it(open_run: Open) -> None:
    tracker = open_run("checkpoints")

    def made(step: int, manifest: str) -> str:
        tags = {"rlflow.path": f"/runs/checkpoints/step-{step}"}
        return tracker.checkpoint_model(name=f"geo-step-{step}", step=step, manifest=manifest, tags=tags)

    first = made(4, "a" * 64)
    assert made(4, "a" * 64) == first
    second = made(8, "b" * 64)
    assert second != first
    tracker.log_metrics({"eval/accuracy": 0.25, "eval/reward": 0.5}, step=4, timestamp_ms=1_700_000_000_000)
    for _ in range(2):  # repeats are harmless
        for model_id, step, value in ((first, 4, 0.25), (second, 8, 0.75)):
            points = {"eval/accuracy": value, "eval/reward": 0.5}
            tracker.log_metrics(points, step=step, timestamp_ms=1_700_000_000_000, model_id=model_id)
    mlflow_client = client(tracker)
    run = mlflow_client.get_run(tracker.mlflow_run_id)
    assert {item.model_id: item.step for item in run.outputs.model_outputs} == {first: 4, second: 8}
    found = [mlflow_client.get_logged_model(model_id) for model_id in (first, second)]
    assert [(item.name, item.status, item.tags["rlflow.step"]) for item in found] == [
        ("geo-step-4", "READY", "4"), ("geo-step-8", "READY", "8"),
    ]  # fmt: skip
    assert [{point.key: point.value for point in item.metrics} for item in found] == [
        {"eval/accuracy": 0.25, "eval/reward": 0.5}, {"eval/accuracy": 0.75, "eval/reward": 0.5},
    ]  # fmt: skip
    history = mlflow_client.get_metric_history(tracker.mlflow_run_id, "eval/accuracy")
    assert [(point.step, point.value) for point in history] == [(4, 0.25), (8, 0.75)]
    best = mlflow_client.search_logged_models(
        [run.info.experiment_id], filter_string="metrics.`eval/accuracy` > 0.5 AND tags.`rlflow.step` = '8'"
    )
    assert [item.model_id for item in best] == [second]


def test_the_load_of_the_machine_is_logged_while_the_block_runs(open_run: Open) -> None:
    tracker = open_run("load")

    def logged() -> set[str]:
        names = client(tracker).get_run(tracker.mlflow_run_id).data.metrics
        return {name for name in names if name.startswith("system/")}

    with system_metrics(tracker._uri, tracker.mlflow_run_id, 0):
        assert not [thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"]
    deadline = time.monotonic() + 60
    with system_metrics(tracker._uri, tracker.mlflow_run_id, 0.05):
        while not logged() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert {"system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"} <= logged()
    while any(thread.name == "SystemMetricsMonitor" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the monitor still runs"
        time.sleep(0.05)


def test_the_status_follows_the_run(open_run: Open) -> None:
    tracker = open_run("status")
    tracker.finish("KILLED")
    tracker.resume()
    assert client(tracker).get_run(tracker.mlflow_run_id).info.status == "RUNNING"


def test_an_unreachable_server_is_named_with_what_to_change(refusing_port: int) -> None:
    with pytest.raises(ServerError, match=r"no MLflow server answers at http://127.*RLFLOW_MLFLOW_URI"):
        check_reachable(f"http://127.0.0.1:{refusing_port}", timeout_seconds=1)


class AwayClient:
    """Raises what MLflow's client raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def set_terminated(self, *_: object) -> None:
        raise self.error

    def get_run(self, *_: object) -> None:
        raise self.error


def test_an_outage_and_a_refusal_are_distinguished(open_run: Open) -> None:
    tracker = open_run("away")
    tracker._client = AwayClient(MlflowException("connection refused"))
    for call in (lambda: tracker.finish("FAILED"), lambda: tracker.log_params({"a": 1})):
        with pytest.raises(ServerError, match=r"does not answer: connection refused"):
            call()
    tracker._client = AwayClient(MlflowException("no such status", INVALID_PARAMETER_VALUE))
    with pytest.raises(ServerRefusedError, match="refuses: no such status"):
        tracker.finish("DONE")
    answer = requests.Response()
    for status, kind in ((HTTPStatus.BAD_GATEWAY, ServerError), (HTTPStatus.FORBIDDEN, ServerRefusedError)):
        answer.status_code = status
        tracker._client = AwayClient(requests.HTTPError("an artifact", response=answer))
        with pytest.raises(kind, match="an artifact"):
            tracker.finish("FAILED")
    tracker._client = AwayClient(EndpointConnectionError(endpoint_url="http://store"))
    with pytest.raises(StorageError, match="Could not connect") as caught:
        tracker.finish("FAILED")
    assert not caught.value.permanent


def test_a_server_that_is_away_is_not_taken_for_a_run_that_is_gone() -> None:
    with pytest.raises(MlflowException, match="connection refused"):
        _run_exists(AwayClient(MlflowException("connection refused")), "id", "uri")
    assert not _run_exists(AwayClient(MlflowException("no such run", RESOURCE_DOES_NOT_EXIST)), "id", "uri")


def test_opening_against_no_server_fails_at_once(tmp_path: Path, refusing_port: int) -> None:
    with pytest.raises(ServerError, match="no MLflow server answers"):
        Tracker.open(
            uri=f"http://127.0.0.1:{refusing_port}",
            artifacts_uri="file:///nowhere",
            experiment="e",
            run_id="r",
            run_dir=tmp_path,
        )


def test_a_link_does_not_become_an_artifact(open_run: Open, tmp_path: Path) -> None:
    tracker = open_run("link")
    (tmp_path / "secret").write_text("not the run's")
    (tmp_path / "report.html").symlink_to(tmp_path / "secret")
    with pytest.raises(StorageError, match=r"report\.html is a link"):
        tracker.log_file(tmp_path / "report.html", "report")
    assert tracker.artifact_names("report") == []


def test_a_password_in_the_address_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing_port: int
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):  # set by opening, for this process alone
        monkeypatch.setenv(name, "")
    with pytest.raises(ServerError) as caught:
        Tracker.open(
            uri=f"http://me:geheim123@127.0.0.1:{refusing_port}",
            artifacts_uri="file:///nowhere", experiment="e", run_id="r", run_dir=tmp_path,
        )  # fmt: skip
    assert "geheim123" not in str(caught.value)
    assert "http://me:***@127.0.0.1" in str(caught.value)


def test_a_deleted_experiment_and_a_deleted_run_say_how_to_restore_them(open_run: Open) -> None:
    tracker = open_run("deleted")
    mlflow = client(tracker)
    mlflow.delete_run(tracker.mlflow_run_id)
    with pytest.raises(RegistryError, match=rf"is deleted.*/mlflow runs restore --run-id {tracker.mlflow_run_id}"):
        open_run("deleted")
    mlflow.restore_run(tracker.mlflow_run_id)
    assert open_run("deleted").mlflow_run_id == tracker.mlflow_run_id

    mlflow.delete_experiment(tracker._experiment_id)
    try:
        for run_id in ("deleted", "new"):
            with pytest.raises(RegistryError, match=r"'tiny' is deleted.*/mlflow experiments restore --exp"):
                open_run(run_id)
    finally:
        mlflow.restore_experiment(tracker._experiment_id)
    assert open_run("new").mlflow_run_id


@contextmanager
def answering(status: int, error_code: str) -> Iterator[str]:
    """An MLflow server that answers every request so."""

    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"error_code": error_code, "message": "as the test wants it"}).encode())

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "error_code"),
    [
        (401, "UNAUTHENTICATED"),
        (403, "PERMISSION_DENIED"),
        (404, "ENDPOINT_NOT_FOUND"),
        (429, "REQUEST_LIMIT_EXCEEDED"),
    ],
)
def test_a_server_that_refuses_is_not_taken_for_a_model_without_a_champion(
    status: int, error_code: str, open_run: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = open_run("refused")
    with answering(status, error_code) as uri:
        tracker._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        with pytest.raises(ServerError if status == HTTPStatus.TOO_MANY_REQUESTS else ServerRefusedError):
            tracker.tags_at("geo", "champion")
    with answering(404, "RESOURCE_DOES_NOT_EXIST") as uri:
        tracker._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        assert tracker.tags_at("geo", "champion") is None


def _open_first(folder: Path, run_id: str, gate: Barrier) -> None:
    gate.wait()
    Tracker.open(
        uri=f"sqlite:///{folder / 'mlflow.db'}",
        artifacts_uri=(folder / "artifacts").as_uri(),
        experiment="tiny",
        run_id=run_id,
        run_dir=folder / "runs" / run_id,
    )


def test_first_runs_that_start_together_over_an_empty_folder_make_one_database(tmp_path: Path) -> None:
    # Not forked: a test before this one may have left threads of Prefect's, and a fork of these cannot end cleanly.
    spawned = multiprocessing.get_context("spawn")
    gate = spawned.Barrier(3)  # opened once all three have imported MLflow
    runs = [spawned.Process(target=_open_first, args=(tmp_path, name, gate)) for name in "abc"]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert [run.exitcode for run in runs] == [0, 0, 0]
