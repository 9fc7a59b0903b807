"""Retries of a flow's steps: outages as in docs/reliability.md, other failures as the step says."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from uuid import UUID

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from infra.errors import StorageAwayError
from infra.logs import get_logger
from infra.settings import Settings
from rlcore.failures import OUTAGES, Failure, policy_of
from tasks.driver.failures import failure_of
from tasks.driver.jobs import end_with_flow

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State, TaskRun

P = ParamSpec("P")
R = TypeVar("R")

_LOOK_SECONDS = 1.0
_MAX_RETRIES = 100  # more than any step may use: has_tries_left decides


class Tries:
    """The failed tries of one task run."""

    def __init__(self) -> None:
        self._failed: Counter[Failure] = Counter()
        self._next_at: float | None = None  # time.monotonic()

    def wait(self, name: str) -> None:
        """Before a try: wait for the rest of the delay after the last failure."""
        if self._next_at is not None and (left := self._next_at - time.monotonic()) > 0:
            get_logger().info("%s: the next try starts in %.0f s", name, left)
            while (left := self._next_at - time.monotonic()) > 0:
                end_with_flow()
                time.sleep(min(left, _LOOK_SECONDS))

    def failed(self, name: str, error: Exception, others: Sequence[float]) -> bool:
        """Count a failed try. Returns whether another one follows."""
        failure = failure_of(error)
        if failure is None or isinstance(error, StorageAwayError):
            return False
        known = policy_of(failure).delays
        delays: Sequence[float] = known if failure in OUTAGES or not known else others
        attempt = self._failed[failure]
        if attempt >= len(delays):
            return False
        self._failed[failure] += 1
        delay = delays[attempt] * Settings().retry_delay_scale
        self._next_at = time.monotonic() + delay
        get_logger().warning(
            "%s: %s, try %d of %d follows in %.0f s: %s", name, failure, attempt + 1, len(delays), delay, error
        )
        return True


_TRIES: dict[UUID, Tries] = {}


def step(
    name: str, *, others: Sequence[float] = (), timeout_seconds: float = 600, task_run_name: str | None = None
) -> Callable[[Callable[P, R]], Task[P, R]]:
    """A Prefect task without a cache that waits through outages of MLflow, Prefect and the store.

    Args:
        others: seconds to wait before each retry after another failure that ``rlcore/failures.py`` retries.
        timeout_seconds: limit of one try, to which the delay before it is added.
    """
    longest = max(delay for failure in OUTAGES for delay in policy_of(failure).delays)

    def has_tries_left(_task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
        return isinstance(state.data, Exception) and _TRIES.setdefault(run.id, Tries()).failed(name, state.data, others)

    def decorate(body: Callable[P, R]) -> Task[P, R]:
        @wraps(body)
        def attempt(*args: P.args, **kwargs: P.kwargs) -> R:
            context = TaskRunContext.get()
            if context is not None and context.task_run.id in _TRIES:
                _TRIES[context.task_run.id].wait(name)
            return body(*args, **kwargs)

        return task(
            name=name,
            task_run_name=task_run_name,
            cache_policy=NO_CACHE,
            persist_result=False,
            retries=_MAX_RETRIES,
            retry_condition_fn=has_tries_left,
            timeout_seconds=timeout_seconds + longest,
        )(attempt)

    return decorate
