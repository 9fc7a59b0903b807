"""Flow runs that ended long ago, in the Prefect server that is set. Prefect keeps all of them by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect import get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound

_ENDED = [StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED]
_PAGE = 200


def ended_flow_runs(older_than_days: float) -> Iterator[tuple[str, float]]:
    """Ids of flow runs that ended before so many days, and when they ended, in seconds since the epoch."""
    before = datetime.now(UTC) - timedelta(days=older_than_days)
    wanted = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=_ENDED)),
        end_time=FlowRunFilterEndTime(before_=before),
    )
    with get_client(sync_client=True) as client:
        offset = 0
        while page := client.read_flow_runs(flow_run_filter=wanted, limit=_PAGE, offset=offset):
            yield from ((str(run.id), run.end_time.timestamp()) for run in page if run.end_time is not None)
            offset += len(page)


def delete_flow_runs(names: Iterable[str]) -> int:
    """Delete flow runs with their task runs, logs and states. Returns how many were still there."""
    wanted, deleted = list(names), 0
    if not wanted:
        return 0
    with get_client(sync_client=True) as client:
        for name in wanted:
            try:
                client.delete_flow_run(UUID(name))
                deleted += 1
            except ObjectNotFound:
                continue
    return deleted
