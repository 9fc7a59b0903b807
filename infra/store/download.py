"""Data sources: local paths are used in place, fsspec URIs (s3://, gs://, memory://) are downloaded once."""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath

import fsspec
from fsspec.core import url_to_fs

from infra.errors import StorageError, StorageUnusableError
from infra.files import building, now_of

_USED = ".used"  # in a copy's folder; touched at every use
_KEEP_SECONDS = 24 * 3600.0  # longer than any task may take
_DATA_SUFFIXES = {".parquet", ".jsonl", ".json", ".arrow", ".csv"}


def localize(source: str, cache_dir: Path) -> Path | None:
    """The local path of ``source``: itself, or a copy under ``cache_dir`` of what an fsspec URI names.

    None: neither a path nor a URI, so a name for Hugging Face (``owner/name``).

    Raises:
        StorageError: a path that does not exist, a URI with nothing behind it, or no space for the copy.
    """
    if "://" in source:
        return _fetch(source, cache_dir)
    path = Path(source).expanduser()
    if path.exists():
        return path.absolute()
    if looks_like_path(source):
        raise StorageUnusableError(
            f"no file or folder at {source} (looked at {path.absolute()}). Give an existing path, an fsspec "
            "URI such as s3://bucket/folder, or a Hugging Face id with a split such as owner/name@train."
        )
    return None


def looks_like_path(source: str) -> bool:
    """Whether ``source`` can only be a local path: rooted, dotted, nested, or with a data file's suffix."""
    return (
        source.startswith(("/", "./", "../", "~"))
        or source.count("/") > 1
        or Path(source).suffix.lower() in _DATA_SUFFIXES
    )


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds ``folder``, which need not exist yet."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def require_space(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Raise StorageError if ``folder``'s file system has less than ``needed_bytes`` free."""
    free = free_bytes(folder)
    if free < needed_bytes:
        raise StorageError(
            f"{purpose} needs {needed_bytes / 2**30:.2f} GiB, and {folder} has {free / 2**30:.2f} GiB free. "
            "Free some space, or set RLFLOW_DATA_DIR to a folder on a larger disk."
        )


def require_writable(folder: Path) -> None:
    """Make ``folder``, and raise StorageError if this user cannot write to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageUnusableError(
            f"cannot make {folder}: {error}. Set RLFLOW_DATA_DIR to a folder of yours."
        ) from error
    if not os.access(folder, os.W_OK):
        raise StorageUnusableError(f"no permission to write in {folder}. Set RLFLOW_DATA_DIR to a folder of yours.")


def inside(folder: Path, name: str) -> Path:
    """``folder / name``, for a name from an untrusted source.

    Raises:
        StorageUnusableError: the path would be outside of ``folder``.
    """
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise StorageUnusableError(f"the name {name!r} leads out of {folder}. Nothing of it is used; see who wrote it.")
    return folder / path


def forget_unused(cache_dir: Path, limit_bytes: int, *, keep_seconds: float = _KEEP_SECONDS) -> list[Path]:
    """Delete the least recently used copies in ``cache_dir`` until the rest takes at most ``limit_bytes``. Copies used
    within ``keep_seconds`` stay, because they may be in use. Returns the deleted folders."""
    copies = [path for path in cache_dir.glob("*") if path.is_dir() and not path.name.startswith(".")]
    used = {path: (path / _USED).stat().st_mtime for path in copies if (path / _USED).exists()}
    sizes = {path: sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in copies}
    gone: list[Path] = []
    now = now_of(cache_dir) if used else 0.0
    for path in sorted(used, key=lambda path: used[path]):
        if sum(sizes.values()) <= limit_bytes or now - used[path] < keep_seconds:
            break
        shutil.rmtree(path)
        del sizes[path]
        gone.append(path)
    return gone


def _fetch(uri: str, cache_dir: Path) -> Path:
    try:
        filesystem, root = url_to_fs(uri)
        files = sorted(filesystem.find(root))
        versions = [(name, filesystem.ukey(name), filesystem.size(name) or 0) for name in files]
    except (OSError, ImportError, ValueError) as error:
        raise StorageError(
            f"cannot read {uri}: {error}. Check the address, the credentials and the network."
        ) from error
    if not files:
        raise StorageUnusableError(f"nothing at {uri}. Give the address of an existing file or folder.")
    key = hashlib.sha256(repr((uri, versions)).encode()).hexdigest()[:16]
    base = Path(root.rstrip("/")).name or "source"
    target = cache_dir / key / base
    if not target.exists():
        require_space(cache_dir, sum(size for _, _, size in versions), f"the copy of {uri}")
        with building(target) as aside:
            for name in files:
                below = name.removeprefix(root.rstrip("/")).lstrip("/")
                _download(filesystem, name, inside(aside, below) if below else aside)
    (target.parent / _USED).touch()
    return target


def _download(filesystem: fsspec.AbstractFileSystem, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        filesystem.get_file(name, str(target))
        with suppress(NotImplementedError):  # not every kind of source has modification times
            changed = filesystem.modified(name).timestamp()
            os.utime(target, (changed, changed))
    except OSError as error:
        raise StorageError(f"the download of {name} broke off: {error}. Run the same command again.") from error
