"""The search for what a run has left finds each kind of leftover."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra import processes
from tests.left import Traces, half_written, left_of

# As Ray does for an actor: over the command line and the environment, in a session and a process group of its own.
_TITLED = """
import os, sys, time
if os.fork():
    sys.exit()
os.setsid()
import ray._raylet
ray._raylet.setproctitle("ray::WorkerActor.generate")
print(os.getpid(), flush=True)
time.sleep(120)
"""


@contextmanager
def orphaned_worker(log: Path, environment: dict[str, str]) -> Iterator[int]:
    """A process with a Ray worker's title, whose parent has ended, and whose output goes to ``log``."""
    with log.open("wb") as output:
        subprocess.run(
            [sys.executable, "-c", _TITLED], env={**os.environ, **environment}, stdout=output, stderr=output, check=True
        )
    wait_for(lambda: log.read_text().endswith("\n"))
    pid = int(log.read_text())
    try:
        yield pid
    finally:
        os.kill(pid, 9)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def mark() -> str:
    return f"left-{secrets.token_hex(6)}"


def test_an_orphaned_ray_worker_is_found_by_its_logs_when_its_title_has_overwritten_all_else(
    mark: str, tmp_path: Path
) -> None:
    session = tmp_path / f"rlflow-{mark}" / "ray" / "session_1"
    session.mkdir(parents=True)
    with orphaned_worker(session / "worker.out", {processes.MARK: mark}) as pid:
        # environ begins with what the caller's environment began with, so the mark may or may not be readable
        assert Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::WorkerActor.generate")
        assert [process.pid for process in left_of(mark)] == [pid]
        assert pid in [process.pid for process in left_of(str(tmp_path))]
    wait_for(lambda: not left_of(mark))


def test_a_process_is_found_by_its_environment_and_by_its_command_line(mark: str) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(120)"]
    by_environment = subprocess.Popen(sleep, env={**os.environ, "RLFLOW_DATA_DIR": f"/data/{mark}"})
    by_command = subprocess.Popen([*sleep, f"/data/{mark}/spec.json"])
    other = subprocess.Popen([*sleep, f"/data/{mark}-other"])
    try:
        wait_for(lambda: len(left_of(f"/data/{mark}")) == 2)
        assert {process.pid for process in left_of(f"/data/{mark}")} == {by_environment.pid, by_command.pid}
    finally:
        for process in (by_environment, by_command, other):
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "name",
    [
        "runs/a/checkpoints/.staging-step-000002/shard",
        "runs/a/checkpoints/.sending-step-000002/shard",
        "runs/a/checkpoints/.trash-step-000002/shard",
        "models/.tiny.host-12ab.tmp/config.json",
        "runs/a/.lease.json.new",
    ],
)
def test_a_half_written_file_is_found_anywhere_in_the_data_folder(name: str, tmp_path: Path) -> None:
    whole = tmp_path / "runs" / "a" / "checkpoints" / "step-000002" / "shard"
    for path in (whole, tmp_path / name):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (found,) = half_written(tmp_path)
    assert (tmp_path / name).is_relative_to(found)


def test_own_temporary_folders_sessions_and_shared_memory_are_recognised(
    mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    holds = "import mmap, sys; file = open(sys.argv[1], 'r+b'); held = mmap.mmap(file.fileno(), 0); sys.stdin.read()"
    ours, others = (Path("/dev/shm") / f"{name}-{mark}" for name in ("ours", "others"))
    for path in (ours, others):
        path.write_bytes(b"1")
    process = subprocess.Popen(
        [sys.executable, "-c", holds, str(ours)],
        env={**os.environ, processes.MARK: mark},
        stdin=subprocess.PIPE,
    )
    try:
        folder = processes.temporary_folder(mark)
        session = tmp_path / "ray" / f"session_2026-01-01_00-00-00_000000_{process.pid}"
        older = tmp_path / "ray" / f"session_2025-01-01_00-00-00_000000_{process.pid}"
        older.mkdir(parents=True)
        traces = Traces(mark)
        for path in (folder, session, tmp_path / "ray" / "session_2026-01-01_00-00-00_000000_1", tmp_path / "rlflow-x"):
            path.mkdir(parents=True)

        def seen() -> bool:
            traces.look()
            return len(traces.files()) == 3

        wait_for(seen)
        process.communicate()
        assert traces.processes() == []
        assert traces.files() == sorted([folder, session, ours])
        folder.rmdir()
        session.rmdir()
        ours.unlink()
        assert traces.files() == []
    finally:
        process.kill()
        process.wait()
        others.unlink()
        ours.unlink(missing_ok=True)
