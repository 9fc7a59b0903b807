"""Prefect's and MLflow's servers as child processes on loopback, over the data folder, gone when we are."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from infra import environment, processes
from infra.errors import ServerError
from infra.settings import Settings

_START_SECONDS = 90.0
_STOP_SECONDS = 5.0
_LOG_LINES = 15


@contextmanager
def prefect_server(settings: Settings, port: int | None = None) -> Iterator[str]:
    """A Prefect server with its page; yields the page's address (the API is under ``/api``)."""
    port = port or free_port()
    args = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    address = f"http://127.0.0.1:{port}"
    variables = {
        "PREFECT_HOME": str(settings.prefect_home),
        "PREFECT_API_URL": f"{address}/api",  # the page asks the address that the server names
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    log = settings.prefect_home / "server.log"
    with _serving(args, f"{address}/api/health", variables, log, settings):
        yield address


@contextmanager
def mlflow_server(settings: Settings, port: int | None = None) -> Iterator[str]:
    """An MLflow server over the embedded store; yields its address."""
    port = port or free_port()
    settings.mlflow_dir.mkdir(parents=True, exist_ok=True)
    args = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--backend-store-uri", settings.tracking_uri, "--workers", "1"),
        *("--artifacts-destination", str(settings.mlflow_dir / "artifacts")),
    ]
    # Its job runner costs 2.2 GB of memory and does nothing for us.
    variables = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    address = f"http://127.0.0.1:{port}"
    with _serving(args, f"{address}/health", variables, settings.mlflow_dir / "server.log", settings):
        yield address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str, timeout_seconds: float) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=timeout_seconds) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, TimeoutError, OSError):
        return False


def check_prefect(api_url: str, timeout_seconds: float) -> None:
    """Raise ServerError where the Prefect server at ``api_url`` does not answer in time."""
    if not answers(f"{api_url.rstrip('/')}/health", timeout_seconds):
        raise ServerError(
            f"no Prefect server answers at {api_url} within {timeout_seconds:g} s. Start it, correct "
            "PREFECT_API_URL, or unset that variable to use the embedded server."
        )


@contextmanager
def _serving(
    args: Sequence[str], health_url: str, variables: Mapping[str, str], log: Path, settings: Settings
) -> Iterator[None]:
    log.parent.mkdir(parents=True, exist_ok=True)
    mark = f"server-{uuid.uuid4().hex}"
    env = {**environment.for_children(settings), **variables}
    with log.open("ab") as output:
        process = processes.start(args, env=env, mark=mark, output=output, ends_with_parent=True)
    try:
        _wait_healthy(process, health_url, log)
        yield
    finally:
        processes.stop(mark, _STOP_SECONDS)
        process.wait()


def _wait_healthy(process: subprocess.Popen[bytes], health_url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not answers(health_url, timeout_seconds=2):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise ServerError(f"the server behind {health_url} did not start. The end of {log}:\n{tail}")
        time.sleep(0.1)
