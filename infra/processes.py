"""Start a process in its own session, and end it together with all its descendants.

Ray's daemons and vLLM's workers leave the process group and outlive their parent, so signalling the group is not
enough. Every process started here has a mark in its environment, which descendants inherit. Its temporary files (Ray's
session, sockets) are in a folder that is removed when all of them have ended.
"""

from __future__ import annotations

import contextlib
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
from infra.files import locked
from infra.logs import get_logger
from infra.settings import Settings

MARK = "RLFLOW_PROCESS_MARK"
_TEMPORARY = "rlflow-"
_LAUNCH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py")))
_POLL_SECONDS = 0.1
_KILL_SECONDS = 10.0
_MARK_SECONDS = 1.0
_STDERR = 2  # not stdout, whose last line is a result that programs read


def start(
    args: Sequence[str],
    *,
    env: Mapping[str, str],
    mark: str,
    output: IO[bytes] | None = None,
    cwd: Path | None = None,
    ends_with_parent: bool,
) -> subprocess.Popen[bytes]:
    """Start ``args`` in a new session with a mark and its own temporary folder (``TMPDIR``), which ``kill`` removes.

    Args:
        mark: below 25 characters if Ray starts. Ray's sockets are in the temporary folder, and the path of a socket has
            at most 107 characters.
        output: gets stdout and stderr. None: the stderr of this process.
        ends_with_parent: ask Linux for a SIGTERM to the child when the thread that started it ends, even by SIGKILL.

    Raises:
        StorageError: another user owns that folder.
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
    """Make ``folder``, or check the existing one. Every user can write to /tmp, and the folder's owner controls the
    sockets in it.

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
    """Linux shows a new process's environment only after a moment; until then ``marked`` would miss the process."""
    deadline = time.monotonic() + _MARK_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error, OSError):
            if psutil.Process(process.pid).environ().get(MARK) == mark:
                return
        time.sleep(0.001)


def temporary_folder(mark: str) -> Path:
    """The temporary folder of a mark: next to this process's own, not inside it, to keep paths of sockets short."""
    ours = Path(tempfile.gettempdir())
    root = ours.parent if ours.name == f"{_TEMPORARY}{os.environ.get(MARK)}" else ours
    return root / f"{_TEMPORARY}{mark}"


def temporary_folders(*prefixes: str) -> list[tuple[Path, bool]]:
    """This user's temporary folders of marks that start with one of ``prefixes``, and whether their processes live."""
    living = {mark for mark, _ in _all_marked()}
    root = temporary_folder("").parent
    return [
        (path, path.name.removeprefix(_TEMPORARY) in living)
        for prefix in prefixes
        for path in sorted(root.glob(f"{_TEMPORARY}{prefix}*"))
        if path.is_dir() and not path.is_symlink() and path.lstat().st_uid == os.getuid()
    ]


def marked(mark: str) -> list[psutil.Process]:
    """Every other live process with this mark."""
    return [process for found, process in _all_marked() if found == mark]


def _all_marked() -> list[tuple[str, psutil.Process]]:
    found = []
    for process in psutil.process_iter():
        # It may have ended, or belong to another user.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            mark = process.environ().get(MARK)
            if mark and process.pid != os.getpid() and _is_live(process):
                found.append((mark, process))
    return found


def family(mark: str) -> list[psutil.Process]:
    """``marked`` and all their descendants, because Ray's processes overwrite the environment that holds the mark."""
    found = marked(mark)
    below: list[psutil.Process] = []
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += process.children(recursive=True)
    return [*found, *(process for process in below if process not in found)]


def has_children() -> bool:
    """Whether a child of this process is alive. Zombies do not count."""
    return any(map(_is_live, psutil.Process().children()))


def stop(mark: str, grace_seconds: float) -> None:
    """Send SIGTERM to every process with this mark, and SIGKILL to those that remain after the grace period.

    A second Ctrl-C during the grace ends it at once.
    """
    _signal(marked(mark), signal.SIGTERM)
    try:
        _wait_gone(mark, grace_seconds)
    finally:
        kill(mark)


def kill(mark: str) -> None:
    """Send SIGKILL to the ``family`` of a mark until none is left, wait until all have ended, then remove their
    temporary folder."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (processes := family(mark)) and time.monotonic() < deadline:
        _signal(processes, signal.SIGKILL)
        # Not until the mark is gone: an ending process has none while the kernel frees its memory.
        while any(map(_is_live, processes)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
    folder = temporary_folder(mark)
    if folder.exists():
        shutil.rmtree(folder, ignore_errors=True)  # files that another user's process holds stay


def kill_all(prefix: str) -> None:
    """``kill`` every mark with this prefix that has processes or a temporary folder left."""
    folders = temporary_folder(prefix)
    left = {path.name.removeprefix(_TEMPORARY) for path in folders.parent.glob(f"{folders.name}*")}
    for mark in left | {mark for mark, _ in _all_marked() if mark.startswith(prefix)}:
        kill(mark)


def _wait_gone(mark: str, seconds: float) -> None:
    # Not by waiting for pids: a zombie keeps its pid, and only the caller may collect a child's exit code.
    deadline = time.monotonic() + seconds
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _signal(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _is_live(process: psutil.Process) -> bool:
    """Whether it has not ended. A zombie has, and so has one whose pid now belongs to another process."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process. Its start time distinguishes it from a later process with the same pid."""

    pid: int
    started: float  # seconds after boot, which changes of the wall clock do not affect
    host: str  # name, boot and process namespace: in another one the same pid is another process


def this_process() -> ProcessId:
    return ProcessId(os.getpid(), _started(os.getpid()), _host())


def is_running(process: ProcessId) -> bool | None:
    """Whether the process is alive. None: it belongs to another host, so this host cannot tell."""
    if process.host != _host():
        return None
    try:
        return _is_live(psutil.Process(process.pid)) and abs(_started(process.pid) - process.started) < 1.5
    except psutil.NoSuchProcess:
        return False


def _started(pid: int) -> float:
    return float(psutil.Process(pid).create_time() - psutil.boot_time())


def _host() -> str:
    # Containers of one machine may share its name, but have pids of their own.
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")  # absent outside Linux
    namespace = f"/{pids.stat().st_ino}" if pids.exists() else ""
    return f"{socket.gethostname()}/{boot.read_text()[:8] if boot.exists() else ''}{namespace}"


@contextmanager
def alone(settings: Settings, name: str) -> Iterator[bool]:
    """Whether this is the only flow ``name`` at this data folder."""
    with locked(settings.data_dir / f"{name}.lock", wait=False) as mine:
        if not mine:
            get_logger().info("%s: another one is at %s", name, settings.data_dir)
        yield mine
