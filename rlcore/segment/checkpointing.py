"""Checkpoints written in the background: training waits only for a copy of the train state.

The workers write the files. A thread of this process hashes, syncs and renames them, writes the segment's manifest, and
then deletes older checkpoints. At most one checkpoint is in progress. Waiting for it counts as progress of the trainer
only while bytes are written or hashed, so that a hanging disk is detected as a hang.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rlcore.artifacts import CheckpointRef
from rlcore.data.probe import Probe, ProbePolicy
from rlcore.errors import LeaseLostError
from rlcore.files import write_json_atomically
from rlcore.segment.journal import CheckpointSeconds, StepRecord
from rlcore.segment.lease import Lease
from rlcore.segment.resume import ResumePoint, pinned, read_segments
from rlcore.segment.spec import SegmentEnd, SegmentManifest, SegmentSpec, segment_path
from rlcore.segment.store import LocalCheckpointStore
from rlcore.training.run import TrainState

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.05
_RENEW_SECONDS = 1.0


class SavingPolicy(ProbePolicy, Protocol):
    """What a checkpoint needs of the policy; ``distributed.group.WorkerGroup`` is one."""

    def samplers_released(self) -> AbstractContextManager[None]:
        """Frees the memory of samplers on the same devices for the block."""

    def begin_save(self, folder: Path) -> None:
        """Copy the sharded train state (weights and optimizer) to host memory and start writing it in the background.
        Call it only when the previous save is ``saved``."""

    def saved(self) -> bool:
        """Whether the last ``begin_save`` has written everything. Raises its error. Callable from any thread."""


class Checkpointer:
    """The checkpoints of one trainer process.

    As a context manager it commits the checkpoint in progress on exit, unless the lease is lost.
    """

    def __init__(
        self,
        spec: SegmentSpec,
        store: LocalCheckpointStore,
        policy: SavingPolicy,
        probe: Probe,
        *,
        start: ResumePoint,
        seconds: CheckpointSeconds,
        lease: Lease,
        records: Callable[[], Sequence[StepRecord]],
    ) -> None:
        """
        Args:
            records: reads the metrics by which the best segments are chosen.
        """
        self._spec, self._store, self._policy, self._probe = spec, store, policy, probe
        self._last = start.checkpoint  # committed
        self._seconds, self._lease, self._records = seconds, lease, records
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[float] | None = None
        self._abandoned = False

    def begin(self, state: TrainState, end: SegmentEnd) -> None:
        """Copy the train state and return; the checkpoint of the segment is committed in the background.

        Raises:
            RlflowError: the previous checkpoint failed.
        """
        started = time.perf_counter()
        try:
            self.finish()
            if self._last is not None and self._last.step == state.step:  # no step since then: nothing to write
                self._end_segment(self._last, end)
                return
            staging = self._store.stage(state.step)
            with self._policy.samplers_released():  # the GPU may lack the memory for the policy next to them
                self._policy.begin_save(staging)
                self._probe.write(staging, self._policy)
            state.save(staging)
            self._under_way = self._thread.submit(self._write, staging, state.scalars(), end)
        finally:
            self._seconds.blocked += time.perf_counter() - started

    def check(self) -> None:
        """Raise the error of a checkpoint that failed in the background. Call at every safe point."""
        if self._under_way is not None and self._under_way.done():
            self._seconds.written += self._under_way.result()
            self._under_way = None

    def finish(self) -> None:
        """Wait until the checkpoint in progress is committed.

        Raises:
            LeaseLostError: another trainer has taken over.
            RlflowError: the checkpoint failed.
        """
        before = self._store.bytes_done()
        while self._under_way is not None and wait([self._under_way], _RENEW_SECONDS).not_done:
            now = self._store.bytes_done()
            self._lease.renew(progress=now != before)
            before = now
        self.check()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, LeaseLostError):
                return
            self.finish()
        except Exception as second:
            if error is None:
                raise
            if second is not error:  # the caller gets the first error
                logger.exception("the checkpoint under way was lost as well")
        finally:
            self._abandoned = True
            self._thread.shutdown()

    def _write(self, staging: Path, scalars: dict[str, Any], end: SegmentEnd) -> float:
        started = time.perf_counter()
        while not self._policy.saved():
            if self._abandoned:
                return 0.0
            time.sleep(_POLL_SECONDS)
        self._lease.renew()  # raises if another trainer has taken over: then nothing may be committed
        spec = self._spec
        checkpoint = self._store.commit(
            staging,
            step=scalars["step"],
            end=end,
            experiment_digest=spec.experiment.results_digest(),
            dataset_digest=spec.dataset.digest,
            model_digest=spec.model.digest,
            trainer_state=scalars,
        )
        self._lease.renew()
        self._end_segment(checkpoint, end)
        logger.info("step %d is committed, %.1f s after its copy", checkpoint.step, time.perf_counter() - started)
        run_dir = spec.run_dir
        kept = pinned(read_segments(run_dir), self._records(), spec.experiment.segment)
        self._store.prune(spec.experiment.segment.keep_checkpoints, pinned=kept)
        return time.perf_counter() - started

    def _end_segment(self, checkpoint: CheckpointRef, end: SegmentEnd) -> None:
        manifest = SegmentManifest(
            run_id=self._spec.run_id,
            **asdict(end),
            last_step=checkpoint.step,
            checkpoint=checkpoint,
            experiment_digest=self._spec.experiment.results_digest(),
            dataset_digest=self._spec.dataset.digest,
        )
        path = segment_path(self._spec.run_dir, end.segment)
        write_json_atomically(path, manifest.model_dump_json(indent=1))
        self._last = checkpoint
