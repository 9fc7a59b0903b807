"""Which checkpoints stay beside the latest ones. No torch."""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

from rlcore.config import SegmentConfig
from rlcore.segment.journal import StepRecord
from rlcore.segment.spec import SegmentManifest

logger = logging.getLogger(__name__)


def pinned(
    segments: Sequence[SegmentManifest],
    records: Sequence[StepRecord],
    config: SegmentConfig,
    *,
    present: Collection[str] | None = None,
) -> list[Path]:
    """Folders of every ``keep_every``-th segment's checkpoint, and of the ``keep_best`` best segments'.

    Args:
        segments: that ended in a checkpoint, in order.
        records: the journal; a segment is as good as the mean of ``best_metric`` over its steps.
        present: names of the checkpoints among which the best are chosen. None: those on this disk.
    """
    every, best = config.keep_every, config.keep_best
    kept = [s for s in segments if every is not None and s.complete and (s.segment + 1) % every == 0]
    if best:
        there = [segment for segment in segments if _is_there(Path(segment.checkpoint.path), present)]
        scored = [(score, s.segment, s) for s in there if (score := _score(s, records, config)) is not None]
        kept += [segment for _, _, segment in sorted(scored, key=lambda item: item[:2], reverse=True)[:best]]
    return [Path(segment.checkpoint.path) for segment in kept]


def _is_there(checkpoint: Path, present: Collection[str] | None) -> bool:
    return checkpoint.is_dir() if present is None else checkpoint.name in present


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
