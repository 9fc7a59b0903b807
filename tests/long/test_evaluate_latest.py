"""evaluate-latest: what is left to do, its numbers in MLflow, the champion, the leaderboard; with fake jobs."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.artifacts import Artifact

import flows.evaluate_latest as flow
from flows.evaluate_latest import evaluate_latest
from flows.train_grpo import train_grpo
from infra.logs import get_logger
from infra.processes import alone
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef
from rlcore.errors import ConfigError
from tasks.champion import Evaluation, Todo, evaluations, newest_unevaluated, promote
from tasks.experiments import deciding_benchmark, load_benchmarks, load_experiment
from tasks.run import Run, existing_run

SMALL = ["segment.steps=2", "data.template=math"]


def evaluated(data_dir: Path) -> list[str]:
    lines = (data_dir / "calls.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("evaluate")]


def champion_step() -> str:
    client = MlflowClient(tracking_uri=Settings().tracking_uri, registry_uri=Settings().tracking_uri)
    return str(client.get_model_version_by_alias("grpo-geo3k-tiny", "champion").tags["rlflow.step"])


def test_the_newest_comes_first_once_and_only_more_than_chance_makes_a_champion(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the first seen, step 4, is champion: step 2 is worse; 6 is better by chance; 8 by 30 problems of 40
    monkeypatch.setenv("FAKE_REPEATED", "5")
    monkeypatch.setenv("FAKE_RIGHT", json.dumps({"2": 1, "4": 2, "6": 3, "8": 8}))
    summary = train_grpo("grpo-geo3k-tiny", steps=4, overrides=SMALL, run_id="run")
    before = len(evaluated(data_dir))
    evaluate_latest(benchmarks=["tiny-geometry"])
    assert evaluated(data_dir)[before:] == ["evaluate 4", "evaluate 2"]
    assert champion_step() == "4"

    evaluate_latest(benchmarks=["tiny-geometry"])
    assert len(evaluated(data_dir)) == before + 2, "each checkpoint once"

    train_grpo("grpo-geo3k-tiny", steps=6, overrides=SMALL, run_id="run")
    evaluate_latest(benchmarks=["tiny-geometry"])
    assert champion_step() == "4"
    train_grpo("grpo-geo3k-tiny", steps=8, overrides=SMALL, run_id="run")
    evaluate_latest(benchmarks=["tiny-geometry"])
    assert champion_step() == "8"

    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    points = client.get_metric_history(summary.mlflow_run_id, "eval/tiny-geometry/accuracy")
    assert {point.step: point.value for point in points} == {2: 0.125, 4: 0.25, 6: 0.375, 8: 1.0}
    board = Artifact.get("leaderboard")
    assert board is not None
    rows = json.loads(str(board.data))
    assert [(row["step"], row["champion"]) for row in rows] == [(8, "champion"), (6, ""), (4, ""), (2, "")]
    assert [item.report.step for item in evaluations(existing_run("run", Settings()))] == [4, 2, 6, 8]

    for table in (data_dir / "evaluations").rglob("*.parquet"):
        os.utime(table, (1, 1))  # as in a copy of the data folder
    (data_dir / "runs" / "run" / "evaluations.jsonl").unlink()
    evaluate_latest(benchmarks=["tiny-geometry"])
    assert len(client.get_metric_history(summary.mlflow_run_id, "eval/tiny-geometry/accuracy")) == 4, "logged once"


def test_another_one_at_the_same_folder_does_nothing(data_dir: Path) -> None:
    train_grpo("grpo-geo3k-tiny", steps=2, overrides=SMALL, run_id="run")
    before = evaluated(data_dir)
    with alone(Settings(), "evaluate-latest") as mine:
        assert mine
        evaluate_latest(benchmarks=["tiny-geometry"])
    assert evaluated(data_dir) == before
    todo = newest_unevaluated(load_benchmarks(["tiny-geometry"]), None, ())
    assert todo is not None
    assert todo.suite.data.template == "tiny", "the benchmark's, not the run's"
    assert newest_unevaluated(load_benchmarks(["tiny-geometry"]), None, {todo.key}) is None
    assert newest_unevaluated(load_benchmarks(["gsm8k"]), None, ()) is None, "not a benchmark of this experiment"
    todo.run.ablation_marker.touch()
    assert newest_unevaluated(load_benchmarks(["tiny-geometry"]), None, ()) is None, "the ablation evaluates it"


def test_an_unknown_benchmark_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no benchmark gsm9k .*geometry3k, math500, gsm8k"):
        load_benchmarks(["gsm9k"])


def judged(caplog: pytest.LogCaptureFixture) -> str:
    """What was said about the last champion."""
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("champion: ")][-1]


def test_a_champion_whose_run_is_gone_is_evaluated_again_or_taken_at_its_recorded_accuracy(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, get_logger().name)
    monkeypatch.setenv("FAKE_REPEATED", "5")
    monkeypatch.setenv("FAKE_RIGHT", json.dumps({"0": 1, "2": 2, "4": 8}))  # "0" is a merged model's as well
    train_grpo("grpo-geo3k-tiny", steps=2, overrides=SMALL, run_id="old")
    evaluate_latest(benchmarks=["tiny-geometry"])
    shutil.rmtree(data_dir / "runs" / "old")
    before = len(evaluated(data_dir))
    train_grpo("grpo-geo3k-tiny", steps=4, overrides=SMALL, run_id="new")
    evaluate_latest(benchmarks=["tiny-geometry"])
    assert evaluated(data_dir)[before:].count("evaluate 0") == 1, "the champion's merged model"
    assert champion_step() == "4"

    shutil.rmtree(data_dir / "runs" / "new")
    for folder in (data_dir / "models").glob("merged-*"):
        shutil.rmtree(folder)
    monkeypatch.setenv("FAKE_RIGHT", json.dumps({"2": 2}))
    train_grpo("grpo-geo3k-tiny", steps=2, overrides=[*SMALL, "seed=1"], run_id="third")
    evaluate_latest(benchmarks=["tiny-geometry"])
    assert "against the champion's recorded accuracy" in judged(caplog)
    assert champion_step() == "4"


def test_an_alias_set_by_hand_stays_and_ends_nothing(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, get_logger().name)
    train_grpo("grpo-geo3k-tiny", steps=2, overrides=SMALL, run_id="run")
    client = MlflowClient(tracking_uri=Settings().tracking_uri, registry_uri=Settings().tracking_uri)
    version = client.create_model_version("grpo-geo3k-tiny", source=data_dir.as_uri()).version
    client.set_registered_model_alias("grpo-geo3k-tiny", "champion", version)
    evaluate_latest(benchmarks=["tiny-geometry"])
    assert "a version that rlflow did not register" in judged(caplog)
    assert client.get_model_version_by_alias("grpo-geo3k-tiny", "champion").version == version
    rows = json.loads(str(Artifact.get("leaderboard").data))
    assert [row["champion"] for row in rows] == [""]


def test_the_experiment_s_first_benchmark_decides_whichever_are_chosen() -> None:
    assert deciding_benchmark("grpo-geo3k") == "geometry3k"
    todo = Todo(
        Run(run_id="r", run_dir=Path("none"), experiment=load_experiment("grpo-geo3k")),
        checkpoint=CheckpointRef(path="none", step=2, policy_version=2, manifest_sha256="", run_id="r", segment=0),
        committed=0.0,
        benchmark=load_benchmarks(["math500"])[0],
        suite=load_experiment("grpo-math12k"),
    )
    promote(todo, done=None, confidence=0.95)  # type: ignore[arg-type]  # nobody looks at the evaluation


def test_a_checkpoint_that_its_run_removes_meanwhile_is_left_out(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train_grpo("grpo-geo3k-tiny", steps=4, overrides=SMALL, run_id="run")
    before = len(evaluated(data_dir))
    newest = next(iter((data_dir / "runs" / "run" / "checkpoints").glob("step-000004")))
    evaluate = flow.evaluate_todo

    def evaluate_while_it_is_removed(todo: Todo) -> Evaluation:
        shutil.rmtree(newest, ignore_errors=True)
        return evaluate(todo)

    monkeypatch.setattr(flow, "evaluate_todo", evaluate_while_it_is_removed)
    with caplog.at_level(logging.INFO, get_logger().name):
        evaluate_latest(benchmarks=["tiny-geometry"])
    assert evaluated(data_dir)[before:] == ["evaluate 2"]
    assert f"{newest} was removed before it was evaluated" in caplog.text
