"""Where a trainer ends its segments: the real loop and the real lease and control files, with updates that are written
down and a checkpointer that notes what it is given."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from rlcore.adjustments import Adjustments
from rlcore.config import ExperimentConfig
from rlcore.errors import PreemptedError
from rlcore.failures import EXIT_DONE, EXIT_PREEMPTED
from rlcore.jobs.segment import StopRequest, _segments_from
from rlcore.rollout.groups import Group
from rlcore.segment.health import HealthWatch
from rlcore.segment.lease import Control, Lease
from rlcore.segment.resume import ResumePoint
from rlcore.segment.spec import SegmentEnd
from rlcore.training.run import TrainState
from rlcore.types import Completion, Grader, Problem, Score
from tests.unit import toy_run as toy
from tests.unit.toy_run import with_updates

LONG = 3600.0


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """A ``StopRequest`` takes the signals over."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Noted:
    """In place of the checkpointer."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, SegmentEnd]] = []

    def check(self) -> None:
        return

    def begin(self, state: TrainState, end: SegmentEnd) -> None:
        self.ends.append((state.step, end))


def segments(
    tmp_path: Path,
    config: ExperimentConfig,
    *,
    deadline: float = LONG,
    on_batch: Callable[[Control, StopRequest], object] = lambda control, stop: None,
    grader: Callable[[StopRequest], Grader] | None = None,
) -> tuple[int, list[tuple[int, SegmentEnd]]]:
    """Exit code, and each checkpoint's step and segment."""
    lease, control = Lease(tmp_path / "lease.json"), Control(tmp_path / "control.json")
    lease.acquire("t")
    control.beat(99)
    stop = StopRequest(lease, control, deadline)
    run = with_updates(config, [0.1] * config.training.steps, tmp_path / "journal.jsonl")

    def told(step: int, generated: Sequence[Group], trained: Sequence[Group]) -> None:
        on_batch(control, stop)

    run = dataclasses.replace(run, on_batch=told)
    if grader is not None:
        run = dataclasses.replace(run, grader=grader(stop))
    checkpoints = Noted()
    start = ResumePoint(segment=0, first_step=0, checkpoint=None)
    health = HealthWatch((), (), Adjustments())
    code = _segments_from(start, TrainState(), run, stop, checkpoints, health, tmp_path)  # type: ignore[arg-type]
    return code, checkpoints.ends


def config(total: int, **segment: object) -> ExperimentConfig:
    return toy.config(training={"problems_per_batch": 4, "steps": total}, segment=segment)


def test_segments_end_after_their_steps_and_the_last_one_with_the_run(tmp_path: Path) -> None:
    code, ends = segments(tmp_path, config(5, steps=2))
    assert code == EXIT_DONE
    assert ends == [(2, SegmentEnd(0, 0, True)), (4, SegmentEnd(1, 2, True)), (5, SegmentEnd(2, 4, True))]


def test_a_segment_ends_at_the_first_batch_after_its_minutes(tmp_path: Path) -> None:
    """Minutes that are over when the first batch ends: each batch is a segment, which is whole, and the run goes on."""
    code, ends = segments(tmp_path, config(3, steps=3, max_minutes=1e-9))
    assert code == EXIT_DONE
    assert ends == [(1, SegmentEnd(0, 0, True)), (2, SegmentEnd(1, 1, True)), (3, SegmentEnd(2, 2, True))]


def test_minutes_that_are_not_over_end_no_segment(tmp_path: Path) -> None:
    code, ends = segments(tmp_path, config(3, steps=3, max_minutes=600))
    assert (code, ends) == (EXIT_DONE, [(3, SegmentEnd(0, 0, True))])


def test_a_trainer_whose_driver_has_gone_silent_commits_what_it_has_and_stops(tmp_path: Path) -> None:
    """With a deadline of 0 any silence is too long."""
    code, ends = segments(tmp_path, config(6, steps=6), deadline=0.0)
    assert code == EXIT_PREEMPTED
    assert all(step < 6 and not end.complete for step, end in ends)


def test_a_driver_that_falls_silent_in_the_middle_of_a_segment_ends_it_there(tmp_path: Path) -> None:
    batches = []

    def after(control: Control, stop: StopRequest) -> None:
        batches.append(None)
        if len(batches) == 2:
            stop._deadline = 0.0  # from here on any silence is too long
        else:
            control.beat(99)

    code, ends = segments(tmp_path, config(6, steps=6), on_batch=after)
    assert code == EXIT_PREEMPTED
    ((step, end),) = ends
    assert 2 <= step <= 3  # the next look may be the first one at this silence
    assert end == SegmentEnd(0, 0, False)


@pytest.mark.parametrize("how", ["signal", "control"])
def test_a_stop_that_is_asked_for_ends_the_segment_after_its_batch(tmp_path: Path, how: str) -> None:
    def after(control: Control, stop: StopRequest) -> None:
        signal.raise_signal(signal.SIGTERM) if how == "signal" else control.beat(99, stop=True)

    code, ends = segments(tmp_path, config(6, steps=6), on_batch=after)
    assert (code, ends) == (EXIT_PREEMPTED, [(1, SegmentEnd(0, 0, False))])


class Waiting(toy.Grader):
    """Answers at first. Then it waits, as for a judge that is away, and the trainer is told to stop."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__({})
        self.stop, self.groups = stop, 0

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        self.groups += len(problems) // 2
        if self.groups <= 4:
            return super().submit(problems, completions)
        self.stop.end_waiting()
        signal.raise_signal(signal.SIGTERM)
        future: Future[list[Score]] = Future()
        try:
            self.stop.end_waiting()
        except PreemptedError as error:
            future.set_exception(error)
        return future


def test_a_stop_that_ends_the_waiting_for_a_judge_commits_the_last_batch(tmp_path: Path) -> None:
    code, ends = segments(tmp_path, config(6, steps=6), grader=Waiting)
    assert (code, ends) == (EXIT_PREEMPTED, [(1, SegmentEnd(0, 0, False))])
