"""How much space a folder takes, and removal that a kill cannot leave half done.

A removal is one rename into ``.trash`` of the data folder, and then the deletion. Nothing refers to a name in there, so
what a killed removal left is deleted at any later time.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from infra.errors import StorageUnusableError
from infra.settings import Settings

TRASH = ".trash"
_BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own is


@dataclass(frozen=True, slots=True)
class Usage:
    """The space of a file or folder."""

    bytes: int  # on disk; a file with several names counts for each of them with its share
    newest: float  # the last change of anything in it, seconds since the epoch

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.bytes + other.bytes, max(self.newest, other.newest))


def usage_of(path: Path) -> Usage:
    """The space of ``path`` and everything below it. Links are not followed. What vanishes meanwhile does not count."""
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return Usage(0, 0.0)
    is_folder = path.is_dir() and not path.is_symlink()
    own = Usage(facts.st_blocks * _BLOCK_BYTES // (1 if is_folder else facts.st_nlink), facts.st_mtime)
    if is_folder:
        with suppress(FileNotFoundError):
            for entry in os.scandir(path):
                own += usage_of(Path(entry.path))
    return own


def require_quota(settings: Settings, needed_bytes: int, purpose: str) -> None:
    """
    Raises:
        StorageUnusableError: the data folder would be larger than RLFLOW_MAX_GIB.
    """
    if not settings.max_gib:
        return
    used = usage_of(settings.data_dir).bytes
    if used + needed_bytes > settings.max_gib * 2**30:
        raise StorageUnusableError(
            f"{settings.data_dir} holds {used / 2**30:.2f} GiB, and {purpose} would add {needed_bytes / 2**30:.2f}. "
            f"RLFLOW_MAX_GIB allows {settings.max_gib:g}. rlflow clean shows what nobody needs, rlflow clean --yes "
            f"removes it until a share of {settings.clean_free_share:g} is free (RLFLOW_CLEAN_FREE_SHARE). Or raise "
            "RLFLOW_MAX_GIB, or keep fewer checkpoints (segment.keep_checkpoints)."
        )


@dataclass(frozen=True, slots=True)
class Trash:
    """The trash of a data folder. Each entry is named after the path that it had there, its key."""

    data_dir: Path

    @property
    def folder(self) -> Path:
        return self.data_dir / TRASH

    def entries(self) -> list[Path]:
        return sorted(self.folder.glob("*")) if self.folder.is_dir() else []

    def put(self, path: Path) -> Path:
        """Move a file or folder of the data folder into the trash. Returns the entry.

        Raises:
            FileNotFoundError: it is gone already.
            StorageUnusableError: it is on another file system, so it cannot be moved at once.
        """
        self.folder.mkdir(exist_ok=True)
        key = path.relative_to(self.data_dir).as_posix()
        entry = self.folder / f"{secrets.token_hex(4)}-{quote(key, safe='')}"
        try:
            path.rename(entry)
        except OSError as error:
            if error.errno == errno.EXDEV:
                raise StorageUnusableError(
                    f"{path} is on another file system than {self.data_dir}, so it cannot be removed safely. Remove it "
                    "by hand while nothing runs."
                ) from error
            raise
        return entry

    def key(self, entry: Path) -> str:
        """The path that the entry had in the data folder."""
        return unquote(entry.name.partition("-")[2])

    def put_back(self, entry: Path) -> bool:
        """Undo ``put``. False: something has taken the name meanwhile, and the entry stays in the trash."""
        target = self.data_dir / self.key(entry)
        if target.exists():
            return False
        try:
            entry.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        return True

    def empty(self, entry: Path) -> None:
        """Delete the content of an entry. Its name stays, as a note of what is still to be done elsewhere."""
        if entry.is_dir() and not entry.is_symlink():
            for path in entry.iterdir():
                _delete(path)
        else:
            entry.unlink()
            entry.mkdir()

    def delete(self, entry: Path) -> None:
        _delete(entry)
        with suppress(OSError):  # not empty
            self.folder.rmdir()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
