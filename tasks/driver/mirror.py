"""Copies a run to RLFLOW_STORE while it trains.

The flow's process sends what the trainer has committed; the trainer does not wait for it. A checkpoint is sealed in
the store first, then the run's small files follow, and the segments' manifests last. So a manifest never names a
checkpoint that is missing, and a restored run equals one that was killed right after that commit.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from infra.errors import StorageAwayError, StorageError
from infra.logs import get_logger
from infra.settings import Settings
from infra.store.bucket import Store
from rlcore.errors import CheckpointError
from rlcore.evaluation.records import journal_with_evaluations
from rlcore.files import files_below
from rlcore.segment.resume import pinned
from rlcore.segment.spec import SegmentManifest
from rlcore.segment.store import MANIFEST, LocalCheckpointStore, verify_checkpoint
from tasks.run import Run
from tasks.store.made import store_of
from tasks.store.restore import CHECKPOINTS, SEGMENTS, TakenOverError, mirrored_step, read_mirror, write_mirror

_POLL_SECONDS = 1.0
_FIRST_DELAY = 5.0
_LONGEST_DELAY = 300.0
_HOLDER = ".holder"
_OF_THIS_MACHINE = {
    "lease.json", "lease.json.lock", "trainer.lock", "control.json", "ended.json", "mirror.json", "spec.json",
}  # fmt: skip
_NOT_SENT = {CHECKPOINTS, SEGMENTS, "stacks"}
_AT_THE_END = {"trainer.log"}  # it grows, and S3 cannot append


class RunMirror:
    """The copy of one run in the store. Not thread-safe."""

    def __init__(self, run: Run, store: Store, settings: Settings) -> None:
        self._run, self._store, self._settings = run, store, settings
        self._key = f"runs/{run.run_id}"
        self._checkpoints = run.run_dir / CHECKPOINTS
        self._state = read_mirror(run.run_dir, settings)
        self._holds = False
        self._sent: dict[str, str] = {}  # small files: name to hash
        self._sealed: dict[str, str] = {}  # checkpoints: name to the hash of their manifest
        self._damaged: dict[str, str] = {}  # the same for those that do not match theirs
        self._segments: dict[str, bytes] = {}

    def sync(self, *, last: bool = False) -> bool:
        """Send what is new. Returns whether a checkpoint was sent. ``last``: send everything, the run is over.

        Raises:
            StorageError: the endpoint does not answer. Call again: nothing that was sent in part counts.
            TakenOverError: another machine has taken the run over.
        """
        segments = self._read_segments()
        if not last and segments == self._segments and not self._unsent():
            return False
        self._require_holder()
        unsent = self._unsent()  # again, because the store may have listed checkpoints
        if unsent:
            self._send_checkpoint(unsent[0])
        if not self._is_sealed(segments):
            return bool(unsent)  # the newest was pruned before it could be linked; its successor is next
        if last or segments != self._segments:
            self._send_files(last=last)
            self._send_segments(segments)
            self._prune(segments)
        return bool(unsent)

    def sync_all(self) -> None:
        """Send everything that is left of a run that has ended."""
        while self.sync():
            pass
        self.sync(last=True)

    def _require_holder(self) -> None:
        """Make sure that this machine owns the copy in the store, until another machine mirrors the run."""
        held, mine = self._store.get(f"{self._key}/{_HOLDER}"), self._state.token.encode()
        if self._holds and held == mine:
            return
        if self._holds or (held not in (None, mine) and self._is_ahead()):
            self._note(taken_over=True)
            mirrored_step(self._run.run_dir, self._settings)  # raises
        for left in self._checkpoints.glob(".sending-*"):
            shutil.rmtree(left)
        for name in self._store.sealed_below(f"{self._key}/{CHECKPOINTS}"):
            manifest = self._store.get(f"{self._key}/{CHECKPOINTS}/{name}/{MANIFEST}")
            self._sealed[name] = hashlib.sha256(manifest or b"").hexdigest()
        if not self._store.replace(f"{self._key}/{_HOLDER}", mine, held):
            raise StorageError(f"another machine begins to mirror {self._key} to {self._store.uri} at this moment.")
        self._note(taken_over=False)
        self._holds = True

    def _is_ahead(self) -> bool:
        """Whether the store has segments that this machine lacks."""
        there = self._store.files_below(f"{self._key}/{SEGMENTS}")
        return max(there, default="") > max(self._read_segments(), default="")

    def _note(self, **changed: object) -> None:
        self._state = self._state.model_copy(update=changed)
        write_mirror(self._run.run_dir, self._state)

    def _read_segments(self) -> dict[str, bytes]:
        """Whole manifests by file name. Read before anything is sent, so that what they name is on disk by then."""
        found = {}
        for path in sorted((self._run.run_dir / SEGMENTS).glob("*.json")):
            content = path.read_bytes()
            with suppress(ValidationError):
                SegmentManifest.model_validate_json(content)
                found[path.name] = content
        return found

    def _unsent(self) -> list[Path]:
        """Whole checkpoints that the store lacks or has in another version, the newest first."""
        found = []
        for path in LocalCheckpointStore(self._run.run_dir, self._run.run_id).newest_first():
            digest = _manifest_digest(path)
            if digest not in (None, self._sealed.get(path.name), self._damaged.get(path.name)):
                found.append(path)
        return found

    def _send_checkpoint(self, path: Path) -> None:
        started = time.monotonic()
        snapshot = path.with_name(f".sending-{path.name}")  # hard links: retention may remove it
        try:
            shutil.copytree(path, snapshot, copy_function=os.link)
            digest = hashlib.sha256((snapshot / MANIFEST).read_bytes()).hexdigest()
            try:
                manifest = verify_checkpoint(snapshot)
            except CheckpointError as error:
                get_logger().warning("store: A DAMAGED CHECKPOINT IS NOT SENT: %s", error)
                self._damaged[path.name] = digest
                return
            known = {name: entry.sha256 for name, entry in manifest.files.items()}
            self._store.push(snapshot, f"{self._key}/{CHECKPOINTS}/{path.name}", sha256=known)
        except (FileNotFoundError, shutil.Error):
            if path.exists():
                raise  # for example, a file system without hard links
            return  # removed before it was linked
        finally:
            shutil.rmtree(snapshot, ignore_errors=True)
        self._sealed[path.name] = digest
        get_logger().info("store: sent %s in %.0f s", path.name, time.monotonic() - started)

    def _is_sealed(self, segments: dict[str, bytes]) -> bool:
        """Whether the checkpoint of the newest segment is in the store."""
        if not segments:
            return True
        newest = SegmentManifest.model_validate_json(list(segments.values())[-1])
        return Path(newest.checkpoint.path).name in self._sealed

    def _send_files(self, *, last: bool) -> None:
        for path in sorted(files_below(self._run.run_dir)):
            parts = path.relative_to(self._run.run_dir).parts
            if parts[0] in _NOT_SENT or parts[0] in _OF_THIS_MACHINE or any(part[0] == "." for part in parts):
                continue
            if path.is_symlink() or not path.is_file() or (parts[0] in _AT_THE_END and not last):
                continue
            try:
                content = path.read_bytes()
            except FileNotFoundError:  # the trainer has removed it meanwhile
                continue
            name, digest = "/".join(parts), hashlib.sha256(content).hexdigest()
            if self._sent.get(name) != digest:
                self._store.put(f"{self._key}/{name}", content)
                self._sent[name] = digest

    def _send_segments(self, segments: dict[str, bytes]) -> None:
        there = self._store.files_below(f"{self._key}/{SEGMENTS}")
        for name in set(there) - segments.keys():  # damaged segments that are trained again
            self._store.discard(f"{self._key}/{SEGMENTS}/{name}")
        for name, content in segments.items():
            if self._segments.get(name) != content:
                key = f"{self._key}/{SEGMENTS}/{name}"
                before = self._store.get(key) if name in there else None
                if not self._store.replace(key, content, before):
                    self._require_holder()  # most likely another machine continues the run
                    raise StorageError(f"{self._store.uri}/{key} has changed while it was written.")
        self._segments = segments
        if segments:
            newest = SegmentManifest.model_validate_json(list(segments.values())[-1])
            self._note(step=newest.last_step)

    def _prune(self, segments: dict[str, bytes]) -> None:
        """Apply ``segment.keep_*`` to the store; checkpoints that this machine still has stay there too."""
        key, config = f"{self._key}/{CHECKPOINTS}", self._run.experiment.segment
        there = sorted(self._store.sealed_below(key), reverse=True)
        manifests = [SegmentManifest.model_validate_json(content) for content in segments.values()]
        records = journal_with_evaluations(self._run.run_dir)
        pins = {path.name for path in pinned(manifests, records, config, present=there)}
        here = {path.name for path in self._checkpoints.glob("step-*")}
        for name in there[config.keep_checkpoints :]:
            if name not in pins | here:
                self._store.remove(f"{key}/{name}")
                self._sealed.pop(name, None)


@contextmanager
def mirror_run(run: Run, settings: Settings) -> Iterator[None]:
    """Mirror the run from a thread. At the end the rest is sent, except after an interrupt.

    Raises:
        StorageError: the rest could not be sent within ``RLFLOW_STORE_WAIT_SECONDS``.
    """
    store = store_of(settings)
    if store is None:
        yield
        return
    mirror = RunMirror(run, store, settings)
    sender = _Sender(mirror)
    _SENDERS[run.run_dir] = sender
    sender.start()
    try:
        yield
    except Exception:  # raised again, once the logs that explain it are in the store
        sender.end()
        _send_rest_of_failed_run(mirror)
        raise
    except BaseException:
        sender.over.set()
        get_logger().warning(
            "store: steps up to %d are in %s; continuing the run here sends the rest",
            read_mirror(run.run_dir, settings).step, settings.store,
        )  # fmt: skip
        raise
    finally:
        _SENDERS.pop(run.run_dir, None)
    sender.end()
    _send_rest(mirror, settings.store_wait_seconds)


def wait_until_mirrored(run: Run, step: int, settings: Settings) -> None:
    """Wait until the store has acknowledged the checkpoint of ``step``, which the thread of ``mirror_run`` sends.

    Raises:
        StorageRefusedError: the store refuses it.
        StorageAwayError: no acknowledgement came within ``RLFLOW_STORE_WAIT_SECONDS``.
    """
    if not settings.store or mirrored_step(run.run_dir, settings) >= step:
        return
    sender = _SENDERS.get(run.run_dir)
    if sender is None:
        raise RuntimeError(f"nothing sends {run.run_dir} to {settings.store}: wait inside mirror_run()")
    deadline = time.monotonic() + settings.store_wait_seconds
    refusals = sender.try_now()
    while mirrored_step(run.run_dir, settings) < step:
        if sender.refusals > refusals and sender.refusal is not None:
            raise sender.refusal
        if not sender.is_alive():
            raise StorageError(f"the thread that sends {run.run_dir} to {settings.store} has ended. Continue the run.")
        if time.monotonic() > deadline:
            raise StorageAwayError(
                f"{settings.store} has not taken the checkpoint of step {step} within {settings.store_wait_seconds:g} s"
                " (RLFLOW_STORE_WAIT_SECONDS). Nothing is lost here: see the warnings before, and continue the run."
            )
        time.sleep(_POLL_SECONDS / 4)


def safe_step(run: Run, settings: Settings) -> int:
    """The last step that no resume on any machine takes back: with a store, the last one that it has."""
    committed = run.committed_step()
    return min(committed, mirrored_step(run.run_dir, settings)) if settings.store else committed


class _Sender(threading.Thread):
    """Sends what is new until the run is over. A daemon thread, so that an interrupted flow does not wait for a long
    upload."""

    def __init__(self, mirror: RunMirror) -> None:
        super().__init__(name="mirror", daemon=True)
        self.over = threading.Event()
        self.refusal: StorageError | None = None  # the last one
        self.refusals = 0
        self._mirror = mirror
        self._wake = threading.Event()
        self._failures = 0

    def try_now(self) -> int:
        """Try now instead of after the delay. Returns the number of refusals so far."""
        refusals, self._failures = self.refusals, 0
        self._wake.set()
        return refusals

    def end(self) -> None:
        self.over.set()
        self._wake.set()
        self.join()

    def run(self) -> None:
        delay = _POLL_SECONDS
        while True:
            self._wake.wait(delay)
            self._wake.clear()
            if self.over.is_set():
                return
            delay = _POLL_SECONDS
            try:
                while self._mirror.sync() and not self.over.is_set():
                    pass
                self._failures = 0
            except TakenOverError as error:
                get_logger().error("store: %s", error)
                return
            except Exception as error:  # noqa: BLE001 - if this thread ended, nothing would be sent any more
                delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2**self._failures)
                self._failures += 1
                said = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                get_logger().warning("store: training goes on, the next try is in %.0f s: %s", delay, said)
                if isinstance(error, StorageError) and error.permanent:
                    self.refusal = error
                    self.refusals += 1


_SENDERS: dict[Path, _Sender] = {}  # by the run's folder


def _send_rest(mirror: RunMirror, wait_seconds: float) -> None:
    deadline, delay = time.monotonic() + wait_seconds, _FIRST_DELAY
    while True:
        try:
            mirror.sync_all()
            return
        except StorageError as error:
            if error.permanent or time.monotonic() + delay > deadline:
                raise
            get_logger().warning("store: the next try is in %.0f s: %s", delay, error)
            time.sleep(delay)
            delay = min(_LONGEST_DELAY, 2 * delay)


def _send_rest_of_failed_run(mirror: RunMirror) -> None:
    try:
        mirror.sync_all()
    except (OSError, TakenOverError) as error:  # the error that ended the run is more useful
        get_logger().warning("store: the end of the run could not be sent: %s", error)


def _manifest_digest(checkpoint: Path) -> str | None:
    try:
        return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
    except FileNotFoundError:
        return None
