"""recover: look at every unfinished run and restart those that died. Started by a schedule and by automations."""

from __future__ import annotations

from prefect import flow

from infra.processes import alone
from infra.settings import Settings
from tasks.recovery.act import recover_runs, show_decisions


@flow(name="recover")
def recover() -> None:
    """Safe to start at any moment: it leaves living runs alone, and only one runs at a time over a data folder."""
    with alone(Settings(), "recover") as mine:
        if mine:
            show_decisions(recover_runs())
