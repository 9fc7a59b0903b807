"""The stack's supervisor on a disk that takes nothing more. Its workers are other programs, and there is no server."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra import processes
from infra.settings import Settings
from infra.stack.services import Layout, read_state
from infra.stack.supervisor import Service, Supervisor, mark_of


@dataclass(frozen=True, slots=True)
class NoServers(Layout):
    def worker_args(self, pool: str) -> list[str]:
        return [sys.executable, "-c", f"import time; time.sleep(600)  # {pool}"]

    def apply(self) -> None: ...
    def recover(self) -> None: ...
    def pause(self, paused: bool) -> None: ...
    def api(self, method: str, path: str, body: object = None) -> Any:
        return {"status": "READY"}


class Disk:
    """A folder in the place of each file that the supervisor writes: opening fails, as it does on a full disk."""

    def __init__(self, folder: Path) -> None:
        self._files = [folder / "state.json", *(folder / f"worker-{pool}.log" for pool in ("gpu", "cpu"))]

    def fill(self) -> None:
        for file in self._files:
            file.unlink(missing_ok=True)
            file.mkdir()

    def free(self) -> None:
        for file in self._files:
            file.rmdir()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """What is tested here takes SIGTERM and SIGINT for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    settings = Settings(data_dir=tmp_path)
    settings.stack_dir.mkdir(parents=True)
    monkeypatch.setattr("infra.stack.supervisor._MAX_DELAY_SECONDS", 0.5)
    monkeypatch.setattr("infra.stack.supervisor._POLL_SECONDS", 0.1)
    made = Supervisor(settings)
    made._layout = NoServers.of(settings)
    made._services = [Service(pool, mark_of(settings, pool), None) for pool in ("gpu", "cpu")]
    return made


def test_a_full_disk_neither_ends_the_stack_nor_leaves_its_workers_behind(
    supervisor: Supervisor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(data_dir=tmp_path)
    gpu, cpu = (mark_of(settings, pool) for pool in ("gpu", "cpu"))
    disk = Disk(settings.stack_dir)
    errors: list[BaseException] = []

    def story() -> None:
        try:
            wait_for(lambda: (state := read_state(settings)) is not None and state.phase == "up")
            disk.fill()
            for worker in processes.marked(gpu):
                worker.kill()
            wait_for(lambda: "gpu cannot be started" in caplog.text)
            assert processes.marked(cpu)
            disk.free()
            wait_for(lambda: bool(processes.marked(gpu)))
            wait_for(lambda: (state := read_state(settings)) is not None and state.services[0].restarts > 0)
            disk.fill()
        except BaseException as error:  # noqa: BLE001 - for the test's own thread
            errors.append(error)
        finally:
            supervisor._told.set()

    thread = threading.Thread(target=story)
    thread.start()
    try:
        assert supervisor.run() == 0
    finally:
        thread.join()
        left = [*processes.marked(gpu), *processes.marked(cpu)]
        for mark in (gpu, cpu):
            processes.kill(mark)
    assert not errors
    assert not left
    assert "state.json" in caplog.text


def test_a_stack_that_cannot_write_its_state_does_not_start(
    supervisor: Supervisor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(data_dir=tmp_path)
    (settings.stack_dir / "state.json").mkdir()
    assert supervisor.run() == 1
    assert "state.json" in caplog.text
    assert not processes.marked(mark_of(settings, "gpu"))
