"""The evaluations that a trainer made while it trained: ``validation/step-000040`` in the run's folder. No torch.

Each has ``completions.parquet`` and, written after it, ``report.json``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from rlcore.artifacts import DatasetRef, EvalReport, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.config.experiment import FREE_SETTINGS
from rlcore.config.reward import own_digest
from rlcore.files import write_json_atomically
from rlcore.segment.journal import StepRecord, read_journal

TABLE = "completions.parquet"
_REPORT = "report.json"
_GROUPS = ("model.", "data.", "rollout.", "reward.")


class ValidationRecord(BaseModel):
    """One ``report.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    suite: str  # ``suite_digest``
    report: EvalReport


def suite_digest(experiment: ExperimentConfig, dataset: DatasetRef, base: ModelRef) -> str:
    """Hash of everything besides the weights that the numbers of an evaluation depend on, except code and packages."""
    values = {k: v for k, v in experiment.flat().items() if k.startswith(_GROUPS) and not k.startswith(FREE_SETTINGS)}
    # records that were made before these settings existed stay known
    if experiment.data.layout is None:
        values.pop("data.layout", None)
    if not experiment.data.mixture:
        values.pop("data.mixture", None)
    for name in experiment.data.mixture:
        del values[f"data.mixture.{name}.weight"]  # of training
    content = [values, experiment.evaluation.suite(), dataset.digest, base.digest, own_digests(experiment)]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def own_digests(experiment: ExperimentConfig) -> str | None:
    """Hash of the user's files that rewards depend on, reward models included. None: there are none."""
    own = {name: digest for name, reward in experiment.rewards.items() if (digest := own_digest(reward)) is not None}
    if list(own) == [""]:
        return own[""]
    return json.dumps(own, sort_keys=True) if own else None


def record_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "validation" / f"step-{step:06d}"


def write_record(run_dir: Path, record: ValidationRecord) -> None:
    """Write the report of an evaluation whose table is already there."""
    write_json_atomically(record_folder(run_dir, record.report.step) / _REPORT, record.model_dump_json(indent=1))


def read_records(run_dir: Path) -> list[ValidationRecord]:
    """All finished evaluations by the run's trainers, in the order of their steps. The paths of the tables are those of
    this machine, also if the run was moved."""
    records = []
    for path in sorted((run_dir / "validation").glob(f"step-*/{_REPORT}")):
        record = ValidationRecord.model_validate_json(path.read_bytes())
        here = {"table": str(path.with_name(TABLE)), "policy": str(run_dir)}
        records.append(record.model_copy(update={"report": record.report.model_copy(update=here)}))
    return records


def cut_records(run_dir: Path, step: int) -> None:
    """Delete what belongs to later steps, which a resume trains again, and evaluations without a report."""
    for folder in (run_dir / "validation").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step or not (folder / _REPORT).exists():
            shutil.rmtree(folder)


def as_step_record(report: EvalReport) -> StepRecord:
    """The metrics of a report and its seconds as trackers get them, with a fixed timestamp."""
    from rlcore.evaluation.report import metrics_of

    metrics = {f"eval/{name}": value for name, value in metrics_of(report).items()}
    metrics["time/validation"] = report.seconds
    return StepRecord(report.step, round(report.at * 1000), metrics)


def journal_with_evaluations(run_dir: Path) -> list[StepRecord]:
    """Every step, and every evaluation by the trainers, in the order of their steps."""
    return with_evaluations(read_journal(run_dir / "journal.jsonl"), run_dir)


def with_evaluations(journal: Sequence[StepRecord], run_dir: Path) -> list[StepRecord]:
    """``journal_with_evaluations`` of a journal that has been read."""
    evaluations = [as_step_record(item.report) for item in read_records(run_dir)]
    return sorted([*journal, *evaluations], key=lambda record: record.step)


def has_plateaued(records: Sequence[ValidationRecord], patience: int | None) -> bool:
    """Whether the accuracy of the last ``patience`` evaluations was not above the highest before them.

    Args:
        records: in the order of their steps. Only those on the problems and settings of the last one count.
        patience: at least 1. None: never.
    """
    accuracies = [item.report.accuracy for item in records if item.suite == records[-1].suite]
    return patience is not None and len(accuracies) - 1 - _first_highest(accuracies) >= patience


def _first_highest(values: Sequence[float]) -> int:
    return values.index(max(values)) if values else -1
