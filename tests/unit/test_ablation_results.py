"""An ablation's decisions and its report, from results on disk; MLflow is a database of the test's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from infra.settings import Settings
from rlcore.ablation.plan import Job
from rlcore.artifacts import EvalReport
from rlcore.errors import ConfigError, DivergedError, TrainerFailedError, WorkerLostError
from rlcore.evaluation.rows import EvalRow, write_rows
from rlcore.segment.journal import StepRecord
from tasks.ablation import steps as ablating
from tasks.ablation.steps import choose_points, report_ablation
from tasks.ablation.study import (
    Ablation,
    describe_ablation,
    existing_ablation,
    mark_point,
    note_result,
    open_ablation,
    place_below,
)
from tasks.run import Run, tracker_of

OVERRIDES = ["training.steps=4", "segment.steps=2", "data.template=math"]
ASKED = {
    "grid": ["training.learning_rate=[1e-4, 3e-4]"], "points": [["training.learning_rate=0.01"]], "seeds": [5],
    "rungs": 2,
}  # fmt: skip


@pytest.fixture
def ablation(empty_mlflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ablation:
    (tmp_path / "data" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_mlflow, tmp_path / "data" / "mlflow" / "mlflow.db")
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(ablating, "mark_point", mark_point.fn)
    return open_ablation.fn("grpo-geo3k-tiny", OVERRIDES, "study", **ASKED)


def job_of(ablation: Ablation, name: str, steps: int) -> Job:
    (job,) = [job for job in ablation.plan.jobs([name], 0 if steps == 2 else 1) if job.steps == steps]
    return job


def reach(ablation: Ablation, name: str, steps: int, right: int) -> None:
    """A run that took ``steps`` steps of 0.2 s, and ``right`` of its eight problems are right."""
    job = job_of(ablation, name, steps)
    run = Run(
        run_id=ablation.run_id(job),
        run_dir=Settings().runs_dir / ablation.run_id(job),
        experiment=job.point.experiment,
    )
    run.run_dir.mkdir(parents=True, exist_ok=True)
    lines = [
        StepRecord(step, step, {"time/step": 0.2, "reward/accuracy": step / 8}).line() for step in range(1, steps + 1)
    ]
    (run.run_dir / "journal.jsonl").write_text("".join(lines))
    tracker = tracker_of(run, Settings())
    place_below.fn(ablation, job, run)
    assert run.ablation_marker.read_text() == ablation.plan.ablation_id
    rows = [
        EvalRow(f"p{i}", 0, "q", "a", "c", float(i < right), float(i < right), None, True, "stop", 3) for i in range(8)
    ]
    table = run.run_dir / f"table-{steps}.parquet"
    write_rows(rows, table)
    report = EvalReport(
        policy="p", step=steps, dataset_digest="d", num_problems=8, samples_per_problem=1, accuracy=right / 8,
        accuracy_low=0, accuracy_high=1, reward=0, reward_low=0, reward_high=0, truncated=0, ungraded=0,
        table=str(table), seconds=0.1,
    )  # fmt: skip
    noted = note_result.fn(ablation, job, run, tracker.mlflow_run_id, report)
    assert ablation.result(job) == noted
    assert (noted.point, noted.seed, noted.steps, noted.run_id) == (name, 5, steps, run.run_id)


def test_the_worse_half_is_dropped_a_failed_point_stays_in_the_table_and_every_number_is_right(
    ablation: Ablation, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [point.name for point in ablation.plan.points]
    assert names == ["base", "p01", "p02"]
    describe_ablation.fn(ablation)
    for name, right in (("base", 3), ("p01", 1), ("p02", 7)):
        reach(ablation, name, 2, right)
    assert choose_points.fn(ablation, names, 0) == ["base", "p02"]
    reach(ablation, "base", 4, 4)
    failing = job_of(ablation, "p02", 4)
    with pytest.raises(DivergedError), ablation.note_failure(failing):
        raise DivergedError("first line\nthe loss is nan")
    assert choose_points.fn(ablation, ["base", "p02"], 1) == ["base"]
    pages: list[tuple[object, dict[str, str]]] = []
    for name in ("create_table_artifact", "create_markdown_artifact"):
        monkeypatch.setattr(ablating, name, lambda content, **about: pages.append((content, about)))
    summary = report_ablation.fn(ablation)

    assert [(row.label, row.status, row.steps, row.accuracy) for row in summary.rows] == [
        ("base", "finished", 4, 4 / 8),
        ("learning_rate=0.0001", "dropped", 2, 1 / 8),
        ("learning_rate=0.01", "failed", 2, 7 / 8),
    ]
    # Each at the step that it has reached: 1 - 3 and 7 - 3 of 8; four equal gains are 2 of 16 signs.
    assert [row.difference for row in summary.rows] == [None, -2 / 8, 4 / 8]
    assert [row.p for row in summary.rows] == [None, 2 / 4, 2 / 16]
    # Two devices, steps of 0.2 s, an evaluation of 0.1 s at each rung.
    assert [row.gpu_hours for row in summary.rows] == pytest.approx(
        [2 * (4 * 0.2 + 2 * 0.1) / 3600, 2 * (2 * 0.2 + 0.1) / 3600, 2 * (2 * 0.2 + 0.1) / 3600]
    )
    assert (summary.ablation_id, summary.folder) == ("study", str(ablation.folder))
    assert {path.name for path in ablation.folder.iterdir()} >= {
        "plan.json", "table.csv", "table.md", "learning_curves.png", "differences.png",
    }  # fmt: skip
    text = (ablation.folder / "table.md").read_text()
    assert text.startswith(
        "# Ablation study\n\ngrpo-geo3k-tiny with training.learning_rate=[1e-4, 3e-4]; training.learning_rate=0.01; "
        "seeds 5.\n\n| point |"
    )
    (line,) = [line for line in text.splitlines() if line.startswith("- ")]
    assert line.startswith("- learning_rate=0.01, seed 5, to step 4: DivergedError")
    assert line.endswith("the loss is nan")
    assert "first line" not in text
    (table, about), (page, about_page) = pages
    assert (about["key"], about_page["key"]) == ("study-table", "study-report")
    assert [row["point"] for row in table] == [row.label for row in summary.rows]
    assert page.startswith(text)
    assert page.count("](data:image/png;base64,") == 2
    curves = [(label, band.steps, band.mean) for label, band in ablating._curves(ablation)]
    assert curves[0] == ("base", (1, 2, 3, 4), (0.125, 0.25, 0.375, 0.5))
    assert curves[1] == ("learning_rate=0.0001", (1, 2), (0.125, 0.25))
    assert ablating._steps_taken(ablation) == 4 + 2 + 2

    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    parent = client.get_run(summary.mlflow_run_id)
    assert (parent.data.params["ablation.rungs"], parent.data.params["ablation.experiment"]) == ("2", "grpo-geo3k-tiny")
    assert parent.data.params["ablation.overrides"] == " ".join(OVERRIDES)
    assert (parent.data.tags["rlflow.ablation"], parent.data.tags["rlflow.ablation_point"]) == ("study", "(all)")
    found = {item.path for item in client.list_artifacts(summary.mlflow_run_id, "ablation")}
    assert found == {f"ablation/{name}" for name in (
        "plan.json", "table.csv", "table.md", "learning_curves.png", "differences.png")}  # fmt: skip
    below = f"tags.mlflow.parentRunId = '{summary.mlflow_run_id}'"
    children = client.search_runs([parent.info.experiment_id], below)
    assert {child.info.run_name: child.data.tags["rlflow.ablation_status"] for child in children} == {
        "base, seed 5": "finished",
        "learning_rate=0.0001, seed 5": "dropped",
        "learning_rate=0.01, seed 5": "running",  # whoever waits for it marks a failure
    }
    assert {child.data.tags["rlflow.ablation_seed"] for child in children} == {"5"}


def test_without_the_base_nothing_can_be_compared(ablation: Ablation) -> None:
    reach(ablation, "p01", 2, 3)
    with pytest.raises(
        TrainerFailedError, match=r"the base of ablation study has failed with every seed.*results has the errors"
    ):
        choose_points.fn(ablation, ["base", "p01"], 0)


def test_a_failure_is_noted_as_final_only_where_the_table_has_no_further_try(ablation: Ablation) -> None:
    job = job_of(ablation, "base", 2)
    for error, final in ((DivergedError("x" * 3000), True), (WorkerLostError("away"), False), (KeyError("k"), False)):
        with pytest.raises(type(error)), ablation.note_failure(job):
            raise error
        failure = ablation.failure(job)
        assert failure is not None
        assert (failure.kind, failure.final) == (type(error).__name__, final)
        assert len(failure.message) <= 2000
    with ablation.note_failure(job):
        assert ablation.failure(job) is None, "of the try before"
    assert ablation.failure(job) is None
    assert ablating._status(ablation, job.point) == "failed", "it has reached nothing"


def test_an_ablation_is_continued_as_it_was_asked_for_and_counts_its_steps(ablation: Ablation) -> None:
    assert open_ablation.fn("grpo-geo3k-tiny", OVERRIDES, "study", **ASKED) == ablation == existing_ablation("study")
    with pytest.raises(ConfigError, match=r"(?s)^ablation study was started with\n.*\nand now has\n.*start a new one"):
        open_ablation.fn("grpo-geo3k-tiny", OVERRIDES, "study", **(ASKED | {"seeds": [6]}))
    with pytest.raises(ConfigError, match=r"^no ablation 'other' under .* Found: study\.$"):
        existing_ablation("other")
    with pytest.raises(ConfigError, match=r"^'No' cannot be the name of an ablation"):
        existing_ablation("No")
    # Three points to step 2, the better two to step 4.
    assert ablation.all_steps() == 3 * 2 + 2 * 2
    assert ablation.committed_steps() == 0
    assert ablation.run.run_id == "study"
    assert ablation.run_id(job_of(ablation, "p01", 2)) == "study-p01-s5"
