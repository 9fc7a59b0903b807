"""Cost of a run: GPU-seconds per phase, tokens and utilisation, from its journal, also after kills and resumes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from rlcore.artifacts import EvalReport
from rlcore.config import ExperimentConfig
from rlcore.segment.journal import StepRecord, read_journal

_TIME = "time/"
_STEP = "time/step"
_BESIDE = ("time/generate_beside", "time/checkpoint_written")  # overlap with other phases
_BETWEEN = ("time/checkpoint_blocked",)  # between steps, in none of them
_HOUR = 3600.0


class RunCost(BaseModel):
    """GPU-seconds are seconds times the devices of the run, busy or idle; on a CPU, seconds times workers.

    Time outside of steps and evaluations (starting Ray and engines, compilation, bootstrap, merging) is left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: int
    gpu_seconds: dict[str, float]  # per phase of the steps that count; ``other`` is the rest of the step
    redone_gpu_seconds: float  # of steps that a kill or a rollback took back
    evaluation_gpu_seconds: float  # on as many devices as the run has
    generated_tokens: float
    trained_tokens: float  # computed by the updates: a shared prompt once per microbatch
    in_step_share: float  # of the time from the start of the first step to the end of the last; 1: never interrupted
    update_utilisation: float | None  # model FLOPs of the updates over the peak, while updating; None: peak unknown
    step_utilisation: float | None  # the same work over the peak of all devices during whole steps

    @property
    def gpu_hours(self) -> float:
        spent = sum(self.gpu_seconds.values()) + self.redone_gpu_seconds + self.evaluation_gpu_seconds
        return spent / _HOUR

    def metrics(self) -> dict[str, float]:
        """The metrics that are logged to MLflow once per run."""
        found = {
            "cost/gpu_hours": self.gpu_hours,
            "cost/redone_gpu_seconds": self.redone_gpu_seconds,
            "cost/evaluation_gpu_seconds": self.evaluation_gpu_seconds,
            "cost/generated_tokens": self.generated_tokens,
            "cost/trained_tokens": self.trained_tokens,
            "cost/in_step_share": self.in_step_share,
            **{f"cost/gpu_seconds/{phase}": seconds for phase, seconds in self.gpu_seconds.items()},
        }
        for name in ("update_utilisation", "step_utilisation"):
            value = getattr(self, name)
            if value is not None:
                found[f"cost/{name}"] = value
        return found

    def rows(self) -> list[tuple[str, str]]:
        """Name and text of each row of the page."""
        whole = sum(self.gpu_seconds.values()) or 1.0
        spent = sorted(self.gpu_seconds.items(), key=lambda item: -item[1])
        known = self.update_utilisation is not None and self.step_utilisation is not None
        return [
            ("GPU-hours", f"{self.gpu_hours:.3f} on {self.devices} device(s)"),
            *((f"GPU-seconds, {name}", f"{seconds:.1f} ({100 * seconds / whole:.0f} %)") for name, seconds in spent),
            ("GPU-seconds, done again", f"{self.redone_gpu_seconds:.1f}"),
            ("GPU-seconds, evaluation", f"{self.evaluation_gpu_seconds:.1f}"),
            ("tokens generated, trained on", f"{self.generated_tokens:,.0f}, {self.trained_tokens:,.0f}"),
            ("time within steps", f"{100 * self.in_step_share:.0f} % from the first step to the last"),
            (
                "model FLOPs utilisation",
                f"{100 * (self.update_utilisation or 0):.1f} % in updates, {100 * (self.step_utilisation or 0):.1f} % "
                "over whole steps" if known else "peak of this device unknown",
            ),
        ]  # fmt: skip


def run_cost(
    run_dir: Path, config: ExperimentConfig, records: Sequence[StepRecord], evaluations: Sequence[EvalReport]
) -> RunCost:
    """The cost of the run in ``run_dir``, with ``records`` from its journal."""
    resources = config.resources
    devices = resources.devices
    timed = [record for record in records if _STEP in record.metrics]
    seconds: defaultdict[str, float] = defaultdict(float)
    for record in timed:
        phases = {
            name: value for name, value in record.metrics.items()
            if name.startswith(_TIME) and name != _STEP and name not in _BESIDE
        }  # fmt: skip
        for name, value in phases.items():
            seconds[name.removeprefix(_TIME)] += value
        claimed = sum(value for name, value in phases.items() if name not in _BETWEEN)
        seconds["other"] += max(0.0, record.metrics[_STEP] - claimed)
    in_steps = sum(record.metrics[_STEP] for record in timed)
    wall = 1.0
    if timed:
        between = (timed[-1].timestamp_ms - timed[0].timestamp_ms) / 1000
        wall = between + timed[0].metrics[_STEP] or 1.0
    lost = [
        record.metrics.get(_STEP, 0.0) for path in run_dir.glob("journal.cut-*.jsonl") for record in read_journal(path)
    ]
    group = config.rollout.group_size
    mfu_seconds = [
        record.metrics["perf/update_mfu"] * record.metrics["time/update"]
        for record in timed
        if "perf/update_mfu" in record.metrics
    ]
    updating = seconds.get("update", 0.0)
    return RunCost(
        devices=devices,
        gpu_seconds={name: value * devices for name, value in seconds.items()},
        redone_gpu_seconds=sum(lost) * devices,
        evaluation_gpu_seconds=sum(item.seconds for item in evaluations) * devices,
        generated_tokens=sum(
            _of(record, "rollout/completion_tokens_mean") * _of(record, "rollout/groups_generated") * group
            for record in timed
        ),
        trained_tokens=sum(_of(record, "perf/update_tokens") for record in timed),
        in_step_share=min(1.0, in_steps / wall),
        update_utilisation=sum(mfu_seconds) / updating if mfu_seconds and updating else None,
        step_utilisation=(
            sum(mfu_seconds) * resources.workers / (in_steps * devices) if mfu_seconds and in_steps else None
        ),
    )


def _of(record: StepRecord, name: str) -> float:
    return record.metrics.get(name, 0.0)
