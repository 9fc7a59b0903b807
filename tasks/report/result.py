"""The result page, in the run's folder, in Prefect and in MLflow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from prefect.artifacts import create_markdown_artifact

from infra.logs import get_logger
from infra.settings import Settings
from infra.tracking.tracker import Tracker
from rlcore.artifacts import DatasetRef, EvalReport, ModelRef
from rlcore.segment.journal import StepRecord
from rlcore.segment.spec import SegmentManifest
from tasks.driver.outbox import prefect_outage_named
from tasks.provenance.cost import run_cost
from tasks.provenance.lineage import lineage_of
from tasks.report.page import RunSummary, Sample, draw_curves, html_page, markdown, read_samples
from tasks.retries import step
from tasks.run import Run, tracker_of

_SHARE_AT_ENDS = 0.1


@step("report", others=(5,))
def report(
    run: Run,
    validation: DatasetRef,
    before: EvalReport,
    after: EvalReport,
    segments: Sequence[SegmentManifest],
    model: ModelRef,
    wall_seconds: float,
) -> RunSummary:
    """Write the page, show it in Prefect and MLflow, and return the run in ten numbers and names."""
    records = run.journal()
    tracker = tracker_of(run, Settings())
    summary = summarize(records, before, after, segments, model, wall_seconds, tracker.mlflow_run_id)
    samples = read_samples(run)
    page = run.report_dir / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    draw_curves(records, before, after).savefig(page.with_name("curves.png"), dpi=110)
    evaluations = [item.model_dump(mode="json") for item in (before, after)]
    page.with_name("evaluations.json").write_text(json.dumps(evaluations, indent=1))
    cost = run_cost(run.run_dir, run.experiment, records, (before, after))
    lineage = lineage_of(run, model, segments[-1].checkpoint, tracker.mlflow_run_id)
    page.with_name("cost.json").write_text(cost.model_dump_json(indent=1))
    text = markdown(run, summary, before, after, model, samples, cost, lineage)
    page.write_text(html_page(run, summary, before, after, model, samples, page.parent, validation, cost, lineage))
    with prefect_outage_named():
        create_markdown_artifact(text, key=f"{run.experiment.name}-report")
    _log(tracker, page, text, samples, run, segments, model)
    tracker.log_metrics(cost.metrics(), step=records[-1].step, timestamp_ms=records[-1].timestamp_ms)
    get_logger().info("report: %s", page)
    return summary


def summarize(
    records: Sequence[StepRecord],
    before: EvalReport,
    after: EvalReport,
    segments: Sequence[SegmentManifest],
    model: ModelRef,
    wall_seconds: float,
    mlflow_run_id: str,
) -> RunSummary:
    rewards = [record.metrics["reward/mean"] for record in records if "reward/mean" in record.metrics]
    ends = max(1, round(_SHARE_AT_ENDS * len(rewards)))
    return RunSummary(
        accuracy_before=before.accuracy,
        accuracy_after=after.accuracy,
        reward_first=sum(rewards[:ends]) / ends,
        reward_last=sum(rewards[-ends:]) / ends,
        steps=segments[-1].last_step,
        segments=len(segments),
        wall_seconds=round(wall_seconds, 1),
        mlflow_run_id=mlflow_run_id,
        checkpoint=segments[-1].checkpoint.path,
        merged_model=model.path,
    )


def _log(
    tracker: Tracker,
    page: Path,
    text: str,
    samples: Sequence[Sample],
    run: Run,
    segments: Sequence[SegmentManifest],
    model: ModelRef,
) -> None:
    for path in (page, page.with_name("curves.png")):
        tracker.log_file(path, "report")
    for trace in sorted((run.run_dir / "profiles").glob("*.json.gz")):
        tracker.log_file(trace, "profiles")
    tracker.log_text(text, "report/report.md")
    if samples and "samples/completions.json" not in tracker.artifact_names("samples"):
        columns = ("step", "question", "answer", "completion", "reward", "finish_reason")
        tracker.log_table(
            {name: [getattr(item, name) for item in samples] for name in columns}, "samples/completions.json"
        )
    references = {
        "checkpoints": [manifest.checkpoint.model_dump() for manifest in segments],
        "model": model.model_dump(),
        "run_dir": str(run.run_dir),
    }
    tracker.log_text(json.dumps(references, indent=1), "references.json")
