"""Events that automations of prefect.yaml wait for."""

from __future__ import annotations

import httpx
from prefect.events import emit_event
from prefect.exceptions import PrefectException

from infra.logs import get_logger
from rlcore.segment.spec import SegmentManifest
from tasks.runs import Run

CHECKPOINT_COMMITTED = "rlflow.checkpoint.committed"


def announce_checkpoint(run: Run, manifest: SegmentManifest) -> None:
    """Say that a segment has ended. Who misses it finds the checkpoint all the same: evaluate-latest has a schedule."""
    try:
        emit_event(
            CHECKPOINT_COMMITTED,
            resource={"prefect.resource.id": f"rlflow.run.{run.run_id}", "prefect.resource.name": run.run_id},
            payload={"experiment": run.experiment.name, "segment": manifest.segment, "step": manifest.last_step},
        )
    except (httpx.HTTPError, PrefectException) as error:
        get_logger().warning("Prefect does not take events for now: %s", error)
