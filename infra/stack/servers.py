"""Prefect's and MLflow's servers as child processes, which end with their parent.

They listen on loopback unless RLFLOW_HOST says otherwise. They accept only their own host names, because a foreign page
may have its name resolved to loopback. They require a login, because every user of a machine can reach loopback. They
get passwords through their environment, because every user can read command lines.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from infra import environment, processes
from infra.errors import ServerError, ServerRefusedError
from infra.provenance import ROOT
from infra.settings import Settings
from infra.stack.login import header_of, login_of

_START_SECONDS = 180.0  # a server that ends earlier is noticed at once
_STOP_SECONDS = 5.0
_LOG_LINES = 15
_PORTS = range(20_000, 30_000)


@dataclass(frozen=True, slots=True)
class Server:
    """How to start a server, and its addresses."""

    args: tuple[str, ...]
    variables: Mapping[str, str]
    address: str
    health_url: str
    log: Path


def prefect_command(settings: Settings, port: int) -> Server:
    """A Prefect server with its page at ``address``; the API is under ``/api``."""
    address = _address(settings, port)
    database = settings.prefect_database.get_secret_value().replace("postgresql://", "postgresql+asyncpg://", 1)
    return Server(
        args=_args("prefect", settings, port),
        variables={
            "PREFECT_HOME": str(settings.prefect_home),
            "PREFECT_API_URL": f"{address}/api",
            "PREFECT_UI_API_URL": f"{_public(settings, port)}/api",  # the address that its page calls
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_PLUGINS_ENABLED": "0",
            "PREFECT_SERVER_DATABASE_TIMEOUT": "60",  # writers wait for SQLite's lock
            # Leases in memory would be lost by a restart, and Prefect ends runs that cannot renew their lease.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(f"http://{name}:{port}" for name in settings.names),
            "RLFLOW_ALLOWED_HOSTS": settings.allowed_hosts,
            "RLFLOW_HOST": settings.host,
            **({"PREFECT_SERVER_DATABASE_CONNECTION_URL": database} if database else {}),
        },
        address=address,
        health_url=f"{address}/api/health",
        log=settings.prefect_home / "server.log",
    )


def mlflow_command(settings: Settings, port: int) -> Server:
    """An MLflow server over the embedded store, or PostgreSQL and S3."""
    address = _address(settings, port)
    return Server(
        args=_args("mlflow", settings, port),
        variables={
            "MLFLOW_BACKEND_STORE_URI": settings.database_uri,
            "MLFLOW_ARTIFACTS_DESTINATION": settings.artifacts_uri,
            "MLFLOW_SERVER_ALLOWED_HOSTS": ",".join(f"{name}{end}" for name in settings.names for end in ("", ":*")),
            # The job runner takes 2.2 GB of memory, and rlflow does not use it.
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        },
        address=address,
        health_url=f"{address}/health",
        log=settings.mlflow_dir / "server.log",
    )


def metrics_command(settings: Settings) -> Server | None:
    """The Prometheus endpoint; None: RLFLOW_METRICS_PORT names no port."""
    if not settings.metrics_port:
        return None
    address = _address(settings, settings.metrics_port)
    words = ("metrics", "--host", settings.host, "--port", str(settings.metrics_port))
    return Server(
        args=(sys.executable, "-m", "tasks.cli", *words),
        variables={"RLFLOW_ALLOWED_HOSTS": settings.allowed_hosts, "RLFLOW_HOST": settings.host},
        address=f"{address}/metrics",
        health_url=f"{address}/health",
        log=settings.stack_dir / "metrics.log",
    )


def _args(app: str, settings: Settings, port: int) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", "uvicorn", "--factory", f"infra.stack.apps:{app}"),
        *("--host", settings.host, "--port", str(port), "--log-level", "warning"),
    )


def _address(settings: Settings, port: int) -> str:
    """The address for this machine. A server that listens on 0.0.0.0 also listens on loopback."""
    return f"http://{'127.0.0.1' if settings.host == '0.0.0.0' else settings.host}:{port}"


def _public(settings: Settings, port: int) -> str:
    """The address for other machines: the first allowed host name."""
    given = [name.strip() for name in settings.allowed_hosts.split(",") if name.strip()]
    return f"http://{given[0]}:{port}" if given else _address(settings, port)


def prefect_server(
    settings: Settings, port: int | None = None, *, meanwhile: Callable[[], object] = lambda: None
) -> AbstractContextManager[str]:
    """A running Prefect server with its page; yields the page's address. ``meanwhile`` is called while it starts."""
    return _serving(prefect_command(settings, port or free_port()), settings, meanwhile)


def mlflow_server(settings: Settings, port: int | None = None) -> AbstractContextManager[str]:
    """A running MLflow server; yields its address."""
    return _serving(mlflow_command(settings, port or free_port()), settings)


def free_port() -> int:
    """A port of this machine that nothing uses at the moment. A server may take half a minute until it listens; Linux
    gives no port of this range to a connection meanwhile.

    Raises:
        OSError: none is free.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of the ports {_PORTS.start} to {_PORTS.stop - 1} is free")


def answers(url: str, timeout_seconds: float) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=timeout_seconds) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def prefect_answers(api_url: str, timeout_seconds: float) -> bool:
    return answers(f"{api_url.rstrip('/')}/health", timeout_seconds)


def check_prefect(api_url: str, timeout_seconds: float, login: str | None) -> None:
    """Raise ServerError if the Prefect server at ``api_url`` does not answer in time, or refuses ``login``
    (user:password; None: no login is set)."""
    if not prefect_answers(api_url, timeout_seconds):
        raise ServerError(
            f"no Prefect server answers at {api_url} within {timeout_seconds:g} s. Start it, correct "
            "PREFECT_API_URL, or unset that variable to use the embedded server."
        )
    if _refuses(f"{api_url.rstrip('/')}/admin/version", login, timeout_seconds):
        raise ServerRefusedError(
            f"the Prefect server at {api_url} wants {'another' if login else 'a'} login. Set PREFECT_API_AUTH_STRING "
            "to its user:password; for the stack, by the export line that make up prints."
        )


def _refuses(url: str, login: str | None, timeout_seconds: float) -> bool:
    """Whether the answer is 401. False for Prefect Cloud, which uses API keys and reports missing ones itself."""
    if "://api.prefect.cloud/" in url:
        return False
    headers = {"Authorization": header_of(login)} if login else {}
    try:
        urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_seconds).close()
    except urllib.error.HTTPError as error:
        return error.code == HTTPStatus.UNAUTHORIZED
    except OSError:
        return False  # the server has just answered, and later requests are retried
    return False


def check_ray(address: str, timeout_seconds: float) -> None:
    """Raise ServerError if nothing listens at the Ray cluster's head. Ray itself looks for ``auto``."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=timeout_seconds).close()
    except OSError as error:
        raise ServerError(
            f"no Ray cluster listens at {address} ({error}). Start its head (ray start --head), correct "
            "RLFLOW_RAY_ADDRESS, or unset that variable to use the GPUs of this machine."
        ) from error


def start_server(server: Server, settings: Settings, mark: str) -> subprocess.Popen[bytes]:
    """Start a server. ``wait_healthy`` waits until it answers."""
    server.log.parent.mkdir(parents=True, exist_ok=True)
    env = {**environment.for_children(settings), **server.variables, **login_of(settings).for_servers()}
    with server.log.open("ab") as output:
        return processes.start(server.args, env=env, mark=mark, output=output, cwd=ROOT, ends_with_parent=True)


def wait_healthy(process: subprocess.Popen[bytes], server: Server) -> None:
    """Wait until a server answers.

    Raises:
        ServerError: it ended or did not answer in time. The message has the end of its log.
    """
    deadline = time.monotonic() + _START_SECONDS
    while not answers(server.health_url, timeout_seconds=10):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServerError(f"the server behind {server.health_url} did not start. {end_of(server.log)}")
        time.sleep(0.1)


def end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.exists() else []
    return "\n".join([f"The end of {log}:", *lines])


@contextmanager
def _serving(server: Server, settings: Settings, meanwhile: Callable[[], object] = lambda: None) -> Iterator[str]:
    mark = f"server-{uuid.uuid4().hex}"
    process = start_server(server, settings, mark)
    try:
        meanwhile()
        wait_healthy(process, server)
        yield server.address
    finally:
        processes.stop(mark, _STOP_SECONDS)
        process.wait()
