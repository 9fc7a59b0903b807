"""The steps of an ablation: train the points to a rung, choose which go on, and report the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from infra.logs import get_logger
from infra.settings import Settings
from rlcore.ablation.plan import BASE, Point, survivors
from rlcore.ablation.results import AblationSummary, Band, PointFailure, PointResult, Row, Status, band_over
from rlcore.errors import TrainerFailedError
from rlcore.evaluation.records import read_records
from rlcore.segment.journal import read_journal
from tasks.ablation.page import csv_table, draw_differences, draw_learning_curves, markdown_table, table_rows
from tasks.ablation.runners import point_runner, run_jobs
from tasks.ablation.study import Ablation, mark_point
from tasks.driver.outbox import Outbox, prefect_outage_named
from tasks.driver.progress import AblationProgress
from tasks.report.page import as_text, data_uri
from tasks.retries import step
from tasks.run import tracker_of

CURVE_METRIC = "reward/accuracy"  # the only part that every reward has
_SMOOTH_SHARE = 0.05
_SECONDS_PER_HOUR = 3600.0
_PAGE_SECONDS = 5.0  # for the last update of the progress


@task(name="train-points", task_run_name="points-to-rung-{rung}", cache_policy=NO_CACHE, persist_result=False)
def train_points(ablation: Ablation, names: Sequence[str], rung: int) -> None:
    """Train every seed of these points to the end of a rung. Runs that fail for good are marked; the others go on."""
    settings, jobs = Settings(), ablation.plan.jobs(names, rung)
    page = Outbox("page")
    try:
        with AblationProgress(ablation.plan.ablation_id, ablation.all_steps(), page) as progress:
            failed = run_jobs(
                ablation, jobs, point_runner(ablation, settings), lambda: progress.show(_steps_taken(ablation))
            )
    finally:
        page.close(_PAGE_SECONDS)
    for job in failed:
        mark_point(ablation, job, "failed")


@task(name="choose-points", task_run_name="choose-after-rung-{rung}", cache_policy=NO_CACHE, persist_result=False)
def choose_points(ablation: Ablation, names: Sequence[str], rung: int) -> list[str]:
    """Names of the points that train on after a rung; the others are marked as dropped, after the last rung none.

    Raises:
        TrainerFailedError: the base has no result, so there is nothing to compare with.
    """
    from rlcore.ablation.table import differences_at

    plan, last = ablation.plan, rung == ablation.plan.settings.rungs - 1
    reached = _accuracy(ablation)
    steps = {name: plan.steps(plan.point(name), rung) for name in names}
    here = {name: reached.get(name, {}).get(steps[name], {}) for name in names}
    if not here[BASE]:
        raise TrainerFailedError(
            f"the base of ablation {plan.ablation_id} has failed with every seed, so nothing can be compared. "
            f"{ablation.folder / 'results'} has the errors. Fix the cause, then continue the ablation."
        )
    scores = differences_at(here)
    chosen = list(scores) if last else survivors(scores, BASE, plan.settings.keep)
    for job in plan.jobs(list(scores), rung):
        if ablation.result(job) is not None and (last or job.point.name not in chosen):
            mark_point(ablation, job, "finished" if last else "dropped")
    for name in scores:
        verdict = "finished" if last else "goes on" if name in chosen else "is dropped"
        get_logger().info("ablate: %s %s at step %d: %+.3f", plan.point(name).label, verdict, steps[name], scores[name])
    return chosen


@step("report-ablation")
def report_ablation(ablation: Ablation) -> AblationSummary:
    """Write the table and both plots to the ablation's folder, to its run in MLflow, and to Prefect."""
    from rlcore.ablation.table import PointNumbers, make_rows

    plan, accuracy = ablation.plan, _accuracy(ablation)
    rows = make_rows(
        [
            PointNumbers(
                name=point.name,
                label=point.label,
                status=_status(ablation, point),
                accuracy=accuracy.get(point.name, {}),
                gpu_hours=_gpu_hours(ablation, point),
            )
            for point in plan.points
        ]
    )
    text = _markdown(ablation, rows)
    (ablation.folder / "table.csv").write_text(csv_table(rows))
    (ablation.folder / "table.md").write_text(text)
    draw_learning_curves(_curves(ablation), CURVE_METRIC).savefig(ablation.folder / "learning_curves.png", dpi=110)
    draw_differences(rows, plan.experiment).savefig(ablation.folder / "differences.png", dpi=110)
    tracker = tracker_of(ablation.run, Settings())
    for name in ("learning_curves.png", "differences.png", "table.csv", "table.md"):
        tracker.log_file(ablation.folder / name, "ablation")
    tracker.describe(text)
    pictures = "\n\n".join(
        f"![{title}]({data_uri(ablation.folder / name)})"
        for title, name in (("learning curves", "learning_curves.png"), ("differences to the base", "differences.png"))
    )
    with prefect_outage_named():
        about = f"Ablation {plan.ablation_id}"
        create_table_artifact(table_rows(rows), key=f"{plan.ablation_id}-table", description=about)
        create_markdown_artifact(f"{text}\n\n{pictures}\n", key=f"{plan.ablation_id}-report")
    get_logger().info("ablate: %s", ablation.folder / "table.md")
    return AblationSummary(
        ablation_id=plan.ablation_id,
        mlflow_run_id=tracker.mlflow_run_id,
        folder=str(ablation.folder),
        rows=tuple(rows),
    )


def _accuracy(ablation: Ablation) -> dict[str, dict[int, dict[int, dict[str, float]]]]:
    """Accuracy by point, steps, seed and problem."""
    from rlcore.evaluation.rows import accuracy_per_problem, read_rows

    accuracy: dict[str, dict[int, dict[int, dict[str, float]]]] = {}
    for item in ablation.results():
        values = accuracy_per_problem(read_rows(Path(item.report.table)))
        accuracy.setdefault(item.point, {}).setdefault(item.steps, {})[item.seed] = values
    return accuracy


def _results_of(ablation: Ablation, point: Point) -> list[PointResult]:
    return [item for item in ablation.results() if item.point == point.name]


def _status(ablation: Ablation, point: Point) -> Status:
    """Dropped: it reached all the steps that were asked of it. Failed: it did not."""
    plan, reached = ablation.plan, max((item.steps for item in _results_of(ablation, point)), default=0)
    if reached == plan.steps(point, plan.settings.rungs - 1):
        return "finished"
    tried = [job for rung in range(plan.settings.rungs) for job in plan.jobs([point.name], rung)]
    beyond = [job for job in tried if job.steps > reached and ablation.failure(job) is not None]
    return "failed" if beyond or not reached else "dropped"


def _gpu_hours(ablation: Ablation, point: Point) -> float:
    """Devices times the seconds of all steps and evaluations, including steps that a kill took back, without those of
    a trunk."""
    forked, trunk_step = ablation.plan.settings.trunk is not None, ablation.plan.settings.trunk_step
    journals = [path for folder in ablation.run_dirs(point) for path in folder.glob("journal*.jsonl")]
    steps = sum(
        record.metrics.get("time/step", 0.0)
        for path in journals
        for record in read_journal(path)
        if record.step > trunk_step
    )
    by_trainer = [
        record.report
        for folder in ablation.run_dirs(point)
        for record in read_records(folder)
        if not forked or record.report.step > trunk_step
    ]
    results = [item.report for item in _results_of(ablation, point)]
    evaluations = {report.table: report.seconds for report in (*by_trainer, *results)}  # a result may be the trainer's
    return point.experiment.resources.devices * (steps + sum(evaluations.values())) / _SECONDS_PER_HOUR


def _curves(ablation: Ablation) -> list[tuple[str, Band]]:
    curves = []
    for point in ablation.plan.points:
        seeds = [
            {item.step: item.metrics[CURVE_METRIC] for item in read_journal(path) if CURVE_METRIC in item.metrics}
            for path in (folder / "journal.jsonl" for folder in ablation.run_dirs(point))
        ]
        window = max(1, round(_SMOOTH_SHARE * point.experiment.training.steps))
        curves.append((point.label, band_over([values for values in seeds if values], window)))
    return curves


def _steps_taken(ablation: Ablation) -> int:
    folders = (folder for point in ablation.plan.points for folder in ablation.run_dirs(point))
    return sum(records[-1].step for folder in folders if (records := read_journal(folder / "journal.jsonl")))


def _markdown(ablation: Ablation, rows: Sequence[Row]) -> str:
    plan = ablation.plan
    asked = [*plan.settings.grid, *(" ".join(point) for point in plan.settings.points)]
    tried = [job for rung in range(plan.settings.rungs) for job in plan.jobs([p.name for p in plan.points], rung)]
    failures = [
        f"- {job.point.label}, seed {job.seed}, to step {job.steps}: {as_text(_last_line(failure))}"
        for job in tried
        if (failure := ablation.failure(job)) is not None
    ]
    seeds = ", ".join(map(str, plan.settings.seeds))
    return (
        f"# Ablation {plan.ablation_id}\n\n{plan.experiment} with {'; '.join(asked)}; seeds {seeds}.\n\n"
        f"{markdown_table(rows)}\n\nAccuracy on the validation problems; intervals over seeds and problems; "
        "p by random signs of the problems, and adjusted for the number of points (Benjamini-Hochberg). Dropped points "
        "are compared with the base at the step where they were dropped.\n"
        + _about_trunk(ablation)
        + (f"\nFailed:\n\n{chr(10).join(failures)}\n" if failures else "")
    )


def _about_trunk(ablation: Ablation) -> str:
    """Where the points start, and the GPU-hours that this saved."""
    settings = ablation.plan.settings
    if settings.trunk is None:
        return ""
    folders = [(point, folder) for point in ablation.plan.points for folder in ablation.run_dirs(point)]
    saved = sum(
        point.experiment.resources.devices * record.metrics.get("time/step", 0.0) / _SECONDS_PER_HOUR
        for point, folder in folders
        for record in read_journal(folder / "journal.jsonl")
        if record.step <= settings.trunk_step
    )
    return (
        f"\nAll {len(folders)} runs are forks of {settings.trunk}, so their seeds differ in what follows that step. To "
        f"train each of them from the first step would have taken {saved:.3g} GPU-hours more.\n"
    )


def _last_line(failure: PointFailure) -> str:
    """The class of the error and the last line of its message; an AssertionError may have no message."""
    lines = failure.message.splitlines()
    return f"{failure.kind}: {lines[-1]}" if lines else failure.kind
