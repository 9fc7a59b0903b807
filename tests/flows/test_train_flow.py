"""The flow: order, caching, retries and interruption, with fake jobs behind the real process boundary."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect import task

from flows.evaluate import evaluate_run
from flows.train_grpo import train_grpo
from infra import processes
from infra.settings import Settings
from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.errors import ConfigError, DivergedError, HealthError
from rlcore.segment.spec import SegmentManifest
from tasks import train as training
from tasks.cli.foreground import was_interrupted
from tasks.experiments import load_experiment
from tasks.lineage import find_lineage
from tasks.run import Run, existing_run, open_run
from tests.flows.outcome import (
    DATA,
    MODEL,
    SMALL,
    TRAINING,
    adjustments,
    calls,
    failures,
    read_health_artifact,
    trainings,
)


def test_steps_run_in_order_and_a_second_run_repeats_only_training(data_dir: Path) -> None:
    summary = train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="first")
    first = calls(data_dir)
    assert [line for line in first if line not in MODEL] == [*DATA, *TRAINING]
    assert [line for line in first if line not in DATA] == [*MODEL, *TRAINING]
    assert (summary.steps, summary.segments) == (5, 3)
    assert (summary.accuracy_before, summary.accuracy_after) == (0.25, 0.75)
    assert (summary.reward_first, summary.reward_last) == pytest.approx((0.1, 0.5))
    assert (data_dir / "runs" / "first" / "report" / "report.html").stat().st_size > 20_000

    again = train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="first")
    assert calls(data_dir) == first  # everything was found done
    assert again.mlflow_run_id == summary.mlflow_run_id
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    points = client.get_metric_history(summary.mlflow_run_id, "reward/mean")
    assert [point.step for point in points] == [1, 2, 3, 4, 5]
    evaluated = client.get_metric_history(summary.mlflow_run_id, "eval/accuracy")  # each once, sent twice
    assert [(point.step, point.value) for point in evaluated] == [(0, 0.25), (2, 0.75), (4, 0.75), (5, 0.75)]
    for point in evaluated:
        tables = client.list_artifacts(summary.mlflow_run_id, f"eval/step-{point.step:06d}")
        assert [Path(table.path).name for table in tables] == ["completions.parquet"]
    shown_completions = client.list_artifacts(summary.mlflow_run_id, "eval/completions")
    assert [Path(item.path).name for item in shown_completions] == [f"step-{step:06d}.html" for step in (0, 2, 4, 5)]
    shown = json.loads((data_dir / "runs" / "first" / "report" / "evaluations.json").read_text())
    assert [(item["step"], item["accuracy"]) for item in shown] == [(0, 0.25), (2, 0.75), (4, 0.75), (5, 0.75)]
    run = client.get_run(summary.mlflow_run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["rlflow.dataset_digest"] == "resized-raw-train"

    train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="second")
    assert calls(data_dir) == [*first, *TRAINING]


def test_evaluations_by_the_trainer_are_not_repeated_unless_they_are_others(data_dir: Path) -> None:
    train_grpo("grpo-geo3k-tiny", overrides=[*SMALL, "evaluation.every_steps=4"], run_id="own")
    assert [line for line in calls(data_dir) if "val" in line.split()[0]] == ["validate 0", "validate 5"]
    before = calls(data_dir)
    assert evaluate_run("own").accuracy == 0.75
    assert evaluate_run("own", overrides=["evaluation.every_steps=null"]).accuracy == 0.75
    assert calls(data_dir) == before
    evaluate_run("own", overrides=["evaluation.samples=3"])
    assert calls(data_dir) == [*before, "evaluate 5"]


def test_the_accuracy_without_duplicates_is_reported_beside_the_whole(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 problems, p0 and p1 are right before training and p0 to p5 after it. Training has p0 and p7 too."""
    monkeypatch.setenv("FAKE_DUPLICATES", '["p0", "p7"]')
    summary = train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="shared")
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    clean = client.get_metric_history(summary.mlflow_run_id, "eval/accuracy_clean")
    assert [(point.step, point.value) for point in clean] == [
        (0, pytest.approx(1 / 6)), *((step, pytest.approx(5 / 6)) for step in (2, 4, 5)),
    ]  # fmt: skip
    metrics = client.get_run(summary.mlflow_run_id).data.metrics
    assert (metrics["eval/clean_problems"], metrics["eval/duplicates_exact"], metrics["eval/duplicates_near"]) == (
        6, 2, 0,
    )  # fmt: skip
    (pairs,) = client.list_artifacts(summary.mlflow_run_id, "duplicates")
    assert pairs.path == "duplicates/duplicates.jsonl"
    page = (data_dir / "runs" / "shared" / "report" / "report.html").read_text()
    assert re.search(r"<td>accuracy, clean part \[95 %\]</td><td>0\.167 \[.*\] on 6</td><td>0\.833 \[", page)
    assert "<p>What is 7?</p>answer: 7</td>" in page
    lineage, _ = find_lineage("grpo-geo3k-tiny", Settings())
    assert [(found.exact, found.problems, found.digest) for found in lineage.duplicates] == [(2, 8, "pairs")]

    train_grpo("grpo-geo3k-tiny", overrides=[*SMALL, "evaluation.find_duplicates=false"], run_id="unasked")
    assert not (data_dir / "runs" / "unasked" / "duplicates.jsonl").exists()
    assert "uplicate" not in (data_dir / "runs" / "unasked" / "report" / "report.html").read_text().replace(
        "find_duplicates", ""
    )


def test_training_ends_early_and_the_best_checkpoint_is_merged(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_RIGHT", '{"0": 2, "2": 6, "4": 5, "6": 5, "8": 8}')
    best = ["segment.keep_best=1", "segment.best_metric=eval/accuracy", "segment.merge=best"]
    overrides = [*SMALL, "training.steps=9", *best, "segment.keep_checkpoints=1", "evaluation.patience=2"]
    summary = train_grpo("grpo-geo3k-tiny", overrides=overrides, run_id="early")
    assert [line for line in calls(data_dir) if line.split()[0] in ("evaluate", "validate", "merge")] == [
        "validate 0", "validate 2", "validate 4", "validate 6", "merge 2"
    ]  # fmt: skip
    assert (summary.steps, summary.segments, Path(summary.checkpoint).name) == (6, 3, "step-000002")
    assert (summary.accuracy_before, summary.accuracy_after) == (0.25, 0.75)
    known = calls(data_dir)
    train_grpo("grpo-geo3k-tiny", overrides=overrides, run_id="early")
    assert calls(data_dir) == known, "it is over"
    longer = [*overrides[:-1], "evaluation.patience=3"]
    summary = train_grpo("grpo-geo3k-tiny", overrides=longer, run_id="early")
    assert (summary.steps, Path(summary.checkpoint).name, summary.accuracy_after) == (9, "step-000008", 1.0)


def test_without_evaluations_by_the_trainer_there_are_those_before_and_after(data_dir: Path) -> None:
    summary = train_grpo("grpo-geo3k-tiny", overrides=[*SMALL, "evaluation.every_steps=null"], run_id="none")
    assert [line for line in calls(data_dir) if line.split()[0] in ("evaluate", "train", "validate")] == [
        "evaluate 0", "train from segment 0", "evaluate 5"
    ]  # fmt: skip
    assert (summary.accuracy_before, summary.accuracy_after) == (0.25, 0.75)
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    points = client.get_metric_history(summary.mlflow_run_id, "eval/accuracy")
    assert [(point.step, point.value) for point in points] == [(0, 0.25), (5, 0.75)]


def test_a_killed_trainer_is_replaced_and_goes_on_from_its_checkpoint(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "crash")
    train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="crash")
    trained = [line for line in calls(data_dir) if line.startswith("train")]
    assert trained == ["train from segment 0", "train from segment 1"]
    (failure,) = (data_dir / "runs" / "crash" / "failures.jsonl").read_text().splitlines()
    assert json.loads(failure)["error"].startswith("about to be killed\n\nthe trainer ended with SIGKILL")
    log = data_dir / "runs" / "crash" / "trainer.log"
    assert re.findall("^=== trainer started (from .*),", log.read_text(), re.MULTILINE) == [
        "from the start",
        "from step 2",
    ]
    assert training.last_words(log) == ""  # the second one said nothing, and what the first one said is not its own


def test_a_diverged_trainer_is_not_retried_and_says_why(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "diverge")
    with pytest.raises(DivergedError, match=r"(?s)^Traceback\nloop\.py line 7.*gradients are nan.*trainer\.log"):
        train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="diverged")
    assert [line for line in calls(data_dir) if line.startswith("train")] == ["train from segment 0"]
    (run,) = MlflowClient(tracking_uri=Settings().tracking_uri).search_runs(["1"])
    assert run.info.status == "FAILED"


def test_a_stuck_trainer_tells_its_stacks_and_is_replaced(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "hang")
    train_grpo("grpo-geo3k-tiny", overrides=[*SMALL, "segment.hang_minutes=0.1"], run_id="hang")
    run_dir = data_dir / "runs" / "hang"
    assert failures(run_dir) == [("hang", 0)]
    (dump,) = (run_dir / "stacks" / "hang-1").glob("trainer-*.txt")
    assert "_fail_once" in dump.read_text()
    record = json.loads((run_dir / "failures.jsonl").read_text())
    assert "no progress for 0.1 minutes" in record["error"]
    assert "in _fail_once" in record["error"]
    assert trainings(data_dir) == ["train from segment 0", "train from segment 1"]


def test_a_rollback_goes_on_changed_and_pauses_after_too_many(data_dir: Path) -> None:
    rule = '[{"metric": "reward/mean", "above": 0.25, "action": "rollback", "max_rollbacks": 2}]'
    overrides = [*SMALL, f"health={rule}"]
    with pytest.raises(HealthError, match="The run has gone back 2 times already"):
        train_grpo("grpo-geo3k-tiny", overrides=overrides, run_id="back")
    run_dir = data_dir / "runs" / "back"
    assert failures(run_dir) == [("health: rollback", 0), ("health: rollback", 0), ("health: pause", None)]
    assert trainings(data_dir) == ["train from segment 0", "train from segment 1", "train from segment 1"]
    told = adjustments(run_dir)
    assert [len(item.interventions) for item in told] == [0, 1, 1]
    assert [item.learning_rate_factor(3) for item in told] == [1.0, 0.5, 0.25]
    assert "Paused at step 3" in read_health_artifact("grpo-geo3k-tiny-health")


def test_a_continued_run_must_keep_the_settings_that_affect_results(data_dir: Path) -> None:
    open_run(load_experiment("grpo-geo3k-tiny"), "same", Settings())
    other = load_experiment("grpo-geo3k-tiny", ["training.steps=7", "seed=5", "segment.steps=1"])
    with pytest.raises(ConfigError, match=r"(?s)- seed: was 0, now 5.*steps: was \d+, now 7.*--allow-changes"):
        open_run(other, "same", Settings())
    changes = data_dir / "runs" / "same" / "changes.jsonl"
    assert not changes.exists()
    assert open_run(other, "same", Settings(), allow_changes=True).experiment == other
    (line,) = map(json.loads, changes.read_text().splitlines())
    assert [(c["key"], c["affects_results"]) for c in line["changes"]] == [
        ("seed", True), ("training.steps", True), ("segment.steps", False),
    ]  # fmt: skip
    assert line["step"] == 0
    open_run(other, "same", Settings())  # these are the run's values now
    assert len(changes.read_text().splitlines()) == 1


def test_steps_replayed_after_damage_are_published_once(data_dir: Path) -> None:
    train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="damaged")
    run_dir = data_dir / "runs" / "damaged"
    (run_dir / "checkpoints" / "step-000005" / "weights").write_text("?")
    (run_dir / "checkpoints" / "step-000004" / "manifest.json").unlink()
    summary = train_grpo("grpo-geo3k-tiny", overrides=[*SMALL, "training.steps=7"], run_id="damaged")
    assert [line for line in calls(data_dir) if line.startswith("train")][1:] == ["train from segment 1"]
    assert [path.name for path in sorted((run_dir / "segments").iterdir()) if path.suffix == ".json"] == [
        "0000.json", "0001.json", "0002.json", "0003.json",
    ]  # fmt: skip
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    points = client.get_metric_history(summary.mlflow_run_id, "reward/mean")
    assert [point.step for point in points] == list(range(1, 8))


@pytest.mark.usefixtures("_prefect")
def test_an_interrupt_while_prefect_makes_a_task_run_counts_as_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    @task
    def step() -> None: ...

    monkeypatch.setattr("prefect.task_engine._create_task_run_locally", interrupted)
    with pytest.raises(ValueError, match="Task run is not set") as ended:
        step()
    assert was_interrupted(ended.value)


def test_an_interrupt_between_two_segments_lets_the_trainer_commit_too(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = training.train_segment

    def interrupted(run: Run, dataset: DatasetRef, model: ModelRef, index: int, *others: Any) -> SegmentManifest:
        if index == 1:
            while len(run.journal()) < 4:  # the trainer has gone on by itself
                time.sleep(0.05)
            raise KeyboardInterrupt
        return whole(run, dataset, model, index, *others)

    monkeypatch.setattr("flows.train_grpo.train_segment", interrupted)
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.3")
    overrides = ["training.steps=32", "segment.steps=2", "data.template=math"]
    with pytest.raises(KeyboardInterrupt):
        train_grpo("grpo-geo3k-tiny", overrides=overrides, run_id="between")
    run = existing_run("between", Settings())
    assert not processes.marked(run.trainer_mark)
    assert run.committed_step() == len(run.journal()) >= 4
