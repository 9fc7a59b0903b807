"""Watch a trainer: report health rules that its metrics break, and end it when it makes no progress."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event

from infra import processes
from infra.logs import get_logger
from rlcore.adjustments import Adjustments
from rlcore.errors import HangError
from rlcore.files import write_json_atomically
from rlcore.process import SIGNAL, innermost, pid_of
from rlcore.segment.health import Breach, breaches
from rlcore.segment.journal import StepRecord
from rlcore.segment.lease import Lease, Unchanged
from tasks.driver.outbox import PREFECT_ERRORS, prefect_asked_once
from tasks.run import Run

Announce = Callable[[Run, Breach, str], None]


def announce_on_prefect(run: Run, breach: Breach, consequence: str) -> None:
    """Emit the event ``rlflow.health.ACTION`` and create the artifact EXPERIMENT-health."""
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
        get_logger().warning("Prefect does not accept the health page for now: %s", error)


def page(run: Run, breach: Breach, consequence: str) -> str:
    best = "" if breach.best is None else f" Best mean before: {breach.best:.6g}."
    rows = "\n".join(f"| {step} | {value:.6g} |" for step, value in breach.values)
    return (
        f"# Health of {run.run_id}\n\nStep {breach.step} broke the rule **{breach.rule}**.{best}\n\n{consequence}\n\n"
        f"| step | {breach.rule.metric} |\n| ---: | ---: |\n{rows}\n"
    )


def breach_of(run: Run, adjustments: Adjustments) -> Breach:
    """The breach that stopped the trainer, computed again from the journal."""
    acting = [rule for rule in run.experiment.health if rule.action != "warn"]
    return breaches(acting, run.journal(), after_step=adjustments.healthy_from)[0]


class HealthWarnings:
    """Announces each breach of a rule that only warns once; ``health.jsonl`` in the run's folder lists them."""

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
            # with the rollbacks: a step that is repeated after one may break the rule again
            line = json.dumps([str(breach.rule), breach.step, self._adjustments.rollbacks])
            if line not in self._told:
                self._told.append(line)
                write_json_atomically(self._path, "".join(f"{item}\n" for item in self._told))
                self._announce(self._run, breach, "Training goes on.")


_DUMP_SECONDS = 5.0


class HangWatch:
    """Notices a trainer whose lease shows no progress: no finished phase of a step, no bytes of a checkpoint and no
    look at the control file."""

    def __init__(self, lease: Path, minutes: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._lease = Lease(lease)
        self._deadline = 60 * minutes
        self._unchanged = Unchanged(now)

    def stuck(self) -> bool:
        info = self._lease.read()
        return self._unchanged.seconds(None if info is None else (info.token, info.progress)) > self._deadline


def end_stuck_trainer(run_dir: Path, mark: str, minutes: float) -> HangError:
    """Save the stacks in ``stacks/hang-N`` and kill all processes with ``mark``. Returns the error to raise."""
    live = run_dir / "stacks" / "live"
    folder = next(path for n in itertools.count(1) if not (path := run_dir / "stacks" / f"hang-{n}").exists())
    folder.mkdir(parents=True)
    _dump(live, mark)
    processes.kill(mark)
    frames: list[str] = []
    for dump in sorted(live.glob("*.txt")):
        text = dump.read_text(errors="replace")
        inner = innermost(text) or ["it did not answer"]
        frames.append(f"{dump.stem}:\n    " + "\n    ".join(inner))
        dump.rename(folder / dump.name)
    where = "\n".join(frames) or "no stack traces were collected: no process responded to SIGUSR1"
    return HangError(
        f"no progress for {minutes:g} minutes (segment.hang_minutes). The innermost frames of the main threads:\n"
        f"{where}\nThe stacks of all threads: {folder}. All processes of the trainer were killed."
    )


def _dump(live: Path, mark: str) -> None:
    """Let every process of the trainer that handles the signal write its stacks; it would kill the others."""
    running = {process.pid: process for process in processes.family(mark)}
    dumps = [dump for dump in live.glob("*.txt") if pid_of(dump) in running]
    for dump in dumps:
        try:
            running[pid_of(dump)].send_signal(SIGNAL)
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + _DUMP_SECONDS
    sizes: list[int] = []
    while time.monotonic() < deadline:
        before, sizes = sizes, [dump.stat().st_size for dump in dumps]
        if all(sizes) and sizes == before:
            return
        time.sleep(0.2)
