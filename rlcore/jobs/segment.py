"""``python -m rlcore.jobs.segment spec.json``: the trainer. It trains segments for as long as the driver wants more.

Each segment ends in a committed checkpoint. Workers and engines stay up between segments, and a checkpoint is written
while the next segment trains. A segment is done once its manifest, ``segments/0000.json``, exists.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import CheckpointError, HealthError, LeaseLostError, PreemptedError, WorkerTraceback
from rlcore.evaluation.records import (
    cut_records,
    has_plateaued,
    journal_with_evaluations,
    read_records,
    suite_digest,
)
from rlcore.failures import EXIT_DONE, EXIT_PREEMPTED, EXIT_STORAGE, exit_code, with_free_space
from rlcore.files import write_json_atomically
from rlcore.jobs import spec_file
from rlcore.process import dump_on_signal, in_background
from rlcore.segment.health import HealthWatch
from rlcore.segment.journal import CheckpointSeconds, MetricJournal, read_journal
from rlcore.segment.lease import Control, Lease, Unchanged
from rlcore.segment.resume import ResumePoint, find_resume_point, warn_of_changes
from rlcore.segment.spec import SegmentEnd, SegmentSpec
from rlcore.segment.store import LocalCheckpointStore, check_files, code_digest, verify_checkpoint
from rlcore.specs import JobError

if TYPE_CHECKING:
    from rlcore.segment.checkpointing import Checkpointer
    from rlcore.training.run import TrainingRun, TrainState

logger = logging.getLogger("rlcore.jobs.segment")  # also where this file runs as __main__
_RENEW_SECONDS = 1.0


class StopRequest:
    """Decides whether the trainer stops at the next safe point. Each call renews the lease."""

    def __init__(
        self,
        lease: Lease,
        control: Control,
        deadline_seconds: float,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._lease, self._control, self._deadline = lease, control, deadline_seconds
        self._now, self._sleep = now, sleep
        self._heartbeat = Unchanged(now)
        self._signalled = False
        self._renewed = now()
        self._segment_ends_at: float | None = None
        self._segment_has_trained = False
        self.listen()

    def listen(self) -> None:
        """Treat SIGTERM and SIGINT as requests to stop. Ray replaces these handlers when it starts: call this again."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._signalled = True

    def progress(self) -> None:
        """Record that a phase is done. The driver treats a trainer without progress as stuck.

        Raises:
            LeaseLostError: another trainer has taken over: stop without writing anything.
        """
        if self._now() - self._renewed > _RENEW_SECONDS:  # a renewal writes to disk, and phases can be short
            self._renew()

    def _renew(self) -> None:
        self._lease.renew()
        self._renewed = self._now()

    def preempted(self) -> bool:
        """Whether the trainer got a signal, the driver asked it to stop, or the driver is silent for too long.

        Raises:
            LeaseLostError: another trainer has taken over: stop without writing anything.
        """
        self._renew()
        state = self._control.read()
        if self._signalled or state is None or state.stop:
            return True
        return self._heartbeat.seconds(state.heartbeat) > self._deadline

    def end_waiting(self) -> None:
        """Called while the trainer waits for GPUs that other runs use, or for a judge that does not answer. Both may
        take longer than a stop leaves it.

        Raises:
            PreemptedError: the trainer has to stop.
            LeaseLostError: another trainer has taken over: stop without writing anything.
        """
        if self.preempted():
            raise PreemptedError("the trainer was told to stop while it waited for GPUs or a judge. Continue the run.")

    def begin_segment(self, minutes: float | None) -> None:
        """Start the clock of a segment. It ends with the first batch that finishes after ``minutes``."""
        self._segment_ends_at = None if minutes is None else self._now() + 60 * minutes
        self._segment_has_trained = False

    def __call__(self) -> bool:
        """Whether to stop before the next batch."""
        # A segment trains at least one batch, or a short time limit would produce empty segments for ever.
        has_trained, self._segment_has_trained = self._segment_has_trained, True
        out_of_time = self._segment_ends_at is not None and self._now() >= self._segment_ends_at
        return self.preempted() or (has_trained and out_of_time)

    def wants(self, segment: int) -> bool:
        """Whether the driver wants this segment. Waits until it does, or until the trainer has to stop."""
        while not self.preempted():
            state = self._control.read()
            if state is not None and state.through_segment >= segment:
                return True
            self._sleep(0.2)
        return False


def main(spec_path: Path) -> int:
    """Returns the process's exit code, one of ``rlcore.failures``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    spec = SegmentSpec.model_validate_json(spec_path.read_text())
    lease = Lease(spec.run_dir / "lease.json")
    try:
        lease.acquire(uuid.uuid4().hex)
    except LeaseLostError as error:
        return _failed(spec, error)
    try:
        shutil.rmtree(live_stacks(spec.run_dir), ignore_errors=True)  # left by the previous trainer
        dump_on_signal(live_stacks(spec.run_dir), "trainer", os.getpid())
        stop = StopRequest(lease, Control(spec.run_dir / "control.json"), spec.driver_deadline_seconds)
        return _train_segments(spec, stop, lease)
    except Exception as error:  # noqa: BLE001 - the process boundary: the driver gets every failure
        return _failed(spec, error)
    finally:
        try:
            lease.release()
        except OSError:  # harmless: the lease of a dead holder blocks nobody
            logger.exception("the lease file cannot be removed")


def _train_segments(spec: SegmentSpec, stop: StopRequest, lease: Lease) -> int:
    from rlcore.distributed.cluster import claim_for  # imports Ray, as assemble does
    from rlcore.segment.batch_log import write_batch
    from rlcore.training.assemble import training_run

    store = LocalCheckpointStore(spec.run_dir, spec.run_id)
    journal, seconds = MetricJournal(spec.run_dir / "journal.jsonl"), CheckpointSeconds()
    start = find_resume_point(spec.run_dir, store, check=check_files)
    health = _continue_from(start, spec, journal)
    hashing = in_background(partial(_is_whole, start))  # meanwhile Ray and the engines start
    claim_for(spec.experiment, waiting=stop.end_waiting)
    with training_run(
        spec.adjustments.applied_to(spec.experiment),
        model=Path(spec.model.path),
        dataset=Path(spec.dataset.path),
        sink=TrainerSink(journal, seconds, health),
        on_batch=partial(write_batch, spec.run_dir),
        on_progress=stop.progress,
        on_retry=stop.end_waiting,
        adjustments=spec.adjustments,
        run_dir=spec.run_dir,
        stacks=live_stacks(spec.run_dir),
        teacher=None if spec.teacher is None else Path(spec.teacher.path),
    ) as run:
        from rlcore.data.probe import Probe
        from rlcore.segment.checkpointing import Checkpointer

        stop.listen()
        if not hashing.result():
            start = find_resume_point(spec.run_dir, store)  # moves the damaged checkpoint aside
            health = _continue_from(start, spec, journal)
            run = replace(run, sink=TrainerSink(journal, seconds, health))
        state = _restored(run, store, start)
        run.workers.sync_weights(state.step)
        logger.info("the sampler has the weights of step %d", state.step)
        probe = Probe.of(run.problems, run.workers)
        run = _with_validation(run, spec, stop)
        records = partial(journal_with_evaluations, spec.run_dir)
        with Checkpointer(
            spec, store, run.workers, probe, start=start, seconds=seconds, lease=lease, records=records
        ) as checkpoints:
            return _segments_from(start, state, run, stop, checkpoints, health, spec.run_dir)


def _continue_from(start: ResumePoint, spec: SegmentSpec, journal: MetricJournal) -> HealthWatch:
    """Cut the journal and the records of evaluations to the steps of the checkpoint. Returns the watch over what is
    left of the journal."""
    logger.info("run %s from step %d, code %s", spec.run_id, start.step, code_digest())
    if start.checkpoint is not None:
        warn_of_changes(spec, start.checkpoint)
    journal.cut(start.step)
    cut_records(spec.run_dir, start.step)
    return HealthWatch(spec.experiment.health, read_journal(spec.run_dir / "journal.jsonl"), spec.adjustments)


def _is_whole(start: ResumePoint) -> bool:
    """Whether the files of the checkpoint have the hashes of its manifest."""
    try:
        if start.checkpoint is not None:
            verify_checkpoint(start.checkpoint)
    except CheckpointError:  # find_resume_point reports it
        return False
    return True


def _with_validation(run: TrainingRun, spec: SegmentSpec, stop: StopRequest) -> TrainingRun:
    """The run with its validation problems, if it has any and evaluates while it trains."""
    from rlcore.data.table import load_problems
    from rlcore.evaluation.validation import Validation

    if spec.validation is None or spec.experiment.evaluation.every_steps is None:
        return run
    dataset = Path(spec.validation.path)
    run.workers.add_images(dataset)
    validation = Validation(
        config=spec.experiment.evaluation,
        problems=load_problems(dataset),
        sampler=run.workers,
        grader=run.grader,
        run_dir=spec.run_dir,
        suite=suite_digest(spec.experiment, spec.validation, spec.model),
        dataset_digest=spec.validation.digest,
        should_stop=stop.preempted,
    )
    return replace(run, validate=validation.evaluate)


def _restored(run: TrainingRun, store: LocalCheckpointStore, start: ResumePoint) -> TrainState:
    """The train state to continue from. Loads its weights into the workers."""
    from rlcore.training.run import TrainState

    if start.checkpoint is None:
        return TrainState()
    folder, mask_truncated = Path(start.checkpoint.path), run.config.algorithm.mask_truncated
    run.workers.load(folder)
    logger.info("the workers have loaded the checkpoint of step %d", start.step)
    return TrainState.load(folder, store.read_state(folder), run.problems, mask_truncated=mask_truncated)


def _segments_from(
    start: ResumePoint,
    state: TrainState,
    run: TrainingRun,
    stop: StopRequest,
    checkpoints: Checkpointer,
    health: HealthWatch,
    run_dir: Path,
) -> int:
    from rlcore.training.loop import train

    config = run.config
    segment, first_step = start.segment, start.first_step

    def should_stop() -> bool:
        checkpoints.check()
        return health.broken() or stop()

    def plateaued() -> bool:
        return has_plateaued(read_records(run_dir), config.evaluation.patience)

    if state.step == 0 or config.evaluation.is_due(state.step - config.training.steps_per_batch, state.step):
        run.validate(state.step)  # a trainer that had to stop may have left it out
    while state.step < config.training.steps and not (state.step == first_step and plateaued()):
        if not stop.wants(segment):
            return EXIT_PREEMPTED
        until_step = min(first_step + config.segment.steps, config.training.steps)
        stop.begin_segment(config.segment.max_minutes)
        state = train(run, state, until_step=until_step, should_stop=should_stop)
        pause = health.pause_or_raise() if state.step < config.training.steps else None
        complete = pause is None and (state.step == until_step or not stop.preempted())
        last = state.step == config.training.steps
        if complete and config.evaluation.is_due_at_segment_end(last=last):
            # Before the commit, so that the segment's end is published with its evaluation. A trainer that has to stop
            # leaves it to the next one, and after the last step to the flow.
            complete = run.validate(state.step) or last
        checkpoints.begin(state, SegmentEnd(segment, first_step, complete))
        if pause is not None:
            raise HealthError(pause)  # the Checkpointer commits this checkpoint when it closes
        if not complete:
            return EXIT_PREEMPTED
        segment, first_step = segment + 1, state.step
    return EXIT_DONE


class TrainerSink:
    """Journals each step, with the time that checkpoints took since the last one. Warns when sampler and trainer
    disagree (promise 4)."""

    def __init__(self, journal: MetricJournal, seconds: CheckpointSeconds, health: HealthWatch) -> None:
        self._journal, self._seconds, self._health = journal, seconds, health

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics["rollout/mismatch_alarm"]:
            logger.warning(
                "step %d: sampler and trainer differ by %.4f nats per token on average. Compare the versions, dtype "
                "and attention of both; ratios and clipping are not to be trusted.",
                step,
                metrics["rollout/abs_delta_logprob_mean"],
            )
        metrics = {**metrics, **self._seconds.take()}
        self._journal.step(step, metrics)
        self._health.step(step, metrics)


def _failed(spec: SegmentSpec, error: Exception) -> int:
    """Write ``error`` to trainer_error.json and return the exit code. A storage error deletes staged checkpoints, which
    frees space."""
    code, reported = exit_code(error), error
    if code == EXIT_STORAGE:
        for staged in (spec.run_dir / "checkpoints").glob(".staging-*"):
            shutil.rmtree(staged, ignore_errors=True)
        reported = with_free_space(error, spec.run_dir)
    where = str(error.__cause__) if isinstance(error.__cause__, WorkerTraceback) else traceback.format_exc()
    report = JobError(kind=type(reported).__name__, message=str(reported), traceback=where)
    logger.error("the trainer stops with exit code %d", code, exc_info=error)
    try:
        write_json_atomically(spec.run_dir / "trainer_error.json", report.model_dump_json())
    except OSError:
        logger.exception("the error report cannot be written: only the exit code and this log tell what happened")
    return code


def live_stacks(run_dir: Path) -> Path:
    """Where the processes of the running trainer write their stack traces."""
    return run_dir / "stacks" / "live"


if __name__ == "__main__":
    sys.exit(main(spec_file("rlcore.jobs.segment")))
