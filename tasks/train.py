"""The segment task: return a committed segment, follow a running trainer, or start one.

The manifest in the run's folder decides, never Prefect's state, so a retry, a re-run and a second worker all do the
right thing. The trainer is a separate process and continues into the next segment by itself.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from infra import environment, processes
from infra.files import locked
from infra.logs import get_logger
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef, DatasetRef, ModelRef
from rlcore.errors import CheckpointError, RlflowError
from rlcore.failures import error_of_exit
from rlcore.files import remove_abandoned, write_json_atomically
from rlcore.segment.health import Breach
from rlcore.segment.lease import holder_alive, lease_at
from rlcore.segment.resume import best_first
from rlcore.segment.spec import SegmentManifest, SegmentSpec, segment_path
from rlcore.segment.store import move_aside, verify_checkpoint
from rlcore.specs import JobError
from tasks.driver.failures import handle_failures, read_adjustments, wait_for_next_try
from tasks.driver.health import HangWatch, HealthWarnings, announce_on_prefect, end_stuck_trainer
from tasks.driver.jobs import UNKNOWN_EXIT, describe_exit, error_from, tell_shortage, worth_retrying
from tasks.driver.mirror import safe_step, wait_until_mirrored
from tasks.driver.outbox import Heartbeat, Outbox, ending
from tasks.driver.progress import TrainingProgress, announce_checkpoint
from tasks.driver.publish import Publishers
from tasks.run import Run
from tasks.store.restore import restore_checkpoint
from tasks.traces import log_rollouts

_TICK_SECONDS = 1.0
_PAGE_SECONDS = 5.0
_LAST_EXIT_SECONDS = 60.0  # to shut down engines and Ray after the last segment
_CLEAN_EXIT_SECONDS = 8.0  # the same after a requested commit
_LEASE_SECONDS = 60.0  # until a started trainer holds the lease, on a busy machine
_TRACEBACK_LINES = 12
_HEADING = "=== trainer started "  # in the log, which all trainers of a run share
_MAX_RETRIES = 100  # more than rlcore/failures.py allows, whose counts decide


@task(
    task_run_name="segment-{index}",
    cache_policy=NO_CACHE,
    retries=_MAX_RETRIES,
    retry_condition_fn=worth_retrying,
)
def train_segment(
    run: Run,
    dataset: DatasetRef,
    model: ModelRef,
    index: int,
    validation: DatasetRef | None = None,
    teacher: ModelRef | None = None,
) -> SegmentManifest:
    """Return the manifest of segment ``index`` once it is committed, and publish its steps to MLflow.

    Args:
        validation: the problems on which the trainer evaluates while it trains. None: it does not evaluate.
        teacher: the model of algorithm.teacher.

    ``rlcore/failures.py`` says which failure is retried, when, and with what change.

    Raises:
        RlflowError: the trainer ended before it committed the segment; its own error, or one for its exit code.
        ServerError: MLflow did not accept the last steps of the run.
    """
    settings = Settings()
    if (task_run.run_count or 0) > 1:
        wait_for_next_try(run)
    with handle_failures(run, settings):
        return _train(run, settings, _Inputs(dataset, model, validation, teacher), index)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a trainer reads."""

    dataset: DatasetRef
    model: ModelRef
    validation: DatasetRef | None
    teacher: ModelRef | None


def _train(run: Run, settings: Settings, inputs: _Inputs, index: int) -> SegmentManifest:
    links = _links_of(run, settings)
    page, publishers = links.page, links.publishers

    def announce(run: Run, breach: Breach, consequence: str) -> None:
        page.put(f"the health of step {breach.step}", partial(announce_on_prefect, run, breach, consequence))

    warnings = HealthWarnings(run, read_adjustments(run), announce)
    restore_checkpoint(run.run_dir, settings)
    manifest_or_trainer = _find_or_start(run, settings, inputs, index)
    if isinstance(manifest_or_trainer, SegmentManifest):
        manifest = manifest_or_trainer
    else:
        trainer = manifest_or_trainer
        with (
            _stop_on_interrupt(run, trainer, index, settings),
            TrainingProgress(run.experiment, page) as progress,
        ):
            manifest = _follow(run, trainer, index, lambda: _tick(run, settings, publishers, progress, warnings))
        announce_checkpoint(run, manifest)
        page.put("the rollouts", partial(log_rollouts, run, settings))
    warnings.tell(run.journal())
    if run.ends_with(manifest):
        _wait_for_end(run, index)
        wait_until_mirrored(run, manifest.last_step, settings)
        publishers.publish_last(manifest.last_step)
    else:
        publishers.publish(safe_step(run, settings))
    get_logger().info("train: segment %d committed at step %d", manifest.segment, manifest.last_step)
    return manifest


@contextmanager
def link_trainer(run: Run) -> Iterator[list[SegmentManifest]]:
    """Around the loop over a run's segments; yields the list that the loop fills.

    The run's threads end however training ends. After an error between two segments the trainer that this driver
    follows commits and stops.
    """
    segments: list[SegmentManifest] = []
    with ending(partial(_end_links, run)):
        try:
            yield segments
        except BaseException:
            trainer = _FOLLOWED.get(run.run_dir)
            if trainer is None or trainer.exit_code() is not None:
                raise
            with _stop_on_interrupt(run, trainer, len(segments), Settings()):
                raise


def is_trained(run: Run, segments: Sequence[SegmentManifest]) -> bool:
    """Whether the last step is committed. Time may end a segment early and ``evaluation.patience`` the run, so the
    number of segments is not fixed."""
    return bool(segments) and run.ends_with(segments[-1])


def checkpoint_to_merge(run: Run, segments: Sequence[SegmentManifest]) -> CheckpointRef:
    """The checkpoint that ``segment.merge`` names. The last one also if no segment has ``segment.best_metric``."""
    config = run.experiment.segment
    there = [segment for segment in segments if Path(segment.checkpoint.path).is_dir()]
    best = best_first(there, run.published(), config) if config.merge == "best" else []
    return (best or segments[-1:])[0].checkpoint


def train_all_segments(
    run: Run,
    dataset: DatasetRef,
    model: ModelRef,
    validation: DatasetRef | None = None,
    teacher: ModelRef | None = None,
) -> list[SegmentManifest]:
    """The loop of ``flows/train_grpo.py`` in one call."""
    with link_trainer(run) as segments:
        while not is_trained(run, segments):
            segments.append(train_segment(run, dataset, model, len(segments), validation, teacher))
    return segments


@dataclass(frozen=True, slots=True)
class Links:
    """The driver's threads: heartbeat to the trainer, messages to Prefect, metrics to MLflow."""

    heart: Heartbeat
    page: Outbox
    publishers: Publishers

    def end(self, wait_seconds: float | None) -> None:
        """Stop all threads. Prefect gets at most a few seconds; MLflow gets ``wait_seconds``, None: no limit."""
        self.heart.end()
        self.page.close(_PAGE_SECONDS if wait_seconds is None else wait_seconds)
        self.publishers.stop(wait_seconds)


# By run folder. They outlive a segment's task, because the trainer continues between two tasks.
_LINKS: dict[Path, Links] = {}


def _links_of(run: Run, settings: Settings) -> Links:
    if run.run_dir not in _LINKS:
        heart = Heartbeat(run.run_dir / "control.json")
        _LINKS[run.run_dir] = Links(heart, Outbox("page"), Publishers(run, settings))
    return _LINKS[run.run_dir]


def _end_links(run: Run, wait_seconds: float | None) -> None:
    if (links := _LINKS.pop(run.run_dir, None)) is not None:
        links.end(wait_seconds)


@dataclass(frozen=True, slots=True)
class Trainer:
    """A running trainer: a child of this process, or one that another driver started."""

    pid: int
    lease: Path
    child: subprocess.Popen[bytes] | None
    elsewhere: str = ""  # its host, if that is not this one

    def exit_code(self) -> int | None:
        """None while it runs. UNKNOWN_EXIT: it has ended, and only its parent knows the exit code."""
        if self.child is not None:
            return self.child.poll()
        return None if holder_alive(self.lease) else UNKNOWN_EXIT


# By run folder: the trainer that this driver started or found. Remembered between tasks, because only the parent can
# read a child's exit code, and because a driver stops no other trainer than this one.
_FOLLOWED: dict[Path, Trainer] = {}


def _running(run: Run) -> Trainer | None:
    """The living trainer of this run, or None."""
    lease = run.run_dir / "lease.json"
    followed = _FOLLOWED.get(run.run_dir)
    if followed is not None and followed.child is not None and followed.exit_code() is None:
        return followed
    holder = holder_alive(lease)
    if holder is None:
        return None
    return Trainer(holder.pid, lease, None, elsewhere="" if holder.is_here else holder.host)


def _find_or_start(run: Run, settings: Settings, inputs: _Inputs, index: int) -> SegmentManifest | Trainer:
    """The segment's manifest if the segment is complete, else the running trainer, else a new one.

    Of several drivers of this machine that find no trainer, the first starts one and the others follow it.

    Raises:
        RlflowError: our trainer has failed since the last segment; the next try starts another.
    """
    remove_abandoned(run.run_dir)  # of killed flows and trainers
    with _only_driver(run):
        trainer = _running(run)  # read before the manifest, because a trainer commits before it ends
        manifest = run.manifest(index)
        if manifest is not None and manifest.complete and (trainer is not None or _verify_last(run, manifest)):
            return manifest
        if trainer is None:
            # A killed trainer leaves daemons that hold memory, which the next one needs.
            processes.kill(run.trainer_mark)
            ended = _FOLLOWED.pop(run.run_dir, None)
            if ended is not None and ended.child is not None and (code := ended.exit_code()):
                raise _failure(run, code)
            lease_at(run.run_dir / "lease.json").remove_dead()
            trainer = _start(run, settings, inputs, index)
            _wait_for_lease(trainer)  # until then, other drivers do not see it
        elif trainer.child is None:
            _FOLLOWED[run.run_dir] = trainer
            get_logger().info("train: follow the trainer that is running already, pid %d", trainer.pid)
    return trainer


def _verify_last(run: Run, manifest: SegmentManifest) -> bool:
    """Whether the manifest still counts. The last checkpoint is verified here, because no trainer will resume from it
    and verify it. If it is damaged, its manifest is moved aside."""
    if not run.ends_with(manifest):
        return True
    try:
        verify_checkpoint(manifest.checkpoint)
    except CheckpointError as error:
        aside = move_aside(segment_path(run.run_dir, manifest.segment))
        get_logger().warning(
            "train: SEGMENT %d IS NO LONGER DONE and its manifest is moved to %s: %s",
            manifest.segment, aside.name, error,
        )  # fmt: skip
        return False
    return True


def _only_driver(run: Run) -> AbstractContextManager[bool]:
    """Around a decision to start a trainer or to kill what a dead one left, among the drivers of this machine."""
    return locked(run.run_dir / "trainer.lock")


def _wait_for_lease(trainer: Trainer) -> None:
    deadline = time.monotonic() + _LEASE_SECONDS
    while trainer.exit_code() is None and holder_alive(trainer.lease) is None and time.monotonic() < deadline:
        time.sleep(_TICK_SECONDS / 20)


def _start(run: Run, settings: Settings, inputs: _Inputs, index: int) -> Trainer:
    spec = SegmentSpec(
        run_id=run.run_id,
        run_dir=run.run_dir,
        experiment=run.experiment,
        dataset=inputs.dataset,
        model=inputs.model,
        validation=inputs.validation,
        teacher=inputs.teacher,
        adjustments=read_adjustments(run),
        driver_deadline_seconds=settings.driver_deadline_seconds,
    )
    spec_path = run.run_dir / "spec.json"
    write_json_atomically(spec_path, spec.model_dump_json(indent=1))
    (run.run_dir / "trainer_error.json").unlink(missing_ok=True)
    if not settings.ray_address:
        tell_shortage("train", run.experiment, run.experiment.resources.devices, settings)
    _beat(run, index)
    where = f"from step {step}" if (step := run.committed_step()) else "from the start"
    with (run.run_dir / "trainer.log").open("ab") as log:
        log.write(f"\n{_HEADING}{where}, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC ===\n".encode())
        log.flush()
        child = processes.start(
            [str(settings.trainer_python), "-m", "rlcore.jobs.segment", str(spec_path)],
            env=environment.for_jobs(settings),
            mark=run.trainer_mark,
            output=log,
            ends_with_parent=False,  # it outlives a killed driver, and the next driver follows it
        )
    trainer = _FOLLOWED[run.run_dir] = Trainer(child.pid, run.run_dir / "lease.json", child)
    get_logger().info("train: started a trainer %s (log: %s)", where, run.run_dir / "trainer.log")
    return trainer


def _follow(run: Run, trainer: Trainer, index: int, tick: Callable[[], None]) -> SegmentManifest:
    watch = HangWatch(trainer.lease, run.experiment.segment.hang_minutes)
    _beat(run, index)
    while True:
        code = trainer.exit_code()  # read before the manifest, because a trainer commits before it ends
        manifest = run.manifest(index)
        if manifest is not None and manifest.complete:
            return manifest
        if code is not None:
            raise _failure(run, code)
        if watch.stuck():
            raise end_stuck_trainer(run.run_dir, run.trainer_mark, run.experiment.segment.hang_minutes)
        tick()
        time.sleep(_TICK_SECONDS)


def _tick(
    run: Run, settings: Settings, publishers: Publishers, progress: TrainingProgress, warnings: HealthWarnings
) -> None:
    records = run.journal()
    progress.show(records)
    warnings.tell(records)
    publishers.publish(safe_step(run, settings))


def _wait_for_end(run: Run, index: int) -> None:
    """After the last segment: let the trainer shut down its workers, then kill what is left."""
    deadline = time.monotonic() + _LAST_EXIT_SECONDS
    try:
        while _running(run) is not None and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS / 4)
    finally:
        processes.kill(run.trainer_mark)
        _FOLLOWED.pop(run.run_dir, None)


@contextmanager
def _stop_on_interrupt(run: Run, trainer: Trainer, index: int, settings: Settings) -> Iterator[None]:
    """If the wait ends early (Ctrl-C, cancel, an error), let the trainer commit, then kill it. A trainer on another
    machine goes on for that machine's driver; without one it commits and stops by itself."""
    try:
        yield
    except BaseException as reason:
        alive = trainer.exit_code() is None
        if alive and trainer.elsewhere:
            get_logger().warning("train: %s; the trainer goes on, on %s", type(reason).__name__, trainer.elsewhere)
            raise
        try:
            if alive:
                get_logger().warning(
                    "train: %s; the trainer commits and stops (at most %.0f s, Ctrl-C again: at once)",
                    type(reason).__name__,
                    settings.stop_grace_seconds,
                )
                _ask_to_stop(run, trainer, index, settings.stop_grace_seconds)
        finally:
            _kill_rest(run, trainer)
        raise


def _kill_rest(run: Run, trainer: Trainer) -> None:
    """Kill the trainer, if it lives, and what it left. Leave the next one alone, which another driver has started."""
    with _only_driver(run):
        holder = holder_alive(trainer.lease)
        if holder is None or holder.pid == trainer.pid:
            processes.kill(run.trainer_mark)
    _FOLLOWED.pop(run.run_dir, None)


def _ask_to_stop(run: Run, trainer: Trainer, index: int, grace_seconds: float) -> None:
    """Ask the trainer to stop, and wait until its uncommitted steps are committed.

    Through the control file, not SIGTERM: while Ray starts, its own signal handler would end the trainer at once.
    """
    _beat(run, index, stop=True)
    deadline = time.monotonic() + grace_seconds
    if not _has_uncommitted_steps(run):
        return
    while _has_uncommitted_steps(run) and trainer.exit_code() is None and time.monotonic() < deadline:
        time.sleep(_TICK_SECONDS / 4)
    deadline = min(deadline, time.monotonic() + _CLEAN_EXIT_SECONDS)
    while trainer.exit_code() is None and time.monotonic() < deadline:  # its own shutdown of Ray is cleaner than a kill
        time.sleep(_TICK_SECONDS / 4)


def _has_uncommitted_steps(run: Run) -> bool:
    records = run.journal()
    return bool(records) and records[-1].step > run.committed_step()


def _failure(run: Run, code: int) -> RlflowError:
    """The error to raise for a trainer that ended early: from its own report, else from its exit code."""
    log = run.run_dir / "trainer.log"
    path = run.run_dir / "trainer_error.json"
    if path.exists():
        report = JobError.model_validate_json(path.read_text())
        tail = "\n".join(report.traceback.strip().splitlines()[-_TRACEBACK_LINES:])
        error = error_from(report, f"the trainer ended with {describe_exit(code)}")
        return type(error)(f"{tail}\n\n{error}\nThe trainer's log: {log}")
    known = error_of_exit(code, describe_exit(code))
    return type(known)(f"{last_words(log)}\n\n{known}. The trainer's log: {log}")


def last_words(log: Path) -> str:
    """The last lines of the log that the newest trainer wrote; empty if it wrote none."""
    if not log.exists():
        return ""
    lines = log.read_text(errors="replace").strip().splitlines()
    since = max((number for number, line in enumerate(lines, 1) if line.startswith(_HEADING)), default=0)
    return "\n".join(lines[since:][-_TRACEBACK_LINES:])


def _beat(run: Run, index: int, *, stop: bool = False) -> None:
    """Tell the trainer that its driver lives and wants this segment and the next, so that it need not wait."""
    _links_of(run, Settings()).heart.want(index + 1, stop=stop)
