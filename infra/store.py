"""Folders in an S3 bucket, each whole or absent.

S3 has no rename, so a folder counts once its list of files, ``.sealed.json``, is there: it is written last and removed
first. A single object appears whole by S3's own rules, also one that was sent in parts. What a killed sender has left
is invisible, is found by the next one (files that arrived are not sent again), and its unfinished parts are dropped.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict
from s3fs import S3FileSystem

from infra.environment import CHECKSUMS
from infra.errors import StorageDamagedError, StorageError, StorageRefusedError
from infra.files import building
from infra.s3_errors import STORE_ERRORS, answer_of, storage_error
from infra.storage import inside, require_space

SEAL = ".sealed.json"
_PART_BYTES = 64 * 2**20  # of what is sent in parts, so up to 640 GB per file
_FILES_AT_ONCE = 8
_RETRIES = 5  # by botocore, with growing pauses of at most 20 s; who asks may ask again
_SHA256 = "sha256"  # of an object, in its metadata


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int  # bytes
    sha256: str
    modified: float  # seconds since the epoch; kept, because evaluations count as of then


class Seal(BaseModel):
    """What a whole folder consists of, by path inside it, with forward slashes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: dict[str, FileEntry]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def same_content(self, other: Seal) -> bool:
        return {n: e.sha256 for n, e in self.files.items()} == {n: e.sha256 for n, e in other.files.items()}


@dataclass(frozen=True, slots=True)
class Store:
    """``s3://bucket/prefix``. Keys of folders and objects are relative to it. Address and keys of the endpoint are
    botocore's, from the environment. Safe for several threads; every method raises StorageError where the endpoint does
    not answer, after retries, and StorageRefusedError where it refuses."""

    uri: str
    part_bytes: int = _PART_BYTES
    retries: int = _RETRIES

    def push(self, folder: Path, key: str, *, sha256: Mapping[str, str] | None = None) -> None:
        """Make ``key`` hold what ``folder`` holds; files that are there already are not sent again.

        Args:
            sha256: of files that the caller has just hashed, by path inside the folder.

        Raises:
            StorageError: a link inside the folder, or the endpoint.
        """
        seal = _describe(folder, sha256 or {})
        there = self.sealed(key)
        if there is not None and there.same_content(seal):
            return
        with self._errors(f"sending {folder.name} to {self.uri}/{key}"):
            if there is not None:
                self._files.rm_file(self._path(key, SEAL))
            self._drop_unfinished(key)
            present = set(self._names(key))
            self._at_once(lambda name: self._send(folder / name, self._path(key, name), seal.files[name]), seal.files)
            for name in present - seal.files.keys() - {SEAL}:
                self._files.rm_file(self._path(key, name))
            self._files.pipe_file(self._path(key, SEAL), seal.model_dump_json(indent=1).encode())

    def pull(self, key: str, folder: Path, *, progress: Callable[[int, int], None] = lambda done, of: None) -> bool:
        """Fetch the folder at ``key`` to ``folder``, which must not exist, and appears whole. False: it is not there.

        Args:
            progress: called with the bytes that have arrived and those to come in all.

        Raises:
            StorageError: no space, a file that does not match its hash, or a name that leads out of the folder.
        """
        seal = self.sealed(key)
        if seal is None:
            return False
        folder.parent.mkdir(parents=True, exist_ok=True)
        require_space(folder.parent, seal.size, f"the copy of {self.uri}/{key}")
        arrived = 0

        def fetch(name: str) -> None:
            nonlocal arrived
            self._receive(self._path(key, name), inside(aside, name), seal.files[name])
            arrived += seal.files[name].size
            progress(arrived, seal.size)

        with building(folder) as aside:  # another process may be faster
            aside.mkdir()
            with self._errors(f"fetching {self.uri}/{key}"):
                self._at_once(fetch, seal.files)
        return True

    def sealed(self, key: str) -> Seal | None:
        """What the folder at ``key`` consists of; None: there is none, or it has not arrived whole."""
        raw = self.get(f"{key}/{SEAL}")
        try:
            return None if raw is None else Seal.model_validate_json(raw)
        except ValueError as error:
            raise StorageDamagedError(f"{self.uri}/{key}/{SEAL} is damaged: {error}. Remove that object.") from error

    def sealed_below(self, key: str) -> list[str]:
        """Names of the whole folders right below ``key``."""
        with self._errors(f"listing {self.uri}/{key}"):
            found = [PurePosixPath(name) for name in self._names(key)]
        return sorted(path.parts[0] for path in found if path.name == SEAL and len(path.parts) == 2)

    def files_below(self, key: str) -> list[str]:
        """Paths of all objects below ``key``, relative to it."""
        with self._errors(f"listing {self.uri}/{key}"):
            return sorted(self._names(key))

    def remove(self, key: str) -> None:
        """Remove the folder at ``key``, so that nobody takes what is left meanwhile for whole."""
        with self._errors(f"removing {self.uri}/{key}"):
            for name in sorted(self._names(key), key=lambda name: name != SEAL):
                self._files.rm_file(self._path(key, name))

    def put(self, key: str, content: bytes) -> None:
        """One small object; readers see the old one or the new one."""
        with self._errors(f"writing {self.uri}/{key}"):
            self._files.pipe_file(self._path(key), content)

    def get(self, key: str) -> bytes | None:
        """None: there is no such object."""
        with self._errors(f"reading {self.uri}/{key}"):
            try:
                return bytes(self._files.cat_file(self._path(key)))
            except FileNotFoundError as error:
                if (answer_of(error) or ("", 0))[0] == "NoSuchBucket":
                    raise
                return None

    def discard(self, key: str) -> None:
        """Remove one object."""
        with self._errors(f"removing {self.uri}/{key}"):
            self._files.rm_file(self._path(key))

    @property
    def _files(self) -> Any:  # s3fs has no types
        # One for all stores of this process: s3fs keeps instances by their arguments.
        return S3FileSystem(
            use_listings_cache=False,
            config_kwargs={
                "retries": {"mode": "standard", "max_attempts": self.retries},
                "connect_timeout": 10,
                "read_timeout": 60,
                **{name.removeprefix("AWS_").lower(): os.environ.get(name, value) for name, value in CHECKSUMS.items()},
            },
        )

    def _path(self, *parts: str) -> str:
        return "/".join((self.uri.removeprefix("s3://"), *parts))

    def _names(self, key: str) -> list[str]:
        root = self._path(key).rstrip("/")  # "" is the whole store
        return [name.removeprefix(f"{root}/") for name in self._files.find(root)]

    def _send(self, file: Path, path: str, entry: FileEntry) -> None:
        metadata = {_SHA256: entry.sha256}
        try:
            found = self._files.metadata(path)
        except FileNotFoundError:
            found = {}
        if found.get(_SHA256) != entry.sha256:
            self._files.put_file(str(file), path, chunksize=self.part_bytes, Metadata=metadata)

    def _receive(self, path: str, file: Path, entry: FileEntry) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(path, str(file))
        found = hash_of(file)
        if found != entry.sha256:
            raise StorageDamagedError(
                f"s3://{path} has SHA-256 {found}, expected {entry.sha256}. Restore it, or remove its folder there."
            )
        os.utime(file, (entry.modified, entry.modified))

    def _drop_unfinished(self, key: str) -> None:
        """Parts of files that a killed sender had under way: they take space, and nobody would see them."""
        bucket, _, prefix = self._path(key, "").partition("/")
        answer = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        for upload in answer.get("Uploads", []):
            self._files.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def _at_once(self, work: Callable[[str], None], names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="store") as pool:
            futures = [pool.submit(work, name) for name in names]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except STORE_ERRORS as error:
            raise storage_error(what, error) from None  # the error's own traceback may name keys


def hash_of(file: Path) -> str:
    """SHA-256 of a file, in hex."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _describe(folder: Path, known: Mapping[str, str]) -> Seal:
    paths = sorted(folder.rglob("*"))
    links = [path for path in paths if path.is_symlink()]
    if links:
        raise StorageRefusedError(
            f"{links[0]} is a link, and what it leads to may not be ours. Replace it by its file."
        )
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        hashes = dict(zip(files, pool.map(lambda name: known.get(name) or hash_of(files[name]), files), strict=True))
    return Seal(
        files={
            name: FileEntry(size=path.stat().st_size, sha256=hashes[name], modified=path.stat().st_mtime)
            for name, path in files.items()
        }
    )
