"""Files and folders that appear whole or not at all, file locks and hashes.

Standard library only, because a tracker's interpreter imports it.

Any number of processes, also on several hosts, may write the same path: each writes under a unique name and renames it.
Content is synced to disk before the rename, and the rename before the call returns.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

_STALE_SECONDS = 24 * 3600
_FILES_AT_ONCE = 16


def write_atomically(path: Path, text: str) -> None:
    """Write a small file. Readers see the old file or the new one, never a part."""
    with building(path) as aside:
        aside.write_text(text)


def make_private(folder: Path) -> None:
    """Make a folder that no other user can enter. One that exists keeps its permissions."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)


def now_of(folder: Path) -> float:
    """The time by which the file system of ``folder`` dates its files, in seconds since the epoch.

    With a shared volume it is another machine's. Where nothing can be written it is this machine's.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_mtime
    except OSError:
        return time.time()


@contextmanager
def building(final: Path) -> Iterator[Path]:
    """A temporary path next to ``final``. The block makes a file or folder there, which is then renamed to ``final``.

    If another process has made the same folder first, or if the block raises, the temporary folder is removed.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for left in final.parent.glob(f".{final.name}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process removed it first
            if now_of(final.parent) - left.stat().st_mtime > _STALE_SECONDS:
                _remove(left)
    aside = _aside(final)
    try:
        yield aside
        _sync(aside)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:  # parallel syncs share one write of the file system's log
            list(pool.map(_sync, aside.rglob("*")))
        try:
            aside.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync(final.parent)
    finally:
        _remove(aside)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of the file ``path``. It ends with the process, even on SIGKILL.

    Yields:
        False if another process has the lock and ``wait`` is off.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except BlockingIOError:
            mine = False
        yield mine


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _aside(final: Path) -> Path:
    # Random bits as well, because threads of one process may write the same name.
    return final.with_name(f".{final.name}.{_machine()}-{os.getpid()}-{secrets.token_hex(6)}.tmp")


def _machine() -> str:
    """The host's name, and the namespace of its process ids: containers of one machine may share its name."""
    pids = Path("/proc/self/ns/pid")  # absent outside Linux
    return f"{socket.gethostname()}-{pids.stat().st_ino if pids.exists() else 0}"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):  # an error of the caller's block says more
            path.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
