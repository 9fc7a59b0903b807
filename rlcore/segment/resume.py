"""Where a run continues (its newest whole checkpoint), and which checkpoints it keeps. No torch.

A damaged checkpoint is moved aside with a warning, and the one before it is used, down to the initial model. Later
segments are trained again. Their manifests are moved aside too, or a driver would count them as done.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from rlcore.artifacts import CheckpointRef
from rlcore.config import SegmentConfig
from rlcore.errors import CheckpointError, StorageError
from rlcore.files import write_json_atomically
from rlcore.segment.journal import StepRecord
from rlcore.segment.spec import SegmentManifest, SegmentSpec, segment_path
from rlcore.segment.store import (
    CheckpointManifest,
    LocalCheckpointStore,
    checkpoint_ref,
    code_digest,
    move_aside,
    read_manifest,
    verify_checkpoint,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What to train next, and from which checkpoint."""

    segment: int
    first_step: int  # of that segment: steps taken before it
    checkpoint: CheckpointRef | None  # None: the initial model

    @property
    def step(self) -> int:
        """Steps taken."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def find_resume_point(
    run_dir: Path, store: LocalCheckpointStore, *, check: Callable[[CheckpointRef], object] = verify_checkpoint
) -> ResumePoint:
    """Find the newest whole checkpoint and move every later manifest aside. Only the holder of the lease may call this.

    Also writes the segment manifest if the trainer died between committing the checkpoint and writing the manifest.

    Args:
        check: raises CheckpointError if a checkpoint is damaged. A checkpoint without a segment manifest is always
            verified: the manifest tells the driver that the segment is done.

    Raises:
        CheckpointError: the newest whole checkpoint belongs to another run.
        StorageError: manifests name checkpoints but their folder is empty, as when a disk is not mounted.
    """
    for folder in ("segments", "trained", "samples"):  # only trainers write there, and this one holds the lease
        for half_written in (run_dir / folder).glob(".*.tmp"):
            half_written.unlink()
    for staged in store.half_written():
        logger.warning("A HALF WRITTEN CHECKPOINT was left by a trainer that died, and is not used: %s", staged)
    segments = read_segments(run_dir)
    newest = None
    for path in store.newest_first():
        try:
            newest = _checked(path, segments, check)
            break
        except CheckpointError as error:
            logger.warning("A DAMAGED CHECKPOINT IS MOVED ASIDE to %s: %s", move_aside(path).name, error)
    if newest is not None:
        store.require_run(Path(newest.checkpoint.path), newest.run_id)
    if newest is None and segments and not any((run_dir / "checkpoints").glob("*")):
        raise StorageError(
            f"{run_dir} says that step {segments[-1].last_step} is committed, and its folder checkpoints is empty. "
            "Mount or restore it; to train from the initial model again, remove the folder segments."
        )
    reached = -1 if newest is None else newest.last_step
    for lost in (manifest for manifest in segments if manifest.last_step > reached):
        logger.warning(
            "SEGMENT %d IS NO LONGER DONE: its checkpoint of step %d is damaged or gone. Its manifest is moved to %s, "
            "and training goes on from %s.",
            lost.segment,
            lost.last_step,
            move_aside(segment_path(run_dir, lost.segment)).name,
            "the initial model" if newest is None else f"step {reached}",
        )
    if newest is None:
        return ResumePoint(0, 0, None)
    if newest not in segments:
        write_json_atomically(segment_path(run_dir, newest.segment), newest.model_dump_json(indent=1))
    if newest.complete:
        return ResumePoint(newest.segment + 1, newest.last_step, newest.checkpoint)
    return ResumePoint(newest.segment, newest.first_step, newest.checkpoint)


def read_segments(run_dir: Path) -> list[SegmentManifest]:
    """Every segment's manifest, in order. Unreadable ones are moved aside with a warning."""
    found = []
    for path in sorted((run_dir / "segments").glob("*.json")):
        try:
            found.append(SegmentManifest.model_validate_json(path.read_bytes()))
        except ValidationError as error:
            logger.warning("A DAMAGED SEGMENT MANIFEST IS MOVED ASIDE to %s: %s", move_aside(path).name, error)
    return found


def segment_manifest(checkpoint: CheckpointRef, written: CheckpointManifest) -> SegmentManifest:
    """The manifest of the segment that a checkpoint ends, made from the checkpoint's own manifest."""
    return SegmentManifest(
        run_id=written.run_id,
        segment=written.segment,
        first_step=written.first_step,
        last_step=written.step,
        complete=written.complete,
        checkpoint=checkpoint,
        experiment_digest=written.experiment_digest,
        dataset_digest=written.dataset_digest,
    )


def warn_of_changes(spec: SegmentSpec, checkpoint: CheckpointRef) -> None:
    """Warn of everything that changed since the checkpoint. The driver has already refused what is forbidden."""
    written = read_manifest(checkpoint)
    for name, was, now in (
        ("experiment", written.experiment_digest, spec.experiment.results_digest()),
        ("dataset", written.dataset_digest, spec.dataset.digest),
        ("initial model", written.model_digest, spec.model.digest),
        ("code of rlcore", written.code_digest, code_digest()),
    ):
        if was != now:
            logger.warning(
                "this run continues with another %s: it was %s up to step %d, and it is %s from here on.",
                name,
                was,
                checkpoint.step,
                now,
            )


def _checked(
    path: Path, segments: Sequence[SegmentManifest], check: Callable[[CheckpointRef], object]
) -> SegmentManifest:
    """The manifest of the segment that ends in this checkpoint: the existing one, or one made from the checkpoint."""
    known = [manifest for manifest in segments if Path(manifest.checkpoint.path).name == path.name]
    if not known:
        written = verify_checkpoint(path)
        return segment_manifest(checkpoint_ref(path, written), written)
    checkpoint = known[-1].checkpoint.model_copy(update={"path": str(path)})  # the run may have been moved
    check(checkpoint)
    return known[-1].model_copy(update={"checkpoint": checkpoint})


def pinned(
    segments: Sequence[SegmentManifest],
    records: Sequence[StepRecord],
    config: SegmentConfig,
    *,
    present: Collection[str] | None = None,
) -> list[Path]:
    """Folders of every ``keep_every``-th segment's checkpoint, and of the ``keep_best`` best segments'.

    Args:
        segments: those with a checkpoint, in order.
        records: the journal with the evaluations. A segment's score is the mean of ``best_metric`` over its steps.
        present: names of the checkpoints to choose the best from. None: those on this disk.
    """
    every = config.keep_every
    kept = [s for s in segments if every is not None and s.complete and (s.segment + 1) % every == 0]
    if config.keep_best:
        if present is None:
            present = {path.name for s in segments if (path := Path(s.checkpoint.path)).is_dir()}
        there = [segment for segment in segments if Path(segment.checkpoint.path).name in present]
        kept += best_first(there, records, config)[: config.keep_best]
    return [Path(segment.checkpoint.path) for segment in kept]


def best_first(
    segments: Sequence[SegmentManifest], records: Sequence[StepRecord], config: SegmentConfig
) -> list[SegmentManifest]:
    """The segments that have a score, the highest first and the earlier first among equals."""
    scored = [(score, segment) for segment in segments if (score := _score(segment, records, config)) is not None]
    return [segment for _, segment in sorted(scored, key=lambda item: (-item[0], item[1].segment))]


def _score(segment: SegmentManifest, records: Sequence[StepRecord], config: SegmentConfig) -> float | None:
    """None: none of the segment's steps has a finite value of the metric."""
    own = [record.metrics for record in records if segment.first_step < record.step <= segment.last_step]
    values = [metrics[config.best_metric] for metrics in own if config.best_metric in metrics]
    if own and not values:
        logger.warning(
            "segment.best_metric is %r, and segment %d journaled no such metric: its checkpoint is not kept as one of "
            "the best. Found: %s",
            config.best_metric,
            segment.segment,
            ", ".join(sorted({name for metrics in own for name in metrics})),
        )
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else None
