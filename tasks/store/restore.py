"""Restore a run from RLFLOW_STORE on a machine that does not have it."""

from __future__ import annotations

import uuid
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.errors import StorageDamagedError
from infra.files import building
from infra.logs import get_logger
from infra.settings import Settings
from infra.store.bucket import SEAL
from infra.store.download import inside
from rlcore.errors import ConfigError
from rlcore.files import write_json_atomically
from rlcore.segment.spec import SegmentManifest
from tasks.store.made import fetch, key_of, patient_store_of

CHECKPOINTS = "checkpoints"
SEGMENTS = "segments"


def restore_run(run_id: str, settings: Settings) -> None:
    """If this machine lacks the run, fetch all of it except its checkpoints, as of its last mirrored checkpoint."""
    store, run_dir = patient_store_of(settings), settings.runs_dir / run_id
    if store is None or run_dir.exists():
        return
    names = [name for name in store.files_below(f"runs/{run_id}") if not name.startswith((f"{CHECKPOINTS}/", "."))]
    if not any(name.startswith(f"{SEGMENTS}/") for name in names):
        return  # no checkpoint yet, so nothing to continue from
    with building(run_dir) as aside:
        for name in names:
            path, content = inside(aside, name), store.get(f"runs/{run_id}/{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_relocate(content or b"", run_dir) if name.startswith(f"{SEGMENTS}/") else content or b"")
    reached = max(item.last_step for item in _segments(run_dir))
    write_mirror(run_dir, read_mirror(run_dir, settings).model_copy(update={"step": reached}))
    get_logger().warning("store: run %s is not on this machine and goes on from %s", run_id, settings.store)


def restore_checkpoint(run_dir: Path, settings: Settings) -> None:
    """Fetch the newest checkpoint of the run's segments if this machine lacks it, or else the one before it, and so on.
    If the store lacks it too, the trainer reports it."""
    for segment in reversed(_segments(run_dir)):
        folder = run_dir / CHECKPOINTS / Path(segment.checkpoint.path).name
        if folder.exists():
            return
        try:
            if fetch(folder, settings):
                return
        except StorageDamagedError as error:
            get_logger().warning("store: A DAMAGED CHECKPOINT IS SKIPPED, and the one before it is used: %s", error)
            _unseal(folder, settings)


def _unseal(folder: Path, settings: Settings) -> None:
    """Mark the store's copy of ``folder`` as incomplete, so that it is sent again once it is made again."""
    store, key = patient_store_of(settings), key_of(folder, settings)
    if store is not None and key is not None:
        store.discard(f"{key}/{SEAL}")


class MirrorState(BaseModel):
    """``mirror.json`` in a run's folder: what the store has acknowledged to this machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: str
    step: int = 0  # the store has the checkpoint of this step, and everything up to it
    token: str  # identifies this machine's copy of the run
    taken_over: bool = False


class TakenOverError(ConfigError):
    """Another machine drives the run now; this one must not touch its copy any more."""


def read_mirror(run_dir: Path, settings: Settings) -> MirrorState:
    path = run_dir / "mirror.json"
    fresh = MirrorState(store=settings.store, token=uuid.uuid4().hex)
    try:
        known = MirrorState.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return fresh
    except ValidationError as error:
        get_logger().warning("%s is damaged, so the content of the store is read again. %s", path, error)
        return fresh
    return known if known.store == settings.store else fresh


def write_mirror(run_dir: Path, state: MirrorState) -> None:
    write_json_atomically(run_dir / "mirror.json", state.model_dump_json())


def mirrored_step(run_dir: Path, settings: Settings) -> int:
    """The last step whose checkpoint the store has acknowledged.

    Raises:
        TakenOverError: another machine drives the run.
    """
    state = read_mirror(run_dir, settings)
    if state.taken_over:
        raise TakenOverError(
            f"another machine has taken over run {run_dir.name} in {settings.store}. Continue it there; to go on here "
            f"from what it has reached, stop it there and move {run_dir} away."
        )
    return state.step


def _segments(run_dir: Path) -> list[SegmentManifest]:
    """All readable manifests; the trainer moves the others aside."""
    segments = []
    for path in sorted((run_dir / SEGMENTS).glob("*.json")):
        try:
            segments.append(SegmentManifest.model_validate_json(path.read_bytes()))
        except ValueError:
            continue
    return segments


def _relocate(manifest: bytes, run_dir: Path) -> bytes:
    """The manifest of a segment with the path of its checkpoint on this machine."""
    segment = SegmentManifest.model_validate_json(manifest)
    path = run_dir / CHECKPOINTS / Path(segment.checkpoint.path).name
    moved = segment.model_copy(update={"checkpoint": segment.checkpoint.model_copy(update={"path": str(path)})})
    return moved.model_dump_json(indent=1).encode()
