"""The steps of a run without Prefect's server: what each task hands to its job, and what it leaves in the run's folder.

The jobs are those of ``tests/flows/fake_interpreter.py``; MLflow is a database of the test's own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from infra import processes, provenance
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef, DatasetRef, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.data.prepare.folder import dataset_key, resized_key
from rlcore.errors import CheckpointError, ConfigError, DataError, DivergedError, WorkerLostError
from rlcore.segment.journal import StepRecord
from rlcore.segment.spec import SegmentManifest, SegmentSpec
from tasks import champion as latest
from tasks import evaluate as evaluation
from tasks import models
from tasks import train as training
from tasks.champion import Evaluation, Todo, evaluate_todo, evaluations, newest_unevaluated, promote, show_leaderboard
from tasks.cli import app
from tasks.data import Split, _require_problems, prepare_dataset, prepare_spec, resize_images, resize_spec
from tasks.evaluate import evaluate_policy, log_evaluation
from tasks.experiments import load_benchmarks, load_experiment
from tasks.lineage import Lineage, _origin_rows, artifact_name, find_lineage, read_origins
from tasks.models import bootstrap_policy, bootstrap_teacher, check_key, check_model, merge_checkpoint, register_model
from tasks.open import describe_run, find_checkpoint, finish_run, open_tracking
from tasks.report import page as reporting
from tasks.report.page import report
from tasks.run import Run, drivers, existing_run, new_run_id, open_run, tracker_of
from tests.flows.interpreter import fake_interpreter

EXPERIMENT = load_experiment("grpo-geo3k-tiny", ["training.steps=5", "segment.steps=2", "data.template=math"])
DATASET = DatasetRef(
    path="/train", digest="train-digest", source="files", num_problems=8, num_rejected=1, num_images=3,
    max_prompt_tokens=9,
)  # fmt: skip
START = ModelRef(path="/start", digest="start-digest", source="tiny", num_parameters=1000)


@pytest.fixture
def data_dir(empty_mlflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_mlflow, tmp_path / "data" / "mlflow" / "mlflow.db")
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RLFLOW_TRAINER_PYTHON", str(fake_interpreter(tmp_path)))
    monkeypatch.setenv("RLFLOW_RETRY_DELAY_SCALE", "0")
    return tmp_path / "data"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Segments whose end was announced, with their last step; the segment's task is called as it is."""
    announced: list[tuple[int, int]] = []
    monkeypatch.setattr(
        training, "announce_checkpoint", lambda _, manifest: announced.append((manifest.segment, manifest.last_step))
    )
    monkeypatch.setattr(training, "train_segment", training.train_segment.fn)
    monkeypatch.setattr(training, "_TICK_SECONDS", 0.05)
    return announced


def calls(data_dir: Path) -> list[str]:
    return (data_dir / "calls.txt").read_text().splitlines()


def spec_of_last_trainer(run: Run) -> SegmentSpec:
    return SegmentSpec.model_validate_json((run.run_dir / "spec.json").read_text())


def test_data_and_model_are_made_by_their_jobs_below_the_data_folder(data_dir: Path) -> None:
    prepared = prepare_dataset.fn(EXPERIMENT, "validation")
    assert prepared.path == str(data_dir / "datasets" / "raw-validation")
    assert prepared.source == EXPERIMENT.data.validation
    resized = resize_images.fn(EXPERIMENT, "validation", prepared)
    assert resized.path == str(data_dir / "datasets" / "resized-raw-validation")
    assert bootstrap_policy.fn(EXPERIMENT.model).path == str(data_dir / "models" / "start")
    assert calls(data_dir) == ["prepare validation", "resize raw-validation", "bootstrap"]
    with pytest.raises(DataError, match=r"^files has no usable problem: all 1 were set aside; /train/rejects\.jsonl"):
        _require_problems(DATASET.model_copy(update={"num_problems": 0}))


def test_a_teacher_is_made_once_for_a_policy_and_the_trainer_and_the_lineage_get_it(data_dir: Path) -> None:
    assert bootstrap_teacher.fn(EXPERIMENT, START) is None
    taught = load_experiment("grpo-geo3k-tiny", ["algorithm.teacher.path=tiny"])
    teacher = bootstrap_teacher.fn(taught, START)
    assert teacher is not None
    assert teacher.path == str(data_dir / "models" / "start")
    assert bootstrap_teacher.fn(taught, START) == teacher
    assert calls(data_dir) == ["bootstrap"]
    bootstrap_teacher.fn(taught, START.model_copy(update={"digest": "other"}))
    assert calls(data_dir) == ["bootstrap"] * 2
    run = open_run(taught, "taught", Settings())
    describe_run.fn(run, DATASET, DATASET, START, teacher)
    (origin,) = read_origins(run.run_dir)
    assert origin.teacher == teacher
    assert f"{teacher.path} ({teacher.digest})" in dict(_origin_rows(origin, str(run.run_dir)))["teacher"]


def test_a_model_is_compared_once_for_its_content_and_what_changes_the_comparison(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: list[tuple[str, str]] = []
    monkeypatch.setattr(models, "create_markdown_artifact", lambda text, key: pages.append((text, key)))
    model = bootstrap_policy.fn(EXPERIMENT.model)

    def with_check(value: str) -> ExperimentConfig:
        changed = EXPERIMENT.model.model_copy(update={"check": value})
        return EXPERIMENT.model_copy(update={"model": changed})

    assert check_model.fn(with_check("off"), model) is None
    check = check_model.fn(EXPERIMENT, model)
    assert check_model.fn(EXPERIMENT, model) == check
    assert calls(data_dir) == ["bootstrap", "check"]
    assert pages == [(check.markdown(), f"{EXPERIMENT.name}-model")] * 2
    assert "| trainer | agrees | 1e-06 | 0.001 |" in check.markdown()
    check_model.fn(with_check("on"), model)  # with an engine
    check_model.fn(EXPERIMENT, model.model_copy(update={"digest": "other"}))
    on_gpu = EXPERIMENT.resources.model_copy(update={"device": "cuda"})
    check_model.fn(EXPERIMENT.model_copy(update={"resources": on_gpu}), model)
    assert calls(data_dir) == ["bootstrap", "check", "check", "check", "check"]
    key = check_key(EXPERIMENT, model, with_engine=True)
    assert check_key(with_check("on"), model.model_copy(update={"path": "/moved"}), with_engine=True) == key
    other = EXPERIMENT.rollout.model_copy(update={"dtype": "float16"})
    assert check_key(EXPERIMENT.model_copy(update={"rollout": other}), model, with_engine=True) != key


def test_a_policy_is_evaluated_once_and_its_table_moves_with_the_data_folder(data_dir: Path) -> None:
    first = evaluate_policy.fn(EXPERIMENT, START, START, DATASET)
    again = evaluate_policy.fn(EXPERIMENT, START.model_copy(update={"path": "/elsewhere"}), START, DATASET)
    assert calls(data_dir) == ["evaluate 0"]
    assert (first.policy, again.policy) == ("/start", "/elsewhere")
    assert again.model_copy(update={"policy": "/start"}) == first
    assert Path(first.table).parent.parent == data_dir / "evaluations"
    Path(first.table).unlink()
    evaluate_policy.fn(EXPERIMENT, START, START, DATASET)
    other = ModelRef(path="/start", digest="other-digest", source="tiny", num_parameters=1000)
    evaluate_policy.fn(EXPERIMENT, other, START, DATASET)
    evaluate_policy.fn(EXPERIMENT, START, other, DATASET)
    evaluate_policy.fn(EXPERIMENT, START, START, DATASET.model_copy(update={"digest": "other"}))
    assert calls(data_dir) == ["evaluate 0"] * 5


def test_what_an_evaluation_depends_on_and_what_not() -> None:
    def key(**changes: object) -> str:
        return evaluation.evaluation_content(EXPERIMENT.model_copy(update=changes), START, START, DATASET)

    assert key(seed=EXPERIMENT.seed + 1) != key()
    assert key(training=EXPERIMENT.training.model_copy(update={"steps": 9})) == key()
    assert key(evaluation=EXPERIMENT.evaluation.model_copy(update={"temperature": 0.123})) != key()


def test_a_run_from_its_opening_to_its_registered_model(
    data_dir: Path,
    told: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = Settings()
    run = open_run(EXPERIMENT, "whole", settings)
    open_tracking.fn(run)
    validation = DATASET.model_copy(update={"digest": "validation-digest", "path": "/validation"})
    facts = provenance.collect()
    monkeypatch.setattr(provenance, "collect", lambda: facts)  # somebody may edit a file while the test runs
    mlflow_run_id = describe_run.fn(run, DATASET, validation, START)
    before = evaluate_policy.fn(EXPERIMENT, START, START, validation)
    segments = training.train_all_segments(run, DATASET, START)
    assert [(item.segment, item.first_step, item.last_step) for item in segments] == [(0, 0, 2), (1, 2, 4), (2, 4, 5)]
    assert told[0] == (0, 2)
    assert set(told) <= {(0, 2), (1, 4), (2, 5)}, "not those that the trainer had done before anybody looked"
    assert [record.step for record in run.journal()] == [1, 2, 3, 4, 5]
    assert not processes.marked(run.trainer_mark)
    assert training._running(run) is None
    spec = spec_of_last_trainer(run)
    assert (spec.run_id, spec.run_dir, spec.experiment) == ("whole", run.run_dir, run.experiment)
    assert (spec.dataset, spec.model) == (DATASET, START)
    assert spec.driver_deadline_seconds == settings.driver_deadline_seconds
    assert training.train_all_segments(run, DATASET, START) == segments
    assert calls(data_dir) == ["evaluate 0", "train from segment 0"]

    last = segments[-1].checkpoint
    after = evaluate_policy.fn(EXPERIMENT, last, START, validation)
    merged = merge_checkpoint.fn(EXPERIMENT, last, START, DATASET)
    assert merged.path == str(data_dir / "models" / "merged-5")
    registered = register_model.fn(run, merged, last, after)
    assert registered == merged.model_copy(update={"registered_name": "grpo-geo3k-tiny", "registered_version": "1"})
    assert register_model.fn(run, merged, last, after) == registered
    log_evaluation.fn(run, after, "eval", last)

    pages: list[tuple[str, str]] = []
    monkeypatch.setattr(reporting, "create_markdown_artifact", lambda text, key: pages.append((key, text)))
    summary = report.fn(run, validation, before, after, segments, registered, last, 12.0)
    finish_run.fn(run)
    assert run.finished_marker.exists()
    assert (summary.accuracy_before, summary.accuracy_after, summary.steps) == (0.25, 0.75, 5)
    ((key, text),) = pages
    assert key == "grpo-geo3k-tiny-report"
    assert "(registered: grpo-geo3k-tiny version 1)" in text
    assert json.loads((run.report_dir / "evaluations.json").read_text())[1]["accuracy"] == 0.75
    assert json.loads((run.report_dir / "cost.json").read_text())["gpu_seconds"]["generate"] == pytest.approx(
        1.0
    )  # two devices
    assert "<title>whole</title>" in (run.report_dir / "report.html").read_text()

    client = MlflowClient(tracking_uri=settings.tracking_uri)
    found = client.get_run(mlflow_run_id)
    assert found.info.status == "FINISHED"
    expected = {
        "rlflow.experiment_digest": EXPERIMENT.digest(), "rlflow.dataset_digest": "train-digest",
        "rlflow.validation_digest": "validation-digest", "rlflow.model": "/start",
        "rlflow.model_digest": "start-digest", "rlflow.run_dir": str(run.run_dir),
    }  # fmt: skip
    assert expected.items() <= found.data.tags.items()
    assert found.data.params["training.steps"] == "5"
    assert [item.dataset.digest for item in found.inputs.dataset_inputs] == ["train-digest", "validation-digest"]
    contexts = [{tag.key: tag.value for tag in item.tags} for item in found.inputs.dataset_inputs]
    assert [tags["mlflow.data.context"] for tags in contexts] == ["training", "validation"]
    (accuracy,) = client.get_metric_history(mlflow_run_id, "eval/accuracy")
    assert (accuracy.step, accuracy.value, accuracy.timestamp) == (5, 0.75, round(after.at * 1000))
    assert {name.removeprefix("eval/") for name in found.data.metrics if name.startswith("eval/")} == {
        "accuracy", "accuracy_low", "accuracy_high", "reward", "reward_low", "reward_high", "truncated", "ungraded",
    }  # fmt: skip
    points = client.get_metric_history(mlflow_run_id, "reward/mean")
    assert [point.step for point in points] == [1, 2, 3, 4, 5]
    tracker = tracker_of(run, settings)
    assert {"report/report.html", "report/curves.png", "report/report.md"} <= set(tracker.artifact_names("report"))
    assert "eval/step-000005/table.parquet" in tracker.artifact_names("eval/step-000005")
    assert {"experiment.json", "origins.jsonl", "references.json"} <= set(tracker.artifact_names(""))
    version = client.get_model_version_by_alias("grpo-geo3k-tiny", "verified")
    assert str(version.version) == "1"
    outputs = {item.model_id: item.step for item in found.outputs.model_outputs}
    assert list(outputs.values()) == [5, 5], "the registered model, and the checkpoint that it was merged from"
    for model_id in outputs:
        assert {point.key: point.value for point in client.get_logged_model(model_id).metrics}["eval/accuracy"] == 0.75
    assert version.description == f"tiny after 5 GRPO steps of run whole. Files: {merged.path}"
    assert {
        "rlflow.run_id": "whole", "rlflow.experiment_digest": EXPERIMENT.digest(), "rlflow.checkpoint": last.path,
        "rlflow.step": "5", "rlflow.model_digest": "merged-5", "eval.accuracy": "0.7500",
        "eval.dataset_digest": "validation-digest",
    }.items() <= version.tags.items()  # fmt: skip
    name = artifact_name("grpo-geo3k-tiny", "1")
    lineage = Lineage.model_validate_json(Path(client.download_artifacts(mlflow_run_id, name)).read_text())
    assert (lineage.model, lineage.checkpoint, lineage.mlflow_run_id) == (registered, last, mlflow_run_id)
    assert [(item.first_step, item.last_step, item.on_disk) for item in lineage.segments] == [
        (0, 2, True), (2, 4, True), (4, 5, True),
    ]  # fmt: skip
    capsys.readouterr()
    app(["lineage", "grpo-geo3k-tiny@verified", "--json"], standalone_mode=False)
    tree = json.loads(capsys.readouterr().out)
    assert tree.pop("trained") is None
    assert Lineage.model_validate_json(json.dumps(tree)) == lineage
    app(["lineage", "grpo-geo3k-tiny/1"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    width = len("code 2026-11-23T08:19:44+00:00")
    assert lines == [f"{row:<{width}}  {text}" for row, text in lineage.rows()]
    assert lines[1] == f"{'run':<{width}}  whole, {run.run_dir}; MLflow run {mlflow_run_id}"
    assert find_lineage("grpo-geo3k-tiny", settings) == (lineage, run)
    told_rows = dict(lineage.rows())
    assert told_rows["data, train"] == ("files: 8 rows, 1 rejected, 3 images; digest train-digest, /train")
    assert told_rows["started from"] == "tiny, /start (start-digest)"
    assert told_rows["machine"] == facts.hardware
    assert re.fullmatch(r"1: \d{4}-\d\d-\d\dT[\d:]+\+00:00 on \S+", told_rows["starts"])
    with pytest.raises(SystemExit, match="^RegistryError: .*grpo-geo3k-tiny"):
        app(["lineage", "grpo-geo3k-tiny/7"], standalone_mode=False)
    with pytest.raises(SystemExit, match="^StorageError: "):
        app(["lineage", "grpo-geo3k-tiny/1", "--step", "3"], standalone_mode=False)
    (origin,) = read_origins(run.run_dir)
    assert (origin.train, origin.validation, origin.base) == (DATASET, validation, START)
    assert origin.reward is None
    folder = run.run_dir / "origins"
    assert {path.name for path in folder.iterdir()} == set(origin.files)
    assert "torch" in (folder / origin.environment).read_text()
    describe_run.fn(run, DATASET, validation, START)
    assert len(read_origins(run.run_dir)) == 1, "the same start"
    describe_run.fn(run, validation, validation, START)
    assert len(read_origins(run.run_dir)) == 2


def test_a_killed_trainer_is_counted_and_the_next_try_goes_on(
    data_dir: Path, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "crash")
    run = open_run(EXPERIMENT, "crash", Settings())
    assert training.train_segment(run, DATASET, START, 0).last_step == 2
    with pytest.raises(WorkerLostError, match=r"^about to be killed\n\n.*SIGKILL.*The trainer's log: .*trainer\.log$"):
        training.train_segment(run, DATASET, START, 1)
    (failure,) = map(json.loads, (run.run_dir / "failures.jsonl").read_text().splitlines())
    assert (failure["step"], failure["attempt"]) == (2, 1)
    assert not processes.marked(run.trainer_mark)
    assert training.train_segment(run, DATASET, START, 1).last_step == 4
    assert told == [(0, 2), (1, 4)]
    training._LINKS.pop(run.run_dir).end(None)
    processes.kill(run.trainer_mark)


def test_a_trainer_that_reports_its_error_ends_the_segment_with_it(
    data_dir: Path, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "diverge")
    run = open_run(EXPERIMENT, "diverged", Settings())
    with pytest.raises(DivergedError, match=r"(?s)^Traceback\nloop\.py line 7\n\n.*gradients are nan.*trainer\.log$"):
        training.train_all_segments(run, DATASET, START)
    assert told == [(0, 2)]
    assert run.run_dir not in training._LINKS
    assert training._running(run) is None


def test_an_interrupt_asks_the_trainer_to_commit_its_last_steps(
    data_dir: Path, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.2")
    run = open_run(load_experiment("grpo-geo3k-tiny", ["training.steps=90", "segment.steps=90"]), "stop", Settings())

    def interrupted(run: Run, *_: object) -> None:
        if len(run.journal()) >= 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "_tick", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.train_all_segments(run, DATASET, START)
    manifest = run.manifest(0)
    assert isinstance(manifest, SegmentManifest)
    assert not manifest.complete
    assert manifest.last_step == len(run.journal()) >= 3
    assert isinstance(manifest.checkpoint, CheckpointRef)
    assert not processes.marked(run.trainer_mark)
    assert told == []


def test_a_rule_that_only_warns_is_announced_and_training_goes_on(
    data_dir: Path, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[tuple[str, int, str]] = []
    monkeypatch.setattr(
        training, "announce_on_prefect", lambda run, breach, said: announced.append((run.run_id, breach.step, said))
    )
    rule = '[{"metric": "reward/mean", "above": 0.25, "action": "warn"}]'
    settings = ["training.steps=5", "segment.steps=5", "data.template=math", f"health={rule}"]
    run = open_run(load_experiment("grpo-geo3k-tiny", settings), "warned", Settings())
    assert [item.last_step for item in training.train_all_segments(run, DATASET, START)] == [5]
    assert announced == [("warned", 3, "Training goes on.")]


def test_a_damaged_end_of_a_run_is_trained_again(data_dir: Path, told: list[tuple[int, int]]) -> None:
    run = open_run(EXPERIMENT, "damaged", Settings())
    segments = training.train_all_segments(run, DATASET, START)
    (Path(segments[-1].checkpoint.path) / "weights").write_text("?")
    again = training.train_all_segments(run, DATASET, START)
    assert [item.last_step for item in again] == [2, 4, 5]
    assert (Path(again[-1].checkpoint.path) / "weights").read_text() == "5"
    assert calls(data_dir) == ["train from segment 0", "train from segment 2"]
    assert told[-1] == (2, 5)


def test_a_continued_run_keeps_its_settings_or_records_what_changed(data_dir: Path) -> None:
    settings = Settings()
    run = open_run(EXPERIMENT, "same", settings)
    assert open_run(EXPERIMENT, "same", settings) == run
    words = ["training.steps=7", "segment.steps=1", "data.template=math"]
    longer = load_experiment("grpo-geo3k-tiny", [*words, "seed=5"])
    with pytest.raises(ConfigError, match=r"(?s)^run same was started with other settings:\n- seed: .*leave --run"):
        open_run(longer, "same", settings)
    changes = run.run_dir / "changes.jsonl"
    assert not changes.exists()
    assert existing_run("same", settings).experiment == EXPERIMENT
    (run.run_dir / "journal.jsonl").write_text(StepRecord(3, 3, {}).line())
    assert open_run(longer, "same", settings, allow_changes=True).experiment == longer
    (line,) = map(json.loads, changes.read_text().splitlines())
    assert line["step"] == 3
    assert {change["key"]: change["affects_results"] for change in line["changes"]} == {
        "seed": True, "training.steps": False, "segment.steps": False,
    }  # fmt: skip
    shorter = load_experiment(
        "grpo-geo3k-tiny", ["training.steps=7", "segment.steps=3", "data.template=math", "seed=5"]
    )
    assert open_run(shorter, "same", settings).experiment == shorter, "segments do not affect results"
    assert len(changes.read_text().splitlines()) == 2
    assert [driver.pid for driver in drivers(run)] == [os.getpid()] * 4
    with pytest.raises(CheckpointError, match="run same has no whole checkpoint yet"):
        find_checkpoint.fn(run)
    assert re.fullmatch(r"toy-\d{8}-\d{6}-[0-9a-f]{4}", new_run_id("toy"))


def test_a_cached_dataset_depends_on_what_goes_in(data_dir: Path, tmp_path: Path) -> None:
    def keys(experiment: ExperimentConfig, split: Split, dataset: DatasetRef) -> tuple[str, str]:
        settings = Settings()
        prepare, resize = prepare_spec(experiment, split, settings), resize_spec(experiment, dataset, settings)
        return dataset_key(prepare), resized_key(resize)

    def changed(part: str, **values: object) -> ExperimentConfig:
        return EXPERIMENT.model_copy(update={part: getattr(EXPERIMENT, part).model_copy(update=values)})

    prepared, resized = keys(EXPERIMENT, "train", DATASET)
    assert keys(changed("training", steps=99), "train", DATASET) == (prepared, resized)
    assert keys(EXPERIMENT, "validation", DATASET)[0] != prepared
    assert keys(EXPERIMENT, "train", DATASET.model_copy(update={"digest": "other"}))[1] != resized
    assert keys(changed("data", max_prompt_tokens=77), "train", DATASET)[0] != prepared


@pytest.fixture
def steps(told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks behind the champion as plain functions; data and start policy are given."""
    for module, names in (
        (evaluation, ["evaluate_policy", "log_evaluation"]),
        (latest, ["evaluate_policy", "merge_checkpoint", "register_model", "note_evaluation", "judge"]),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name).fn)
    monkeypatch.setattr(latest, "bootstrap_policy", lambda model: bootstrap_policy.fn(model))
    monkeypatch.setattr(latest, "prepare_and_resize", lambda _, split: DATASET.model_copy(update={"digest": split}))


def champion() -> dict[str, str]:
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    return dict(client.get_model_version_by_alias("grpo-geo3k-tiny", "champion").tags)


def judged(caplog: pytest.LogCaptureFixture) -> str:
    return [item.getMessage() for item in caplog.records if item.getMessage().startswith("champion: ")][-1]


def trained(name: str, *changes: str) -> Run:
    run = open_run(load_experiment("grpo-geo3k-tiny", ["segment.steps=2", *changes]), name, Settings())
    training.train_all_segments(run, DATASET, START)
    for number, path in enumerate(sorted((run.run_dir / "checkpoints").iterdir())):
        os.utime(path / "manifest.json", (number, number))
    return run


def evaluated() -> tuple[Todo, Evaluation]:
    todo = newest_unevaluated(load_benchmarks(["tiny-geometry"]), 4, ())
    assert todo is not None
    done = evaluate_todo(todo)
    promote(todo, done, 0.95)
    return todo, done


def test_the_newest_checkpoint_is_evaluated_first_and_a_champion_replaced_by_more_than_chance(
    data_dir: Path, steps: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # Step 6, seen first, is champion; step 4 is better by chance, and step 2 by 30 problems of 40.
    monkeypatch.setenv("FAKE_REPEATED", "5")
    monkeypatch.setenv("FAKE_RIGHT", json.dumps({"2": 8, "4": 3, "6": 2}))
    run = trained("run", "training.steps=6")
    benchmarks = load_benchmarks(["tiny-geometry"])
    assert newest_unevaluated(load_benchmarks(["gsm8k"]), 4, ()) is None, "not of this experiment"
    todo, done = evaluated()
    assert (todo.checkpoint.step, done.benchmark, done.key) == (6, "tiny-geometry", todo.key)
    assert todo.suite.resources.workers == 4
    assert (todo.suite.data.template, run.experiment.data.template) == ("tiny", run.experiment.data.template)
    assert judged(caplog) == "champion: grpo-geo3k-tiny, step 6 of run: the first champion"
    assert (champion()["rlflow.step"], champion()["eval.accuracy"]) == ("6", "0.2500")
    again = newest_unevaluated(benchmarks, 4, ())
    assert again is not None
    assert again.checkpoint.step == 4
    skipped = newest_unevaluated(benchmarks, 4, {again.key})
    assert skipped is not None
    assert skipped.checkpoint.step == 2
    evaluated()
    assert "against the champion, step 6 of run" in judged(caplog)
    assert champion()["rlflow.step"] == "6"
    evaluated()
    assert champion()["rlflow.step"] == "2"
    assert newest_unevaluated(benchmarks, 4, ()) is None
    assert [item.report.step for item in evaluations(run)] == [6, 4, 2]
    latest.note_evaluation(run, done)
    assert len(evaluations(run)) == 3, "noted once"
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    points = client.get_metric_history(tracker_of(run, Settings()).mlflow_run_id, "eval/tiny-geometry/accuracy")
    assert {point.step: point.value for point in points} == {2: 1.0, 4: 0.375, 6: 0.25}

    pages: list[tuple[object, ...]] = []
    monkeypatch.setattr(latest, "create_table_artifact", lambda rows, **about: pages.append((rows, about)))
    show_leaderboard.fn()
    ((rows, about),) = pages
    assert about["key"] == "leaderboard"
    assert [(row["step"], row["accuracy"], row["champion"]) for row in rows] == [
        (2, 1.0, "champion"), (4, 0.375, ""), (6, 0.25, ""),
    ]  # fmt: skip
    assert rows[1] == {
        "benchmark": "tiny-geometry", "accuracy": 0.375, "95% interval": "[0.275, 0.475]",
        "experiment": "grpo-geo3k-tiny", "run": "run", "step": 4, "champion": "",
    }  # fmt: skip
    (run.run_dir / "evaluations.jsonl").unlink()
    assert newest_unevaluated(benchmarks, 4, ()) is not None
    run.ablation_marker.touch()
    assert newest_unevaluated(benchmarks, 4, ()) is None, "an ablation evaluates its own"


def test_a_champion_whose_run_is_gone_is_judged_by_what_is_left_of_it(
    data_dir: Path, steps: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("FAKE_REPEATED", "5")
    monkeypatch.setenv("FAKE_RIGHT", json.dumps({"0": 1, "2": 2, "4": 8}))  # "0" is a merged model's as well
    trained("old", "training.steps=2")
    evaluated()
    shutil.rmtree(data_dir / "runs" / "old")
    before = calls(data_dir).count("evaluate 0")
    trained("new", "training.steps=4", "segment.steps=4")
    evaluated()
    assert calls(data_dir).count("evaluate 0") == before + 1, "the champion's merged model"
    assert (champion()["rlflow.run_id"], champion()["rlflow.step"]) == ("new", "4")

    shutil.rmtree(data_dir / "runs" / "new")
    for folder in (data_dir / "models").glob("merged-*"):
        shutil.rmtree(folder)
    trained("third", "training.steps=2", "seed=1")
    todo, done = evaluated()
    assert "against the champion's recorded accuracy, because neither the run nor the merged model of step 4" in judged(
        caplog
    )
    assert champion()["rlflow.run_id"] == "new"
    other = done.model_copy(update={"report": done.report.model_copy(update={"dataset_digest": "other"})})
    verdict = latest.judge(todo, other, 0.95)
    assert (verdict.promote, verdict.compared) == (False, False)
    assert verdict.reason.startswith("nothing to compare with: the champion, step 4 of new, has no evaluation")
