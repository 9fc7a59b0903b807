"""Publishing through an outage of MLflow."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from infra.errors import ServerError
from infra.tracking.tracker import StepMetrics
from rlcore.segment.journal import StepRecord
from tasks.driver.publish import Publisher


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Tracker:
    """Away until ``back_at``."""

    def __init__(self, clock: Clock, back_at: float) -> None:
        self.clock, self.back_at = clock, back_at
        self.published_step = 0
        self.asked: list[float] = []

    def publish(self, records: Iterable[StepMetrics], through_step: int) -> int:
        self.asked.append(self.clock.now)
        if self.clock.now < self.back_at:
            raise ServerError("away.")
        self.published_step = through_step
        return through_step


def wired(back_at: float) -> tuple[Publisher, Tracker, Clock]:
    clock = Clock()
    tracker = Tracker(clock, back_at)
    return Publisher(lambda: tracker, list, now=clock, sleep=clock.sleep), tracker, clock


def test_ticks_ask_less_and_less_often_and_catch_up() -> None:
    publisher, tracker, clock = wired(back_at=40)
    for second in range(120):
        clock.now = float(second)
        publisher.publish(1 + second // 10)
    assert tracker.asked[:4] == [0, 5, 15, 35]
    assert tracker.asked[4] == 75  # it is back, with all of what was missed
    assert tracker.published_step == 12


def test_the_last_publish_waits_for_the_server() -> None:
    publisher, tracker, clock = wired(back_at=30)
    publisher.publish_last(7, wait_seconds=60)
    assert tracker.published_step == 7
    assert clock.slept == [5, 10, 20]


def test_the_last_publish_gives_up_at_its_bound() -> None:
    publisher, tracker, clock = wired(back_at=1e9)
    with pytest.raises(ServerError, match=r"away\. Tried for 60 s \(RLFLOW_TRACKING_WAIT_SECONDS\)"):
        publisher.publish_last(7, wait_seconds=60)
    assert clock.now == 60
    assert tracker.published_step == 0


def test_a_server_that_is_away_at_the_start_is_an_outage_too() -> None:
    def away() -> Tracker:
        raise ServerError("no server")

    Publisher(away, list).publish(3)
    with pytest.raises(ServerError, match="no server"):
        Publisher(away, list).publish_last(3, wait_seconds=0)


def test_a_tracker_that_is_slower_than_the_journal_is_asked_again_until_its_bound() -> None:
    clock = Clock()

    class Slow:
        """Takes one step at a time."""

        published_step = 0

        def publish(self, records: Iterable[StepMetrics], through_step: int) -> int:
            self.published_step += 1
            return self.published_step

    records = [StepRecord(step, 0, {}) for step in range(1, 9)]
    publisher = Publisher(Slow, lambda: records, name="tensorboard", now=clock, sleep=clock.sleep)
    publisher.publish_last(5, 10)
    assert clock.slept == [0.2] * 4
    with pytest.raises(ServerError, match=r"^tensorboard has not accepted the steps up to 8 yet\. Tried for 0 s"):
        publisher.publish_last(8, 0)
