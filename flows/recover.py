"""recover: look at every unfinished run, and bring back those that died. Started by a schedule and by automations."""

from __future__ import annotations

from prefect import flow

from infra.processes import alone
from infra.settings import Settings
from tasks.recovery.act import recover_runs, show


@flow(name="recover")
def recover() -> None:
    """Safe at any moment and as often as one likes: a living run is left, two at once act as one."""
    with alone(Settings(), "recover") as mine:
        if mine:
            show(recover_runs())
