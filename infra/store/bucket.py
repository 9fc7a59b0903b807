"""Folders in an S3 bucket, each whole or absent.

S3 has no rename, so a folder exists once its list of files, ``.sealed.json``, exists: it is written last and removed
first. S3 itself makes single objects appear whole, also those sent in parts. The files of a killed sender are ignored
by readers. The next sender reuses the complete ones and deletes the unfinished parts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from fsspec.callbacks import Callback
from pydantic import BaseModel, ConfigDict
from s3fs import S3FileSystem

from infra.environment import CHECKSUMS
from infra.errors import StorageAwayError, StorageDamagedError, StorageError, StorageRefusedError
from infra.files import building, sha256_of
from infra.logs import get_logger
from infra.store.download import inside, require_space
from infra.store.s3_errors import STORE_ERRORS, answer_of, storage_error

SEAL = ".sealed.json"
_FILES_AT_ONCE = 8
_SHA256 = "sha256"  # of an object, in its metadata
_REPORT_SECONDS = 30.0  # between two log lines about a long transfer

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with the transferred bytes and the bytes of the whole folder."""


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int  # bytes
    sha256: str
    modified: float  # seconds since the epoch; preserved, because it dates evaluations


class Seal(BaseModel):
    """The files of a whole folder, by path inside it, with forward slashes."""

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
    botocore's, from the environment. Safe for several threads. Every method raises StorageRefusedError where the
    endpoint refuses. Where it does not answer, that is StorageError, or StorageAwayError once all ``delays`` are used.

    Args:
        delays: seconds before each further try of a whole operation. Refusals are never tried again.
    """

    uri: str
    part_bytes: int = 64 * 2**20  # per part of a multipart upload, so up to 640 GB per file
    retries: int = 5  # by botocore, with growing pauses of at most 20 s, unless AWS_MAX_ATTEMPTS is set
    delays: tuple[float, ...] = ()

    def push(self, folder: Path, key: str, *, sha256: Mapping[str, str] | None = None) -> None:
        """Upload ``folder`` to ``key``. Files that are already there are not sent again.

        Args:
            sha256: hashes that the caller already knows, by path inside the folder.

        Raises:
            StorageError: the folder contains a link, or the endpoint fails.
        """
        seal = _describe(folder, sha256 or {})
        there = self.sealed(key)
        if there is not None and there.same_content(seal):
            return
        report = _Report(f"sending {self.uri}/{key}", seal)

        def send() -> None:
            if there is not None:
                self._files.rm_file(self._path(key, SEAL))
            self._drop_unfinished(key)
            present = set(self._names(key))
            self._at_once(lambda name: self._send(folder / name, self._path(key, name), name, seal, report), seal.files)
            for name in present - seal.files.keys() - {SEAL}:
                self._files.rm_file(self._path(key, name))
            self._files.pipe_file(self._path(key, SEAL), seal.model_dump_json(indent=1).encode())

        self._tried(report.what, send)

    def pull(self, key: str, folder: Path, *, progress: Progress | None = None) -> bool:
        """Download the folder at ``key`` to ``folder``, which must not exist and appears whole. False: no such key.

        Args:
            progress: called with the progress. None: long transfers are logged every 30 seconds.

        Raises:
            StorageError: no space, a file that does not match its hash, or a name that leads out of the folder.
        """
        seal = self.sealed(key)
        if seal is None:
            return False
        folder.parent.mkdir(parents=True, exist_ok=True)
        require_space(folder.parent, seal.size, f"the copy of {self.uri}/{key}")
        report = _Report(f"fetching {self.uri}/{key}", seal, progress)
        arrived: set[str] = set()

        def fetch(name: str) -> None:
            self._receive(self._path(key, name), inside(aside, name), seal.files[name], report.of(name))
            arrived.add(name)
            report.done(name)

        with building(folder) as aside:  # another process may be faster
            aside.mkdir()
            self._tried(report.what, lambda: self._at_once(fetch, seal.files.keys() - arrived))
        return True

    def sealed(self, key: str) -> Seal | None:
        """The files of the folder at ``key``. None: there is none, or it is incomplete."""
        raw = self.get(f"{key}/{SEAL}")
        try:
            return None if raw is None else Seal.model_validate_json(raw)
        except ValueError as error:
            raise StorageDamagedError(f"{self.uri}/{key}/{SEAL} is damaged: {error}. Remove that object.") from error

    def sealed_below(self, key: str) -> list[str]:
        """Names of the whole folders directly below ``key``."""
        found = map(PurePosixPath, self.files_below(key))
        return sorted(path.parts[0] for path in found if path.name == SEAL and len(path.parts) == 2)

    def files_below(self, key: str) -> list[str]:
        """Paths of all objects below ``key``, relative to it."""
        return self._tried(f"listing {self.uri}/{key}", lambda: sorted(self._names(key)))

    def remove(self, key: str) -> None:
        """Remove the folder at ``key``, its list of files first, so that it never looks whole while partial."""

        def remove() -> None:
            for name in sorted(self._names(key), key=lambda name: name != SEAL):
                self._files.rm_file(self._path(key, name))

        self._tried(f"removing {self.uri}/{key}", remove)

    def put(self, key: str, content: bytes) -> None:
        """Write one small object. Readers see the old one or the new one."""
        self._tried(f"writing {self.uri}/{key}", lambda: self._files.pipe_file(self._path(key), content))

    def replace(self, key: str, content: bytes, before: bytes | None) -> bool:
        """Write one small object if its content is ``before`` (None: absent). False: it differs and is not changed.

        The server compares, so that only one of two writers wins. If it has no conditional writes, a read comes first.
        """

        def write() -> bool:
            bucket, _, name = self._path(key).partition("/")
            target = {"Bucket": bucket, "Key": name, "Body": content}
            condition = {"IfNoneMatch": "*"}
            if before is not None:
                with suppress(FileNotFoundError):  # read before the content, so never newer than the content
                    condition = {"IfMatch": str(self._files.info(self._path(key))["ETag"])}
            if self.get(key) != before:
                return False
            try:
                self._files.call_s3("put_object", **target, **condition)
            except STORE_ERRORS as error:
                answer = answer_of(error)
                if answer is not None and answer[1] in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.CONFLICT):
                    return False
                if answer is None or answer[1] != HTTPStatus.NOT_IMPLEMENTED:
                    raise
                self._files.call_s3("put_object", **target)
            return True

        return self._tried(f"writing {self.uri}/{key}", write)

    def get(self, key: str) -> bytes | None:
        """None: there is no such object."""

        def read() -> bytes | None:
            try:
                return bytes(self._files.cat_file(self._path(key)))
            except FileNotFoundError as error:
                if (answer_of(error) or ("", 0))[0] == "NoSuchBucket":
                    raise
                return None

        return self._tried(f"reading {self.uri}/{key}", read)

    def discard(self, key: str) -> None:
        """Remove one object."""
        self._tried(f"removing {self.uri}/{key}", lambda: self._files.rm_file(self._path(key)))

    @property
    def _files(self) -> Any:  # s3fs has no types
        # s3fs caches instances by their arguments, so all stores share one.
        tries = os.environ.get("AWS_MAX_ATTEMPTS")
        limit = {"max_attempts": self.retries} if tries is None else {"total_max_attempts": int(tries)}
        return S3FileSystem(
            use_listings_cache=False,
            config_kwargs={
                "retries": {"mode": "standard", **limit},
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

    def _send(self, file: Path, path: str, name: str, seal: Seal, report: _Report) -> None:
        metadata = {_SHA256: seal.files[name].sha256}
        try:
            found = self._files.metadata(path)
        except FileNotFoundError:
            found = {}
        if found.get(_SHA256) != metadata[_SHA256]:
            self._files.put_file(
                str(file), path, chunksize=self.part_bytes, callback=report.of(name), Metadata=metadata
            )
        report.done(name)

    def _receive(self, path: str, file: Path, entry: FileEntry, progress: Callback) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):  # a transfer may damage a file
            self._files.get_file(path, str(file), callback=progress)
            found = sha256_of(file)
            if found == entry.sha256:
                break
        else:
            raise StorageDamagedError(
                f"s3://{path} has SHA-256 {found}, expected {entry.sha256}. Restore it, or remove its folder there."
            )
        os.utime(file, (entry.modified, entry.modified))

    def _drop_unfinished(self, key: str) -> None:
        """Delete the unfinished uploads of a killed sender, which take space invisibly."""
        bucket, _, prefix = self._path(key, "").partition("/")
        answer = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        for upload in answer.get("Uploads", []):
            self._files.call_s3("abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])

    def _at_once(self, work: Callable[[str], None], names: Iterable[str]) -> None:
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="store") as pool:
            list(pool.map(work, names))  # the first error cancels what has not started

    def _tried(self, what: str, operation: Callable[[], T]) -> T:
        """Run an operation, with further tries after ``delays`` during an outage."""
        for delay in (*self.delays, None):
            try:
                return operation()
            except StorageError:
                raise  # already has a clear message
            except STORE_ERRORS as error:
                failure = storage_error(what, error)
            if failure.permanent or not self.delays:
                raise failure
            if delay is None:
                break
            get_logger().warning("store: the next try is in %g s: %s", delay, failure)
            ends = time.monotonic() + delay
            while (left := ends - time.monotonic()) > 0:
                time.sleep(min(1.0, left))  # in short pieces, so that a flow can be cancelled
        raise StorageAwayError(f"{failure} It was tried {len(self.delays) + 1} times in {sum(self.delays):g} s.")


class _Report:
    """Reports the progress of a transfer to ``progress``, or else to the log every 30 seconds."""

    def __init__(self, what: str, seal: Seal, progress: Progress | None = None) -> None:
        self.what = what
        self._seal, self._progress = seal, progress
        self._bytes: dict[str, int] = {}
        self._said = time.monotonic()
        self._lock = threading.Lock()

    def of(self, name: str) -> Callback:
        """A callback that counts the bytes of one file. A retry starts at 0."""
        return Callback(hooks={"report": lambda size, value, **_: self._note(name, value)})

    def done(self, name: str) -> None:
        self._note(name, self._seal.files[name].size)

    def _note(self, name: str, size: int) -> None:
        with self._lock:
            self._bytes[name] = min(size, self._seal.files[name].size)
            total = sum(self._bytes.values())
            if self._progress is not None:
                self._progress(total, self._seal.size)
            elif time.monotonic() - self._said >= _REPORT_SECONDS:
                self._said = time.monotonic()
                files = f"{len(self._bytes)} of {len(self._seal.files)} files"
                get_logger().info(
                    "store: %s: %s, %.1f of %.1f MiB", self.what, files, total / 2**20, self._seal.size / 2**20
                )


def _describe(folder: Path, known: Mapping[str, str]) -> Seal:
    paths = sorted(folder.rglob("*"))
    links = [path for path in paths if path.is_symlink()]
    if links:
        raise StorageRefusedError(
            f"{links[0]} is a link, and what it leads to may not be ours. Replace it by its file."
        )
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        hashes = dict(zip(files, pool.map(lambda name: known.get(name) or sha256_of(files[name]), files), strict=True))
    return Seal(
        files={
            name: FileEntry(size=path.stat().st_size, sha256=hashes[name], modified=path.stat().st_mtime)
            for name, path in files.items()
        }
    )
