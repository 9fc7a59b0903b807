"""Send committed steps, with the evaluations made while training, to MLflow and other trackers. An outage delays them;
it loses none and never stops training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from infra.errors import ServerError, ServerRefusedError
from infra.logs import get_logger
from infra.settings import Settings
from infra.tracking.extra import ExtraTracker, check_installed
from infra.tracking.names import RenamedStep, with_names
from infra.tracking.tracker import StepMetrics
from tasks.driver.outbox import Outbox, ending
from tasks.run import Run, existing_run, tracker_of

_FIRST_DELAY = 5.0
_LONGEST_DELAY = 300.0
_POLL_SECONDS = 0.2
_LAST_WAIT_SECONDS = 120.0  # for trackers other than MLflow, at the end of a run


class StepTracker(Protocol):
    """What a publisher needs of a tracker. ``publish`` may send in the background, up to ``published_step`` so far."""

    @property
    def published_step(self) -> int: ...
    def publish(self, records: Iterable[StepMetrics], through_step: int) -> int: ...


class Publisher:
    """Sends steps up to a committed one. After a failure the delay before the next try doubles."""

    def __init__(
        self,
        open_tracker: Callable[[], StepTracker],
        records: Callable[[], Iterable[StepMetrics]],
        *,
        name: str = "MLflow",
        wait_setting: str = "RLFLOW_TRACKING_WAIT_SECONDS",
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._open, self._records, self._now, self._sleep = open_tracker, records, now, sleep
        self._name, self._hint = name, f" ({wait_setting})" if wait_setting else ""
        self._tracker: StepTracker | None = None
        self._failures = 0
        self._next_try = now()

    def publish(self, through_step: int) -> None:
        """Send new steps unless a delay is running; an outage is logged as a warning."""
        if self._now() < self._next_try:
            return
        try:
            self._send(through_step)
        except ServerError as error:
            delay = self._postpone()
            get_logger().warning(
                "%s did not accept the steps up to %d; training continues, the next try is in %.0f s: %s",
                self._name, through_step, delay, error,
            )  # fmt: skip

    def publish_last(self, through_step: int, wait_seconds: float) -> None:
        """Send the rest, with retries for at most ``wait_seconds``.

        Raises:
            ServerError: not everything was sent in that time; the journal still has it.
        """
        deadline = self._now() + wait_seconds
        wanted = max((item.step for item in self._records() if item.step <= through_step), default=0)
        while True:
            try:
                if self._send(through_step) >= wanted:
                    return
                if self._now() >= deadline:
                    raise ServerError(f"{self._name} has not accepted the steps up to {through_step} yet.")
                self._sleep(_POLL_SECONDS)
            except ServerRefusedError:
                raise
            except ServerError as error:
                delay = min(self._postpone(), deadline - self._now())
                if delay <= 0:
                    raise ServerError(
                        f"{error} Tried for {wait_seconds:g} s{self._hint}. Nothing is lost: start the server and "
                        "continue the run."
                    ) from error
                get_logger().warning(
                    "%s did not accept the last steps, the next try is in %.0f s: %s", self._name, delay, error
                )
                self._sleep(delay)

    def _send(self, through_step: int) -> int:
        if self._tracker is None:
            self._tracker = self._open()
        published = self._tracker.published_step
        if through_step > published:
            published = self._tracker.publish(self._records(), through_step)
        if published >= through_step:
            self._failures = 0
        return published

    def _postpone(self) -> float:
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2**self._failures)
        self._failures += 1
        self._next_try = self._now() + delay
        return float(delay)


class Publishers:
    """MLflow and every tracker in ``RLFLOW_TRACKERS``; an outage of one does not delay the others."""

    def __init__(self, run: Run, settings: Settings) -> None:
        self._settings = settings

        def records() -> list[RenamedStep]:
            return with_names(run.published(), settings.metric_names)

        self._mlflow = Publisher(lambda: tracker_of(run, settings), records)
        self._extra: dict[str, ExtraTracker] = {
            name: ExtraTracker(
                name,
                settings,
                experiment=run.experiment.name,
                run_id=run.run_id,
                run_dir=run.run_dir,
                config=run.experiment.flat(),
            )
            for name in settings.trackers
        }
        self._publishers = {name: _publisher_of(name, tracker, records) for name, tracker in self._extra.items()}
        self._outbox = Outbox("steps")

    def publish(self, through_step: int) -> None:
        """Let a thread send the steps up to this one; a server that hangs blocks only that thread."""
        self._outbox.put("the newest steps", partial(self._publish, through_step))

    def _publish(self, through_step: int) -> None:
        for publisher in (self._mlflow, *self._publishers.values()):
            publisher.publish(through_step)

    def publish_last(self, through_step: int) -> None:
        """
        Raises:
            ServerError: MLflow did not accept the last steps. Other trackers only log a warning; they get the missing
                steps when the run is continued, or from ``rlflow publish RUN``.
        """
        self._outbox.flush()  # each of its requests has a bounded time
        self._publish(through_step)  # so that the other trackers start before the wait for MLflow
        self._mlflow.publish_last(through_step, self._settings.tracking_wait_seconds)
        for name, publisher in self._publishers.items():
            try:
                publisher.publish_last(through_step, _LAST_WAIT_SECONDS)
            except ServerError as error:
                get_logger().warning("%s The run is complete without it; %s may catch up later.", error, name)
            finally:
                self._extra[name].stop()  # after its last step only its interpreter is left to end

    def stop(self, wait_seconds: float | None = None) -> None:
        """Send the waiting steps and end the thread, at most after ``wait_seconds``; failed steps are left to the next
        run. Then end the trackers' processes."""
        self._outbox.close(wait_seconds)
        for tracker in self._extra.values():
            tracker.stop()


def _publisher_of(name: str, tracker: ExtraTracker, records: Callable[[], list[RenamedStep]]) -> Publisher:
    return Publisher(lambda: tracker, records, name=name, wait_setting="")


def publish_run(run_id: str, settings: Settings) -> None:
    """Send the committed steps of a run that MLflow or a named tracker lacks."""
    run = existing_run(run_id, settings)
    for name in settings.trackers:
        check_installed(name, settings.tracker_python)
    publishers = Publishers(run, settings)
    with ending(publishers.stop):
        publishers.publish_last(run.committed_step())
