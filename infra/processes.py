"""Start a process in a session of its own, and end it with everything that descends from it.

Ray's daemons and vLLM's workers leave the process group and outlive their parent, so a group signal is not
enough. Every process started here carries a mark in its environment, which its descendants inherit wherever
they go.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

MARK = "RLFLOW_PROCESS_MARK"
_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.1
_KILL_SECONDS = 10.0
_STDERR = 2  # stdout stays ours: the last line there is a result that programs read


def start(
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    mark: str,
    output: IO[bytes] | None = None,
    cwd: Path | None = None,
    ends_with_parent: bool,
) -> subprocess.Popen[bytes]:
    """Start ``args`` in a new session, marked. ``output`` takes stdout and stderr; None: our stderr.

    ``ends_with_parent`` asks Linux for a SIGTERM to the child when the thread that started it dies, even by
    SIGKILL.
    """
    libc = ctypes.CDLL(None) if ends_with_parent and sys.platform == "linux" else None

    def follow_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return subprocess.Popen(
        args,
        env={**env, MARK: mark},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output if output is not None else _STDERR,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
        preexec_fn=follow_parent if libc is not None else None,
    )


def marked(mark: str) -> list[psutil.Process]:
    """Every live process that carries ``mark``, this one excepted."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark and _is_live(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # gone meanwhile, or another user's: not ours to end
    return found


def family(mark: str) -> list[psutil.Process]:
    """``marked`` and all below: Ray's processes write their title over the environment that holds the mark."""
    found = marked(mark)
    return [*found, *(process for process in _below(found) if process not in found)]


def stop(mark: str, grace_seconds: float) -> None:
    """SIGTERM to every process that carries ``mark``, then SIGKILL to those still there after the grace.

    A second Ctrl-C during the grace ends it at once.
    """
    _signal(marked(mark), signal.SIGTERM)
    try:
        _wait_gone(mark, grace_seconds)
    finally:
        kill(mark)


def kill(mark: str) -> None:
    """SIGKILL to every process that carries ``mark`` and to all below it, again until none is left that could have
    forked."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (processes := family(mark)) and time.monotonic() < deadline:
        _signal(processes, signal.SIGKILL)
        _wait_gone(mark, 1.0)


def _wait_gone(mark: str, seconds: float) -> None:
    # Not by waiting for pids: an uncollected zombie keeps its pid, and a child's exit code is not ours.
    deadline = time.monotonic() + seconds
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _below(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in processes:
        try:
            found += process.children(recursive=True)
        except psutil.NoSuchProcess:
            continue
    return found


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _is_live(process: psutil.Process) -> bool:
    return bool(process.status() != psutil.STATUS_ZOMBIE)
