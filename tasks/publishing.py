"""The journal's committed steps to MLflow: an outage costs a delay, never a step and never the training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from infra.errors import ServerError
from infra.logs import get_logger
from infra.tracking import StepMetrics

_FIRST_DELAY = 5.0
_LONGEST_DELAY = 300.0


class StepTracker(Protocol):
    """What a publisher needs of ``infra.tracking.Tracker``."""

    @property
    def published_step(self) -> int: ...
    def publish(self, records: Iterable[StepMetrics], through_step: int) -> int: ...


class Publisher:
    """Sends steps up to a committed one; after a failure it waits longer and longer before it asks MLflow again."""

    def __init__(
        self,
        open_tracker: Callable[[], StepTracker],
        records: Callable[[], Iterable[StepMetrics]],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._open, self._records, self._now, self._sleep = open_tracker, records, now, sleep
        self._tracker: StepTracker | None = None
        self._failures = 0
        self._next_try = now()

    def publish(self, through_step: int) -> None:
        """Send what is new, if it is time to; an outage is a warning."""
        if self._now() < self._next_try:
            return
        try:
            self._send(through_step)
        except ServerError as error:
            delay = self._postpone()
            get_logger().warning(
                "MLflow did not take the steps up to %d; training goes on, the next try is in %.0f s: %s",
                through_step, delay, error,
            )  # fmt: skip

    def publish_last(self, through_step: int, wait_seconds: float) -> None:
        """Send the rest, asking again for at most ``wait_seconds``.

        Raises:
            ServerError: MLflow did not take it in that time; the journal has it.
        """
        deadline = self._now() + wait_seconds
        while True:
            try:
                self._send(through_step)
                return
            except ServerError as error:
                delay = min(self._postpone(), deadline - self._now())
                if delay <= 0:
                    raise ServerError(
                        f"{error} Asked for {wait_seconds:g} s (RLFLOW_TRACKING_WAIT_SECONDS). Nothing is lost: start "
                        "the server and continue the run."
                    ) from error
                get_logger().warning("MLflow did not take the last steps, next try in %.0f s: %s", delay, error)
                self._sleep(delay)

    def _send(self, through_step: int) -> None:
        if self._tracker is None:
            self._tracker = self._open()
        if through_step > self._tracker.published_step:
            self._tracker.publish(self._records(), through_step)
        self._failures = 0

    def _postpone(self) -> float:
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2**self._failures)
        self._failures += 1
        self._next_try = self._now() + delay
        return float(delay)
