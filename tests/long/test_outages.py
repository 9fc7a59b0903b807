"""Prefect's and MLflow's servers, and the store, are down as a step of the flow begins; the run ends like any other.

The servers are real and their processes are killed and started again. The trainer and the jobs are the fake ones.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import s3fs
from mlflow import MlflowClient
from moto.server import ThreadedMotoServer
from prefect.artifacts import Artifact
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

import flows.train_grpo as flow_module
from infra import processes
from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.servers import Server, mlflow_command, prefect_command, start_server, wait_healthy
from rlcore.segment.journal import read_journal
from tasks import open as tracking
from tests.flows.interpreter import fake_interpreter
from tests.ports import reserved_port

SMALL = ["training.steps=5", "segment.steps=2", "data.template=math"]
_STORE_DOWN_SECONDS = 3.0

pytestmark = pytest.mark.timeout(600)


class RealServer:
    """A server of the stack that can be killed and started again on its port."""

    def __init__(self, server: Server, settings: Settings) -> None:
        self._server, self._settings = server, settings
        self.address = server.address
        self._mark = f"outage-{secrets.token_hex(4)}"

    def start(self) -> None:
        wait_healthy(start_server(self._server, self._settings, self._mark), self._server)

    def kill(self) -> None:
        processes.kill(self._mark)


class ObjectStore:
    """An S3 server of this process: what it holds outlives its being down."""

    def __init__(self) -> None:
        self._port = reserved_port()
        self.address = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", self._port, verbose=False)
        self._server.start()

    def kill(self) -> None:
        listening: Any = self._server._server
        self._server.stop()
        listening.server_close()


@dataclass(frozen=True, slots=True)
class Place:
    data_dir: Path
    mlflow: RealServer
    services: tuple[RealServer | ObjectStore, ...]
    threads: ThreadPoolExecutor  # Linux ends a server with the thread that has started it

    def go_down(self) -> list[Future[None]]:
        """Everything is down from now on, and comes back after a while; returns what waits for that."""
        for service in self.services:
            service.kill()
        return [self.threads.submit(self._come_back, service) for service in self.services]

    def _come_back(self, service: RealServer | ObjectStore) -> None:
        if isinstance(service, ObjectStore):
            time.sleep(_STORE_DOWN_SECONDS)  # the servers need longer than that to start
        service.start()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("outages")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        servers_over = Settings(data_dir=folder / "servers", mlflow_uri="", store="")
        prefect = RealServer(prefect_command(servers_over, reserved_port()), servers_over)
        mlflow = RealServer(mlflow_command(servers_over, reserved_port()), servers_over)
        store = ObjectStore()
        for service in (prefect, mlflow, store):
            service.start()
            stack.callback(service.kill)
        for name, value in {
            **login_of(servers_over).for_mlflow(),
            "RLFLOW_DATA_DIR": str(folder / "data"),
            "RLFLOW_TRAINER_PYTHON": str(fake_interpreter(folder)),
            "RLFLOW_MLFLOW_URI": mlflow.address,
            "RLFLOW_STORE": "s3://outages/rlflow",
            "RLFLOW_RETRY_DELAY_SCALE": "0.15",  # 4, 14, 31 s: a loaded machine takes long to start the servers
            "AWS_ENDPOINT_URL": store.address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem(endpoint_url=store.address, key="key", secret="secret").mkdir("outages")
        client = {PREFECT_API_URL: f"{prefect.address}/api", PREFECT_API_AUTH_STRING: login_of(servers_over).text}
        stack.enter_context(temporary_settings(client))
        threads = stack.enter_context(ThreadPoolExecutor(3))
        EventsWorker.drain_all()  # a process has one, which sends to the server that it began with
        yield Place(folder / "data", mlflow, (prefect, mlflow, store), threads)
        EventsWorker.drain_all(timeout=60)
        s3fs.S3FileSystem.clear_instance_cache()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has left, but for times, names and paths."""

    journal: list[tuple[int, dict[str, float]]]
    points: dict[str, list[tuple[int, float]]]
    artifacts: list[str]
    status: str
    registered_step: str
    summary: tuple[float, float, float, float, int, int]


def run_to_its_end(place: Place, run_id: str) -> Outcome:
    summary = flow_module.train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id=run_id)
    run_dir = place.data_dir / "runs" / run_id
    assert (run_dir / "finished").exists()
    assert (run_dir / "report" / "report.html").exists()
    client = MlflowClient(tracking_uri=place.mlflow.address, registry_uri=place.mlflow.address)
    run = client.get_run(summary.mlflow_run_id)
    points = {
        name: sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
        if not name.startswith("cost/")
    }
    version = client.get_model_version_by_alias("grpo-geo3k-tiny", "verified")
    assert version.tags["rlflow.run_id"] == run_id
    page = Artifact.get("grpo-geo3k-tiny-report")
    assert page is not None
    assert run_id in str(page.data)
    return Outcome(
        journal=[(record.step, dict(record.metrics)) for record in read_journal(run_dir / "journal.jsonl")],
        points=points,
        artifacts=sorted(
            item.path
            for folder in ("", "eval", "report", "origins")
            for item in client.list_artifacts(run.info.run_id, folder)
            if not item.is_dir
        ),
        status=run.info.status,
        registered_step=version.tags["rlflow.step"],
        summary=(
            summary.accuracy_before, summary.accuracy_after, summary.reward_first, summary.reward_last, summary.steps,
            summary.segments,
        ),
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(place: Place) -> Outcome:
    return run_to_its_end(place, "undisturbed")


STEPS: list[tuple[Any, str, int]] = [
    (flow_module, "choose_experiment", 1),
    (flow_module, "preflight", 1),
    (flow_module, "open_run", 1),
    (tracking, "open_tracking", 1),
    (flow_module, "prepare_and_resize", 1),
    (flow_module.bootstrap_policy, "submit", 1),
    (flow_module.check_model, "submit", 1),
    (flow_module, "describe_run", 1),
    (flow_module, "train_segment", 1),
    (flow_module, "log_validation", 1),
    (flow_module, "evaluate_and_log", 1),
    (flow_module, "evaluate_and_log", 2),
    (flow_module, "merge_checkpoint", 1),
    (flow_module, "register_model", 1),
    (flow_module, "report", 1),
    (tracking, "finish_run", 1),
]


_RUNS = 2  # with an outage at each second step: a run for each step would take three times as long


@pytest.mark.parametrize("steps", [STEPS[first::_RUNS] for first in range(_RUNS)], ids=lambda steps: steps[0][1])
def test_everything_is_down_as_a_step_begins(
    place: Place, undisturbed: Outcome, steps: list[tuple[Any, str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: dict[str, list[Future[None]]] = {}
    for module, name, call in steps:
        wrapped = _beginning_in_an_outage(place, getattr(module, name), _named(module, name), call, waits)
        monkeypatch.setattr(module, name, wrapped)
    try:
        found = run_to_its_end(place, steps[0][1].replace("_", "-"))
    finally:
        for wait in chain(*waits.values()):
            wait.result()
    assert waits.keys() == {_named(module, name) for module, name, _ in steps}, "a step was not called as often"
    assert found == undisturbed


def _named(module: Any, name: str) -> str:
    """Of a step, or of a task that is submitted."""
    return f"{module.__name__}.{name}"


def _beginning_in_an_outage(
    place: Place, step: Callable[..., Any], name: str, call: int, waits: dict[str, list[Future[None]]]
) -> Callable[..., Any]:
    """``step``, at whose ``call``-th call everything goes down; ``waits`` gets what waits for the end of the outage."""
    calls = count(1)

    def begin(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            for wait in chain(*waits.values()):
                wait.result()  # the outage before this one is over
            waits[name] = place.go_down()
        return step(*args, **kwargs)

    return begin
