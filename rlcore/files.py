"""Atomic writes of files and folders. No torch.

Several processes may write the same name, also on hosts that share a volume: each writes under a unique name and
renames it. The content is on disk before the new name, and the new name before the call returns.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rlcore.errors import StorageError

VERIFIED = "verified.json"  # written by a merge into a model folder that it has verified
VERDICTS = "verdicts"  # folder of a judge's verdicts, in that of a run or of an evaluation
_STALE_SECONDS = 24 * 3600
_FILES_AT_ONCE = 16


def write_json_atomically(path: Path, text: str) -> None:
    """Write a small file. Readers see the old content or the new, never a part."""
    write_atomically(path, text.encode())


def write_atomically(path: Path, content: bytes) -> None:
    """As ``write_json_atomically``, for bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(path)
    try:
        aside.write_bytes(content)
        fsync(aside)
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):  # the first error is more useful
            aside.unlink(missing_ok=True)
        raise
    fsync(path.parent)


@contextmanager
def building(final: Path) -> Iterator[Path]:
    """A new folder that is renamed to ``final`` when the block ends, and removed if the block raises.

    If another process finished the same folder first, that one stays and ours is removed.

    Raises:
        StorageError: no space left, or no permission to write.
    """
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        aside = _aside(final)
        try:
            aside.mkdir()
            _remove_stale(final, now=aside.stat().st_mtime)  # the file system's time: with a shared volume another's
            yield aside
            fsync_tree(aside)
            try:
                aside.rename(final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            fsync(final.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise StorageError(
            f"cannot write {final}: {error}. Free space or make the folder writable, and run again."
        ) from error


def _remove_stale(final: Path, now: float) -> None:
    for left in final.parent.glob(f".{final.name}.*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it as well
            if now - left.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def remove_whole(folder: Path) -> None:
    """Remove a folder so that nobody sees a part of it. A missing folder is no error."""
    trash = _aside(folder)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(trash)
        shutil.rmtree(trash)


def remove_abandoned(folder: Path) -> None:
    """Remove the half-written files that dead processes of this host left in a folder. Subfolders are left alone."""
    ours = re.compile(rf"\.{re.escape(_machine())}-(\d+)-[0-9a-f]{{12}}\.tmp$")
    for path in folder.glob(".*.tmp"):
        name = ours.search(path.name)
        if name and path.is_file() and not Path("/proc", name[1]).exists():
            path.unlink(missing_ok=True)


def files_below(folder: Path) -> Iterator[Path]:
    """All files below a folder. Unlike ``Path.rglob`` it does not raise if another process removes a subfolder."""
    for inside, _, names in os.walk(folder):
        yield from (Path(inside, name) for name in names)


def folder_digest(folder: Path) -> str:
    """Hash of the names and contents of a model folder's files, without hidden files and ``VERIFIED``."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != VERIFIED]
    paths = sorted(path for path in paths if not path.name.startswith("."))
    digest = hashlib.sha256()
    with ThreadPoolExecutor(min(_FILES_AT_ONCE, os.cpu_count() or 1)) as pool:  # hashlib releases the GIL
        for path, of_file in zip(paths, pool.map(file_hash, paths), strict=True):
            digest.update(f"{path.relative_to(folder).as_posix()} ".encode())
            digest.update(bytes.fromhex(of_file))
    return digest.hexdigest()[:16]


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to disk, so that a later rename cannot reach the disk earlier."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:  # lets the file system write its log once for many files
        list(pool.map(fsync, (folder, *folder.rglob("*"))))


def fsync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aside(final: Path) -> Path:
    # Random bits as well, because threads of one process may write the same name.
    return final.with_name(f".{final.name}.{_machine()}-{os.getpid()}-{secrets.token_hex(6)}.tmp")


def _machine() -> str:
    """The host's name, and the namespace of its process ids: containers of one machine may share its name."""
    pids = Path("/proc/self/ns/pid")  # absent outside Linux
    return f"{socket.gethostname()}-{pids.stat().st_ino if pids.exists() else 0}"
