"""The trainer's process: segment after segment, each ending in a committed checkpoint, while the driver wants one.

Workers and engines stay up from one segment to the next, and a checkpoint is written while the next segment trains.
What counts is the manifest ``segments/0000.json``, written last, by one rename.
"""

from __future__ import annotations

import gc
import logging
import signal
import time
import traceback
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import ConfigError, DataError, DivergedError, LeaseLostError, StarvedError
from rlcore.job import JobError, write_json_atomically
from rlcore.segment.facts import code_digest
from rlcore.segment.journal import MetricJournal
from rlcore.segment.lease import Control, Lease
from rlcore.segment.resume import ResumePoint, find_resume_point, warn_of_changes
from rlcore.segment.spec import (
    EXIT_BAD_CONFIG,
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_OUT_OF_MEMORY,
    EXIT_PREEMPTED,
    SegmentEnd,
    SegmentSpec,
)
from rlcore.segment.store import LocalCheckpointStore

if TYPE_CHECKING:
    from rlcore.segment.checkpointing import Checkpointer, CheckpointSeconds
    from rlcore.training.loop import TrainingRun
    from rlcore.training.state import TrainState

logger = logging.getLogger(__name__)


class StopRequest:
    """Why the trainer should stop at the next safe point, if it should; renews the lease while it is asked."""

    def __init__(self, lease: Lease, control: Control, deadline_seconds: float) -> None:
        self._lease, self._control, self._deadline = lease, control, deadline_seconds
        self._signalled = False
        self.segment_ends_at: float | None = None  # time.monotonic()
        self.listen()

    def listen(self) -> None:
        """Take SIGTERM and SIGINT as a request to stop. Ray takes them over when it starts: call this again then."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._signalled = True

    def preempted(self) -> bool:
        """
        Raises:
            LeaseLostError: another trainer has taken over: stop without writing anything.
        """
        self._lease.renew()
        state = self._control.read()
        if self._signalled or state is None or state.stop:
            return True
        return time.time() - state.heartbeat > self._deadline

    def __call__(self) -> bool:
        out_of_time = self.segment_ends_at is not None and time.monotonic() >= self.segment_ends_at
        return self.preempted() or out_of_time

    def wants(self, segment: int) -> bool:
        """Whether the driver wants this segment; waits while it says nothing new but is alive."""
        while not self.preempted():
            state = self._control.read()
            if state is not None and state.through_segment >= segment:
                return True
            time.sleep(0.2)
        return False


def main(spec_path: Path) -> int:
    """Returns the process's exit code, one of ``rlcore.segment.spec``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    spec = SegmentSpec.model_validate_json(spec_path.read_text())
    lease = Lease(spec.run_dir / "lease.json")
    try:
        lease.acquire(uuid.uuid4().hex)
    except LeaseLostError as error:
        return _failed(spec, error, 1)
    try:
        stop = StopRequest(lease, Control(spec.run_dir / "control.json"), spec.driver_deadline_seconds)
        return _train_segments(spec, stop, lease)
    except DivergedError as error:
        return _failed(spec, error, EXIT_DIVERGED)
    except (ConfigError, DataError, StarvedError) as error:
        return _failed(spec, error, EXIT_BAD_CONFIG)
    except Exception as error:  # noqa: BLE001 - the process boundary: the driver gets the whole story
        return _failed(spec, error, EXIT_OUT_OF_MEMORY if _is_out_of_memory(error) else 1)
    finally:
        lease.release()


def _train_segments(spec: SegmentSpec, stop: StopRequest, lease: Lease) -> int:
    gc.disable()  # imports allocate much and free little; a third of their time would go to looking
    from rlcore.assemble import training_run
    from rlcore.models.canary import Canary
    from rlcore.segment.checkpointing import Checkpointer, CheckpointSeconds
    from rlcore.training.samples import SampleLog

    gc.enable()
    store = LocalCheckpointStore(spec.run_dir, spec.run_id)
    start = find_resume_point(spec.run_dir, store)
    logger.info("run %s from step %d, code %s", spec.run_id, start.step, code_digest())
    if start.checkpoint is not None:
        warn_of_changes(spec, start.checkpoint)
    journal = MetricJournal(spec.run_dir / "journal.jsonl")
    journal.cut(start.step)
    seconds = CheckpointSeconds()
    with training_run(
        spec.experiment,
        model=Path(spec.model.path),
        dataset=Path(spec.dataset.path),
        sink=TrainerSink(journal, seconds),
        on_batch=SampleLog(spec.run_dir / "samples"),
    ) as run:
        stop.listen()
        state = _restored(run, store, start)
        run.workers.sync_weights(state.step)
        canary = Canary.fixed(run.problems, Path(spec.model.path), spec.experiment)
        with Checkpointer(
            spec, store, run.workers, canary, start=start, seconds=seconds, renew_lease=lease.renew
        ) as checkpoints:
            return _segments_from(start, state, run, stop, checkpoints)


def _restored(run: TrainingRun, store: LocalCheckpointStore, start: ResumePoint) -> TrainState:
    """The state to go on from, its weights in the workers."""
    from rlcore.training.state import TrainState

    if start.checkpoint is None:
        return TrainState()
    folder, mask_truncated = Path(start.checkpoint.path), run.config.algorithm.mask_truncated
    run.workers.load(folder)
    return TrainState.load(folder, store.read_state(folder), run.problems, mask_truncated=mask_truncated)


def _segments_from(
    start: ResumePoint, state: TrainState, run: TrainingRun, stop: StopRequest, checkpoints: Checkpointer
) -> int:
    from rlcore.training.loop import train

    config = run.config
    segment, first_step = start.segment, start.first_step

    def should_stop() -> bool:
        checkpoints.check()
        return stop()

    while state.step < config.training.steps:
        if not stop.wants(segment):
            return EXIT_PREEMPTED
        until_step = min(first_step + config.segment.steps, config.training.steps)
        minutes = config.segment.max_minutes
        stop.segment_ends_at = time.monotonic() + 60 * minutes if minutes else None
        state = train(run, state, until_step=until_step, should_stop=should_stop)
        complete = state.step == until_step or not stop.preempted()
        checkpoints.begin(state, SegmentEnd(segment, first_step, complete))
        if not complete:
            return EXIT_PREEMPTED
        segment, first_step = segment + 1, state.step
    return EXIT_DONE


class TrainerSink:
    """Journals a step with what checkpoints have cost since the one before, and raises the alarm of promise 4 in the
    log."""

    def __init__(self, journal: MetricJournal, seconds: CheckpointSeconds) -> None:
        self._journal, self._seconds = journal, seconds

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics["rollout/mismatch_alarm"]:
            logger.warning(
                "step %d: sampler and trainer differ by %.4f nats per token on average. Compare the versions, dtype "
                "and attention of both; ratios and clipping are not to be trusted.",
                step,
                metrics["rollout/abs_delta_logprob_mean"],
            )
        self._journal.step(step, {**metrics, **self._seconds.take()})


def _failed(spec: SegmentSpec, error: Exception, code: int) -> int:
    report = JobError(kind=type(error).__name__, message=str(error), traceback=traceback.format_exc())
    write_json_atomically(spec.run_dir / "trainer_error.json", report.model_dump_json())
    logger.error("the trainer stops with exit code %d", code, exc_info=error)
    return code


def _is_out_of_memory(error: Exception) -> bool:
    return "OutOfMemoryError" in type(error).__name__ or "out of memory" in str(error)
