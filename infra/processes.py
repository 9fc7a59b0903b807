"""Start a process in a session of its own, and end it with everything that descends from it.

Ray's daemons and vLLM's workers leave the process group and outlive their parent, so a group signal is not
enough. Every process started here carries a mark in its environment, which its descendants inherit wherever
they go, and keeps its temporary files (Ray's session, sockets) in a folder that goes when they have gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from infra.errors import StorageError
from infra.logs import get_logger
from infra.settings import Settings

MARK = "RLFLOW_PROCESS_MARK"
_TEMPORARY = "rlflow-"
_LAUNCH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py")))
_POLL_SECONDS = 0.1
_KILL_SECONDS = 10.0
_MARK_SECONDS = 1.0
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
    """Start ``args`` in a new session, marked, with a temporary folder of its own (``TMPDIR``) that ``kill`` removes.

    ``output`` takes stdout and stderr; None: our stderr. Keep the mark below 25 characters where Ray starts: it has
    sockets in that folder, and a socket's path ends at 107.

    ``ends_with_parent`` asks Linux for a SIGTERM to the child when the thread that started it dies, even by
    SIGKILL.

    Raises:
        StorageError: somebody else has made that folder.
        OSError: there is no such program, or it may not be run.
    """
    temporary = temporary_folder(mark)
    _make_private(temporary)
    launched = ends_with_parent and sys.platform == "linux"
    reader, answer = os.pipe()
    with open(reader, "rb") as answers:
        try:
            process = subprocess.Popen(
                [*_LAUNCH, str(os.getpid()), str(answer), *args] if launched else args,
                env={**env, MARK: mark, "TMPDIR": str(temporary)},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output if output is not None else _STDERR,
                stderr=subprocess.STDOUT if output is not None else None,
                start_new_session=True,
                pass_fds=(answer,) if launched else (),
            )
        finally:
            os.close(answer)
        code = answers.read()  # ends when the program runs
    if code:
        process.wait()
        raise OSError(int(code), os.strerror(int(code)), args[0])
    _wait_for_mark(process, mark)
    return process


def _make_private(folder: Path) -> None:
    """Make ``folder``, or check the one of an earlier try. /tmp belongs to every user of the machine: whoever makes the
    folder first owns the sockets in it.

    Raises:
        StorageError: it is a link, another user's, or open to others.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    mode = stat.S_IMODE(facts.st_mode)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or mode & 0o077:
        raise StorageError(
            f"{folder} is no folder of this user's alone: {stat.filemode(facts.st_mode)}, user {facts.st_uid}, mode "
            f"{mode:o}. Allowed: a folder of user {os.getuid()} with mode 700. Remove it, or set TMPDIR to a folder of "
            "yours."
        )


def _wait_for_mark(process: subprocess.Popen[bytes], mark: str) -> None:
    """Linux shows the environment of a new process some moments after its start: ``marked`` would miss it till then."""
    deadline = time.monotonic() + _MARK_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error, OSError):
            if psutil.Process(process.pid).environ().get(MARK) == mark:
                return
        time.sleep(0.001)


def temporary_folder(mark: str) -> Path:
    """Beside our own where we have one ourselves, not in it: the path of a socket has to stay short."""
    ours = Path(tempfile.gettempdir())
    root = ours.parent if ours.name == f"{_TEMPORARY}{os.environ.get(MARK)}" else ours
    return root / f"{_TEMPORARY}{mark}"


def marked(mark: str) -> list[psutil.Process]:
    """Every live process that carries ``mark``, this one excepted."""
    return [process for found, process in _all_marked() if found == mark]


def _all_marked() -> list[tuple[str, psutil.Process]]:
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(MARK)
            if mark and process.pid != os.getpid() and _is_live(process):
                found.append((mark, process))
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # gone meanwhile, or another user's: not ours to end
    return found


def family(mark: str) -> list[psutil.Process]:
    """``marked`` and all below: Ray's processes write their title over the environment that holds the mark."""
    found = marked(mark)
    return [*found, *(process for process in _below(found) if process not in found)]


def has_children() -> bool:
    """Whether a child of this process lives. One that has ended and that nobody has waited for does not count."""
    for child in psutil.Process().children():
        try:
            if _is_live(child):
                return True
        except psutil.NoSuchProcess:
            continue
    return False


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
    forked; then removes their temporary folder.

    Below it, because Ray's agents write their title over the environment that holds the mark."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (processes := family(mark)) and time.monotonic() < deadline:
        _signal(processes, signal.SIGKILL)
        _wait_gone(mark, 1.0)
    folder = temporary_folder(mark)
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)  # what a process that is not ours to end holds stays


def kill_all(prefix: str) -> None:
    """``kill`` for every mark that begins with ``prefix`` and has processes or a temporary folder left."""
    folders = temporary_folder(prefix)
    left = {path.name.removeprefix(_TEMPORARY) for path in folders.parent.glob(f"{folders.name}*")}
    for mark in left | {mark for mark, _ in _all_marked() if mark.startswith(prefix)}:
        kill(mark)


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


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, told apart from a later one with the same pid by its start."""

    pid: int
    started: float  # seconds after boot: steps of the wall clock do not move it
    host: str  # name and boot, so that a rebooted host counts as another one


def this_process() -> ProcessId:
    return ProcessId(os.getpid(), _started(os.getpid()), _host())


def is_running(process: ProcessId) -> bool | None:
    """Whether it lives; None where it is another host's, which cannot be looked up from here."""
    if process.host != _host():
        return None
    try:
        return _is_live(psutil.Process(process.pid)) and abs(_started(process.pid) - process.started) < 1.5
    except psutil.NoSuchProcess:
        return False


def _started(pid: int) -> float:
    return float(psutil.Process(pid).create_time() - psutil.boot_time())


def _host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")  # absent outside Linux
    return f"{socket.gethostname()}/{boot.read_text()[:8] if boot.exists() else ''}"


@contextmanager
def alone(settings: Settings, name: str) -> Iterator[bool]:
    """Whether no other flow ``name`` is at this data folder; the lock goes with the process, however it ends."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with (settings.data_dir / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            get_logger().info("%s: another one is at %s", name, settings.data_dir)
            yield False
            return
        yield True
