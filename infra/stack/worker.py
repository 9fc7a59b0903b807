"""A Prefect worker for a container: ``python -m infra.stack.worker gpu``. On SIGTERM its flows commit before it ends.

Prefect's own worker ends its flows at once on SIGTERM. This one starts no further flow, sends SIGTERM to those that
run, waits until they have committed a checkpoint, and ends. When it starts, it asks ``recover`` to bring
back the runs of a container that was killed.

``python -m infra.stack.worker stop`` ends the workers and runs of a container in which they do not get the signal.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence

import psutil

from infra import processes
from infra.logs import get_logger, log_to_console
from infra.settings import Settings

POOLS = ("gpu", "cpu")
AFTER_GRACE_SECONDS = 30.0  # for a flow to end once its trainer has
_HEALTH_PORT = "8085"  # on loopback; Prefect's own default, 8080, is that of Ray's metrics on Kubernetes
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 20.0


def flows_of(mark: str, worker: int) -> list[psutil.Process]:
    """Flow processes started by this worker or an earlier one: they inherit its mark."""
    below = [item for item in processes.marked(mark) if item.pid != worker]
    pids = {item.pid for item in below}
    found = []
    for item in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            if item.ppid() not in pids and any("prefect" in word for word in item.cmdline()):
                found.append(item)
    return found


def work(args: Sequence[str], mark: str, grace_seconds: float, told: threading.Event) -> int:
    """Run a worker until it ends or ``told`` is set. Returns its exit code; 0 after a drain."""
    worker = processes.start(args, env=os.environ, mark=mark, ends_with_parent=True)
    try:
        while not told.wait(_POLL_SECONDS):
            if worker.poll() is not None:
                return worker.returncode or 1  # nobody has asked it to end
        _drain(worker, mark, grace_seconds)
        return 0
    finally:
        processes.stop(mark, _STOP_SECONDS)
        worker.wait()


def _drain(worker: subprocess.Popen[bytes], mark: str, grace_seconds: float) -> None:
    worker.send_signal(signal.SIGSTOP)  # it would start the next flow, and end those that run when it ends
    for flow in flows_of(mark, worker.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            get_logger().info("worker: flow process %d commits and ends", flow.pid)
            flow.terminate()
    deadline = time.monotonic() + grace_seconds + AFTER_GRACE_SECONDS
    while flows_of(mark, worker.pid) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    worker.kill()


def stop_all(seconds: float) -> None:
    """End the workers and runs of this container, and wait for them: what a pod does before it ends."""
    found = []
    for item in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words = item.cmdline()
            runs = len(words) > 2 and os.path.basename(words[1]) == "rlflow" and words[2] == "train"
            if item.pid != os.getpid() and (runs or words[1:3] == ["-m", "infra.stack.worker"]):
                item.terminate()
                found.append(item)
    psutil.wait_procs(found, seconds)


def ask_recover() -> None:
    """Start a run of the recover flow. A failure is only logged: recover also runs on a schedule."""
    try:
        found = _api("GET", "/deployments/name/recover/recover")
        _api("POST", f"/deployments/{found['id']}/create_flow_run", {"state": {"type": "SCHEDULED"}})
    except (OSError, KeyError, ValueError) as error:
        get_logger().warning("worker: recover was not started: %s", error)


def _api(method: str, path: str, body: dict[str, object] | None = None) -> dict[str, str]:
    login = base64.b64encode(os.environ.get("PREFECT_API_AUTH_STRING", "").encode()).decode()
    request = urllib.request.Request(
        os.environ["PREFECT_API_URL"].rstrip("/") + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Basic {login}"},
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as reply:
        answer: dict[str, str] = json.loads(reply.read())
    return answer


def main() -> int:
    if sys.argv[1:] not in [[word] for word in (*POOLS, "stop")]:
        sys.exit(f"{sys.argv[1:]} is no pool. Allowed: one of {', '.join(POOLS)}, or stop.")
    log_to_console()
    if sys.argv[1:] == ["stop"]:
        stop_all(Settings().stop_grace_seconds + AFTER_GRACE_SECONDS)
        return 0
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    (pool,) = sys.argv[1:]
    ask_recover()
    name = f"{socket.gethostname()}-{pool}"
    args = [
        *(sys.executable, "-m", "prefect", "worker", "start"),
        *("--pool", pool, "--type", "process", "--name", name),
        "--with-healthcheck",
    ]
    os.environ.setdefault("PREFECT_WORKER_WEBSERVER_PORT", _HEALTH_PORT)
    return work(args, f"worker-{pool}", Settings().stop_grace_seconds, told)


if __name__ == "__main__":
    sys.exit(main())
