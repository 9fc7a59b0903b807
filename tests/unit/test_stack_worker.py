"""How a container's worker stops. Small programs stand for Prefect's worker and for a flow."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from infra import processes
from infra.stack.worker import stop_all, work

# As Prefect's worker: told to stop, it ends its flow at once.
_WORKER = """
import signal, subprocess, sys
flow = subprocess.Popen([sys.executable, sys.argv[1], "prefect", sys.argv[2]])
def stop(*_):
    flow.kill()
    sys.exit(0)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
flow.wait()
signal.pause()
"""
_FLOW = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[2])
def commit(*_):
    time.sleep(0.5)
    (folder / "committed").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, commit)
(folder / "flow").touch()
time.sleep(600)
"""


def program(folder: Path, flow: str) -> list[str]:
    (folder / "worker.py").write_text(_WORKER)
    (folder / "flow.py").write_text(flow)
    return [sys.executable, str(folder / "worker.py"), str(folder / "flow.py"), str(folder)]


def tell_when(path: Path) -> threading.Event:
    told = threading.Event()

    def look() -> None:
        while not path.exists():
            time.sleep(0.05)
        told.set()

    threading.Thread(target=look, daemon=True).start()
    return told


def test_a_flow_commits_before_its_worker_ends(tmp_path: Path) -> None:
    mark = f"worker-{secrets.token_hex(4)}"
    assert work(program(tmp_path, _FLOW), mark, 20, tell_when(tmp_path / "flow")) == 0
    assert (tmp_path / "committed").exists()
    assert not processes.marked(mark)


def test_a_flow_that_does_not_end_is_killed_after_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.stack.worker.AFTER_GRACE_SECONDS", 0.0)
    mark = f"worker-{secrets.token_hex(4)}"
    deaf = _FLOW.replace("signal.signal(signal.SIGTERM, commit)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert work(program(tmp_path, deaf), mark, 1, tell_when(tmp_path / "flow")) == 0
    assert not (tmp_path / "committed").exists()
    assert not processes.marked(mark)


@pytest.mark.parametrize(("code", "ended"), [(0, 1), (3, 3)])
def test_a_worker_that_ends_by_itself_is_a_failure(code: int, ended: int) -> None:
    """Docker and Kubernetes start it again."""
    command = [sys.executable, "-c", f"raise SystemExit({code})"]
    assert work(command, f"worker-{secrets.token_hex(4)}", 1, threading.Event()) == ended


def test_a_container_can_be_asked_to_end_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rlflow").write_text("import time\ntime.sleep(600)\n")
    run = subprocess.Popen([sys.executable, str(tmp_path / "rlflow"), "train", "grpo-gsm8k-tiny"])
    other = subprocess.Popen([sys.executable, str(tmp_path / "rlflow"), "status"])
    try:
        for process in (run, other):
            while "rlflow" not in " ".join(psutil.Process(process.pid).cmdline()):  # the new program has not begun
                time.sleep(0.01)
        # other tests may be at work on this machine
        monkeypatch.setattr(psutil, "process_iter", lambda: [psutil.Process(run.pid), psutil.Process(other.pid)])
        stop_all(20)
        assert run.poll() is not None
        assert other.poll() is None
    finally:
        for process in (run, other):
            process.kill()
