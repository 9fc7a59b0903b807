"""Start, stop and describe Prefect, MLflow and workers on this machine, over the data folder."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from datetime import UTC, datetime

from infra import environment, processes
from infra.errors import ServerError
from infra.processes import is_running
from infra.provenance import ROOT
from infra.settings import Settings
from infra.stack.login import how_to_log_in, login_file
from infra.stack.servers import answers, end_of, mlflow_server, prefect_server
from infra.stack.services import POOLS, Layout, StackState, read_state
from infra.stack.supervisor import mark_of

_UP_SECONDS = 400.0
_DOWN_EXTRA_SECONDS = 240.0
_POLL_SECONDS = 0.2
_ANSWER_SECONDS = 30.0  # a server on a busy machine answers slowly after its start


def up(settings: Settings) -> StackState:
    """Start the stack, or apply the current settings and prefect.yaml to the running one.

    Raises:
        ServerError: a port is taken, RLFLOW_MLFLOW_URI names another server, or a service did not start.
    """
    layout = Layout.of(settings)
    state = read_state(settings)
    if state is not None and state.phase == "up":
        layout.apply()
        return state
    if state is None:
        if settings.mlflow_uri not in ("", layout.mlflow.address):
            raise ServerError(
                f"RLFLOW_MLFLOW_URI is {settings.mlflow_uri}, and the stack has an MLflow of its own. Unset it, or "
                "start Prefect and a worker yourself."
            )
        ports = {"PREFECT": settings.prefect_port, "MLFLOW": settings.mlflow_port, "METRICS": settings.metrics_port}
        for name, port in ports.items():
            if port:
                _require_free(settings.host, port, f"RLFLOW_{name}_PORT")
        _start_supervisor(settings)
    return _wait_until_up(settings)


def down(settings: Settings) -> bool:
    """Drain and stop the stack. False: none was running.

    Raises:
        ServerError: it did not stop in time.
    """
    state = read_state(settings)
    if state is not None:
        for process in processes.marked(mark_of(settings, "supervisor")):
            if process.pid == state.supervisor.pid:
                process.terminate()
        deadline = time.monotonic() + settings.stop_grace_seconds + _DOWN_EXTRA_SECONDS
        while is_running(state.supervisor):
            if time.monotonic() > deadline:
                raise ServerError(f"the stack has not ended yet. Its log: {Layout.of(settings).log('supervisor')}")
            time.sleep(_POLL_SECONDS)
    for name in (*POOLS, "metrics", "mlflow", "prefect", "supervisor"):  # also what a killed supervisor left
        processes.kill(mark_of(settings, name))
    (settings.stack_dir / "state.json").unlink(missing_ok=True)
    return state is not None


def describe(settings: Settings) -> str:
    """One line per service and per work pool."""
    state = read_state(settings)
    if state is None:
        return f"The stack over {settings.data_dir} is down. make up starts it."
    layout = Layout.of(settings)
    lines = [f"The stack over {settings.data_dir}: {state.phase}", f"  {'login':<12} {login_file(settings)}"]
    for service in state.services:
        again = f", restarted {service.restarts} x" if service.restarts else ""
        lines.append(f"  {service.name:<12} {service.address or '':<24} pid {service.pid}{again}")
    if answers(layout.prefect.health_url, timeout_seconds=_ANSWER_SECONDS):
        lines += [f"  pool {pool:<7} {_pool(layout, pool)}" for pool in POOLS]
    else:
        lines.append(f"  pools: not known, for Prefect gave no answer. Its log: {layout.prefect.log}")
    return "\n".join(lines)


def _pool(layout: Layout, pool: str) -> str:
    found = layout.api("GET", f"/work_pools/{pool}")
    if found is None:
        return "not there yet"
    now = datetime.now(UTC).isoformat()
    running = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
    due = {"state": {"type": {"any_": ["SCHEDULED"]}}, "expected_start_time": {"before_": now}}
    counts = [
        layout.api("POST", "/flow_runs/count", {"work_pools": {"name": {"any_": [pool]}}, "flow_runs": runs})
        for runs in (running, due)
    ]
    limit = f" of {found['concurrency_limit']} at a time" if found["concurrency_limit"] is not None else ""
    paused = ", paused" if found["is_paused"] else ""
    return f"{counts[0]} running{limit}, {counts[1]} waiting{paused}"


def _require_free(host: str, port: int, setting: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ServerError(f"port {port} is taken ({error}). Free it, or name another in {setting}.") from error


def _start_supervisor(settings: Settings) -> None:
    settings.stack_dir.mkdir(parents=True, exist_ok=True)
    with Layout.of(settings).log("supervisor").open("ab") as log:
        processes.start(
            [sys.executable, "-m", "infra.stack.supervisor"],
            env={
                **environment.for_children(settings),
                **environment.of_databases(settings),
                "RLFLOW_DATA_DIR": str(settings.data_dir),
            },
            mark=mark_of(settings, "supervisor"),
            output=log,
            cwd=ROOT,
            ends_with_parent=False,
        )


def _wait_until_up(settings: Settings) -> StackState:
    deadline = time.monotonic() + _UP_SECONDS
    while time.monotonic() < deadline:
        state = read_state(settings)
        if state is not None and state.phase == "up":
            return state
        if state is None and not processes.marked(mark_of(settings, "supervisor")):
            break
        time.sleep(_POLL_SECONDS)
    raise ServerError(f"the stack did not start. {end_of(Layout.of(settings).log('supervisor'))}")


def show_pages(settings: Settings, prefect_port: int, mlflow_port: int) -> None:
    """Serve Prefect's and MLflow's pages over the data folder until SIGINT or SIGTERM."""
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    with prefect_server(settings, prefect_port) as prefect, mlflow_server(settings, mlflow_port) as mlflow:
        sys.stdout.write(f"Prefect  {prefect}\nMLflow   {mlflow}\nLogin    {how_to_log_in(settings)}\n")
        sys.stdout.write("Ctrl-C ends both.\n")
        sys.stdout.flush()
        over.wait()
