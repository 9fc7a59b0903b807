"""Tell people what the health rules found: an event, and a page that says why."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event

from infra.logs import get_logger
from rlcore.adjustments import Adjustments
from rlcore.files import write_json_atomically
from rlcore.segment.health import Breach, breaches
from rlcore.segment.journal import StepRecord
from tasks.driver.outbox import PREFECT_ERRORS, prefect_asked_once
from tasks.run import Run

Announce = Callable[[Run, Breach, str], None]


def announce_on_prefect(run: Run, breach: Breach, consequence: str) -> None:
    """An event ``rlflow.health.ACTION`` of the run, and the artifact EXPERIMENT-health."""
    get_logger().warning("health: %s. %s", breach, consequence)
    try:
        emit_event(
            f"rlflow.health.{breach.rule.action}",
            resource={"prefect.resource.id": f"rlflow.run.{run.run_id}", "prefect.resource.name": run.run_id},
            payload={
                "rule": str(breach.rule), "step": breach.step, "values": list(breach.values),
                "consequence": consequence,
            },
        )  # fmt: skip
        with prefect_asked_once():
            create_markdown_artifact(page(run, breach, consequence), key=f"{run.experiment.name}-health")
    except PREFECT_ERRORS as error:
        get_logger().warning("Prefect's page does not take this for now: %s", error)


def page(run: Run, breach: Breach, consequence: str) -> str:
    best = "" if breach.best is None else f" Best mean before: {breach.best:.6g}."
    rows = "\n".join(f"| {step} | {value:.6g} |" for step, value in breach.values)
    return (
        f"# Health of {run.run_id}\n\nStep {breach.step} broke the rule **{breach.rule}**.{best}\n\n{consequence}\n\n"
        f"| step | {breach.rule.metric} |\n| ---: | ---: |\n{rows}\n"
    )


def breach_of(run: Run, adjustments: Adjustments) -> Breach:
    """The breach that the trainer has stopped for: the same function over the same journal."""
    acting = [rule for rule in run.experiment.health if rule.action != "warn"]
    return breaches(acting, run.journal(), after_step=adjustments.healthy_from)[0]


class HealthWarnings:
    """Announces the breaches of rules that only warn, each once: ``health.jsonl`` in the run's folder remembers."""

    def __init__(self, run: Run, adjustments: Adjustments, announce: Announce = announce_on_prefect) -> None:
        self._run, self._adjustments, self._announce = run, adjustments, announce
        self._rules = [rule for rule in run.experiment.health if rule.action == "warn"]
        self._path = run.run_dir / "health.jsonl"
        self._told = self._path.read_text().splitlines() if self._path.exists() else []
        self._seen_step = 0

    def tell(self, records: Sequence[StepRecord]) -> None:
        if not self._rules or not records or records[-1].step == self._seen_step:
            return
        self._seen_step = records[-1].step
        for breach in breaches(self._rules, records, after_step=self._adjustments.healthy_from):
            # a rollback takes steps again, and they are others
            line = json.dumps([str(breach.rule), breach.step, self._adjustments.rollbacks])
            if line not in self._told:
                self._told.append(line)
                write_json_atomically(self._path, "".join(f"{item}\n" for item in self._told))
                self._announce(self._run, breach, "Training goes on.")
