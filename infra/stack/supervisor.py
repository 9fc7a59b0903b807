"""Keeps the local stack's processes running and drains them on SIGTERM. Started by ``infra/stack/control.py``."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import psutil

from infra import processes
from infra.errors import InfraError, ServerError
from infra.files import locked, write_atomically
from infra.logs import get_logger, log_to_console
from infra.provenance import ROOT
from infra.settings import Settings
from infra.stack.servers import Server, start_server, wait_healthy
from infra.stack.services import POOLS, Layout, ServiceState, StackState
from infra.stack.worker import AFTER_GRACE_SECONDS, flows_of

_POLL_SECONDS = 1.0
_WORKER_READY_SECONDS = 120.0
_MAX_DELAY_SECONDS = 60.0
_STOP_SECONDS = 10.0
_GONE_SECONDS = 5.0


def mark_of(settings: Settings, name: str) -> str:
    """Mark of the processes of one service over this data folder."""
    return f"stack-{hashlib.sha256(str(settings.data_dir).encode()).hexdigest()[:8]}-{name}"


@dataclass(slots=True)
class Service:
    """One process, restarted whenever it ends."""

    name: str
    mark: str
    server: Server | None  # None: a worker
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    failures: int = 0  # consecutive ends soon after a start
    started: float = 0.0
    start_at: float = 0.0

    def delay(self) -> float:
        """Seconds to wait before the next start."""
        return min(2.0 ** min(self.failures, 10), _MAX_DELAY_SECONDS) if self.failures else 0.0


class Supervisor:
    def __init__(self, settings: Settings) -> None:
        self._layout = Layout.of(settings)
        self._settings = settings
        self._told = threading.Event()
        self._services = [
            Service("prefect", mark_of(settings, "prefect"), self._layout.prefect),
            Service("mlflow", mark_of(settings, "mlflow"), self._layout.mlflow),
            *(Service("metrics", mark_of(settings, "metrics"), server) for server in (self._layout.metrics,) if server),
            *(Service(pool, mark_of(settings, pool), None) for pool in POOLS),
        ]

    def run(self) -> int:
        """Run until SIGTERM or SIGINT. Returns 0 after a drain, 1 if the stack did not start."""
        for number in (signal.SIGTERM, signal.SIGINT):
            # Children inherit ignored signals, and Prefect's workers only end on SIGINT, so set handlers in any case.
            signal.signal(number, lambda *_: self._told.set())
        with locked(self._settings.stack_dir / "lock", wait=False) as mine:
            if not mine:
                get_logger().error("stack: another supervisor is at %s", self._settings.data_dir)
                return 1
            try:
                self._start_all()
                while not self._told.wait(_POLL_SECONDS):
                    for service in self._services:
                        self._mend(service)
            except (InfraError, OSError) as error:
                get_logger().error("stack: %s", error)
                return 1
            finally:
                self._drain()
        return 0

    def _start_all(self) -> None:
        self._write("starting")
        for service in self._services:
            if service.server is not None:
                self._start(service)
        for service in self._services:
            if service.process is not None and service.server is not None:
                wait_healthy(service.process, service.server)
        self._layout.apply()
        self._layout.pause(False)
        for service in self._services:
            if service.server is None:
                self._start(service)
        self._wait_for_workers()
        self._layout.recover()
        self._write("up")
        get_logger().info("stack: up")

    def _start(self, service: Service) -> None:
        if service.server is not None:
            service.process = start_server(service.server, self._settings, service.mark)
        else:
            with self._layout.log(f"worker-{service.name}").open("ab") as output:
                service.process = processes.start(
                    self._layout.worker_args(service.name),
                    env=self._layout.environment(),
                    mark=service.mark,
                    output=output,
                    cwd=ROOT,
                    ends_with_parent=True,
                )
        service.started = time.monotonic()

    def _wait_for_workers(self) -> None:
        deadline = time.monotonic() + _WORKER_READY_SECONDS
        while not self._told.wait(_POLL_SECONDS):
            pools = [self._layout.api("GET", f"/work_pools/{pool}") for pool in POOLS]
            if all(pool is not None and pool["status"] == "READY" for pool in pools):
                return
            if time.monotonic() > deadline:
                raise ServerError(f"the workers did not report to Prefect. Their logs: {self._settings.stack_dir}")

    def _mend(self, service: Service) -> None:
        """Restart an ended process: at once, or with growing delays if it repeatedly ends soon after its start."""
        now = time.monotonic()
        if service.process is not None and service.process.poll() is not None:
            soon = now - service.started < _MAX_DELAY_SECONDS
            service.failures = service.failures + 1 if soon else 0
            get_logger().warning(
                "stack: %s ended (%d), starts again in %.0f s",
                service.name, service.process.returncode, service.delay(),
            )  # fmt: skip
            service.process, service.start_at = None, now + service.delay()
        if service.process is None and now >= service.start_at:
            try:
                self._start(service)
            except (InfraError, OSError) as error:  # for example a full disk: the other services go on
                service.failures += 1
                service.start_at = now + service.delay()
                get_logger().error(
                    "stack: %s cannot be started, tried again in %.0f s: %s", service.name, service.delay(), error
                )
                return
            service.restarts += 1
            self._show("up")
            if service.server is None:
                with _logging(ServerError):  # recover also runs on a schedule and by automations
                    self._layout.recover()

    def _drain(self) -> None:
        """Pause the pools, let active runs commit and end, then stop the workers, MLflow and Prefect."""
        self._show("draining")
        with _logging(ServerError):
            self._layout.pause(True)
        workers = [service for service in self._services if service.server is None]
        for service in workers:
            for flow in self._flows(service):
                with contextlib.suppress(psutil.NoSuchProcess):
                    get_logger().info("stack: flow process %d commits and ends", flow.pid)
                    flow.terminate()
        deadline = time.monotonic() + self._settings.stop_grace_seconds + AFTER_GRACE_SECONDS
        while any(self._flows(service) for service in workers) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 4)
        for service in reversed(self._services):
            processes.stop(service.mark, _STOP_SECONDS)
            if service.process is not None:
                service.process.wait()
        with _logging(OSError):  # harmless: readers ignore the state of a dead supervisor
            (self._settings.stack_dir / "state.json").unlink(missing_ok=True)
        get_logger().info("stack: down")

    def _flows(self, service: Service) -> list[psutil.Process]:
        return flows_of(service.mark, service.process.pid if service.process is not None else 0)

    def _show(self, phase: Literal["up", "draining"]) -> None:
        """Write the new phase. A failure is only logged, because services must be watched and drained anyway."""
        try:
            self._write(phase)
        except OSError as error:
            get_logger().error("stack: make status shows what was before: %s", error)

    def _write(self, phase: Literal["starting", "up", "draining"]) -> None:
        state = StackState(
            supervisor=processes.this_process(),
            phase=phase,
            prefect=self._layout.prefect.address,
            mlflow=self._layout.mlflow.address,
            services=tuple(
                ServiceState(
                    name=service.name if service.server else f"worker {service.name}",
                    pid=service.process.pid,
                    address=service.server.address if service.server else None,
                    restarts=service.restarts,
                )
                for service in self._services
                if service.process is not None
            ),
        )
        write_atomically(self._settings.stack_dir / "state.json", state.model_dump_json(indent=1))


@contextlib.contextmanager
def _logging(kind: type[Exception]) -> Iterator[None]:
    """Log errors of this kind as warnings, and go on."""
    try:
        yield
    except kind as error:
        get_logger().warning("stack: %s", error)


if __name__ == "__main__":
    log_to_console()
    sys.exit(Supervisor(Settings()).run())
