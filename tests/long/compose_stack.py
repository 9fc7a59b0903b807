"""Starts the services of a compose file as docker does, without docker: each in Linux namespaces of its own.

Runs where ``hosts.inside`` runs a module. A service has a root, network, processes and host name of its own, finds the
others by the file's names, and keeps its files over restarts. What its image would hold comes from this machine: system
folders and the tests' interpreter, read-only, and what the Dockerfile copies. tests/long/images stands for the images
of others. Not there: GPUs, limits of memory, the packages that the Dockerfile installs.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.long.compose_container import NEW_ROOT, Container, Recipe, hostname_of, image_of
from tests.long.compose_file import Service

_POLL_SECONDS = 0.2
_TRIES = 6  # docker goes on for ever


@dataclass(slots=True)
class Running:
    """A service and what has become of it so far."""

    service: Service
    recipe: Recipe
    container: Container | None = None
    state: str = "created"  # then: running, healthy, restarting, exited
    code: int = 0
    starts: int = 0
    thread: threading.Thread | None = None


@dataclass(slots=True)
class Project:
    """All services of a compose file."""

    services: Mapping[str, Service]
    folder: Path  # volumes, container layers and logs
    source: Path  # the folder of the compose file
    running: dict[str, Running] = field(default_factory=dict)
    closing: threading.Event = field(default_factory=threading.Event)
    failure: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    # ---- what docker compose does ----

    def up(self) -> None:
        """Start all services in the order of their conditions; returns when all that last are up."""
        (self.folder / "hosts").touch()
        Path(NEW_ROOT).mkdir(exist_ok=True)
        for name, service in self.services.items():
            recipe = Recipe(service, image_of(service, self.source / "Dockerfile"), self.folder, self.source)
            recipe.make_layer()
            self.running[name] = Running(service, recipe)
            for address, published, inside in service.ports:
                self._publish(address, published, name, inside)
        for name in self.services:
            self._start_thread(name)
        self.wait_until_up()

    def run_again(self, name: str) -> None:
        """Start a service that has done its work once more, as a second ``up`` does; returns when it has ended."""
        self.running[name].state = "created"
        self._start_thread(name)
        self.wait_for(lambda: self.running[name].state == "exited", f"{name} ended")

    def kill(self, name: str) -> None:
        """SIGKILL to every process of a service."""
        found = self.running[name]
        starts = found.starts
        assert found.container is not None
        found.container.init.kill()
        self.wait_for(lambda: found.starts > starts, f"{name} was started again")

    def wait_until_up(self, seconds: float = 600) -> None:
        self.wait_for(self._is_up, "all services are up", seconds)

    def stop(self, name: str) -> float:
        """``docker compose stop``: the stop signal, and SIGKILL after the grace period; returns the seconds it took."""
        found, began = self.running[name], time.monotonic()
        container = found.container
        assert container is not None
        found.state = "stopped"
        container.init.send_signal(signal.Signals[found.service.stop_signal])
        try:
            container.process.wait(found.service.stop_seconds)
        except subprocess.TimeoutExpired:
            container.init.kill()
            container.process.wait()
        return time.monotonic() - began

    def start(self, name: str) -> None:
        """``docker compose start``."""
        found = self.running[name]
        assert found.thread is not None
        found.thread.join()
        self._start_thread(name)
        self.wait_for(lambda: found.state in ("running", "healthy"), f"{name} came back")

    def down(self) -> None:
        self.closing.set()
        for found in self.running.values():
            if found.container is not None and found.container.process.poll() is None:
                found.container.process.kill()

    def exec(self, name: str, *words: str, timeout: float = 120) -> str:
        """``docker compose exec``; its output."""
        found = self.running[name]
        assert found.container is not None
        answer = found.recipe.exec(found.container, words, timeout)
        if answer.returncode:
            raise RuntimeError(f"{words} in {name} ended with {answer.returncode}: {answer.stdout}{answer.stderr}")
        return answer.stdout

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.failure or time.monotonic() > deadline:
                raise RuntimeError(self.failure or f"not true within {seconds} s: {what}\n{self.all_logs()}")
            time.sleep(_POLL_SECONDS)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def all_logs(self) -> str:
        return "\n".join(f"== {name}\n{self.end_of_log(name)}" for name in self.services)

    def end_of_log(self, name: str) -> str:
        return self.log(name).read_text(errors="replace")[-1500:] if self.log(name).exists() else ""

    # ---- how ----

    def _is_up(self) -> bool:
        return all(
            found.state
            == ("healthy" if found.service.health else "running" if found.service.restart != "no" else "exited")
            for found in self.running.values()
        )

    def _start_thread(self, name: str) -> None:
        found = self.running[name]
        found.thread = threading.Thread(target=self._keep_running, args=(found,), daemon=True)
        found.thread.start()

    def _keep_running(self, found: Running) -> None:
        """The life of a service."""
        try:
            self._live(found)
        except Exception as error:  # noqa: BLE001 - in a thread: the test must hear of it
            self.failure = self.failure or f"{found.service.name}: {error!r}"

    def _live(self, found: Running) -> None:
        service = found.service
        while not all(self._holds(other, wanted) for other, wanted in service.after.items()):
            if self.closing.wait(_POLL_SECONDS):
                return
        while not self.closing.is_set():
            container = found.recipe.start(self.log(service.name))
            found.container = container
            self._name(service.name, container.address)
            found.state, found.starts = "running", found.starts + 1
            self._watch(found, container)
            self._name(service.name, None)
            if self.closing.is_set() or found.state == "stopped":
                return
            found.code = container.process.wait()
            if service.restart == "no":
                found.state = "exited"
                if found.code:
                    self.failure = f"{service.name} ended with {found.code}:\n{self.end_of_log(service.name)}"
                return
            if found.starts >= _TRIES and found.state != "healthy":
                raise RuntimeError(f"ended {found.starts} times:\n{self.end_of_log(service.name)}")
            found.state = "restarting"
            time.sleep(_POLL_SECONDS)

    def _holds(self, other: str, wanted: str) -> bool:
        found = self.running[other]
        match wanted:
            case "service_healthy" if found.state == "unhealthy":
                raise RuntimeError(f"{other} is unhealthy:\n{self.end_of_log(other)}")
            case "service_healthy":
                return found.state == "healthy"
            case "service_completed_successfully":
                return found.state == "exited" and found.code == 0
            case "service_started":
                return found.starts > 0
        raise RuntimeError(f"the condition {wanted!r} is not known")

    def _watch(self, found: Running, container: Container) -> None:
        """Until it has ended; looks after its health meanwhile."""
        health, began, failures = found.service.health, time.monotonic(), 0
        if health is None:
            container.process.wait()
            return
        while True:
            try:
                container.process.wait(health.interval)
                return
            except subprocess.TimeoutExpired:
                pass
            try:
                healthy = found.recipe.exec(container, health.command, health.timeout).returncode == 0
            except (subprocess.TimeoutExpired, psutil.Error, ValueError):
                healthy = False
            if healthy:
                found.state, failures = "healthy", 0
            elif found.state == "healthy" or time.monotonic() - began > health.start_period:
                failures += 1
                if failures >= health.retries and found.state != "stopped":
                    found.state = "unhealthy"

    def _name(self, name: str, address: str | None) -> None:
        """Only what runs has a name. Written in place: the file is mounted into every service."""
        with self.lock:
            hosts = self.folder / "hosts"
            lines = [
                line for line in hosts.read_text().splitlines() if line and line.split()[1] not in (name, "localhost")
            ]
            lines = ["127.0.0.1 localhost", *lines, *([f"{address} {name} {hostname_of(name)}"] if address else [])]
            with hosts.open("r+") as file:
                file.write("\n".join(lines) + "\n")
                file.truncate()

    def _publish(self, address: str, published: int, name: str, inside: int) -> None:
        """As docker's proxy does."""
        listener = socket.create_server((address, published))

        def accept() -> None:
            while True:
                client, _ = listener.accept()
                container = self.running[name].container
                try:
                    server = socket.create_connection((container.address if container else "", inside), timeout=10)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=_pump, args=(source, sink), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
