"""The flow with fake jobs: failures waited for or answered with a change, longer runs, interrupted commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect import flow

from flows.train_grpo import train_grpo
from infra import processes
from infra.settings import Settings
from rlcore.config import ExperimentConfig
from rlcore.errors import HealthError
from rlcore.segment.journal import read_journal
from rlcore.segment.spec import SegmentManifest
from tasks.experiments import load_experiment
from tasks.run import existing_run, experiment_of_retry, flow_run_name, open_run
from tests.flows.interpreter import fake_interpreter
from tests.flows.outcome import (
    ROOT,
    SMALL,
    adjustments,
    calls,
    failures,
    temporary_folders,
    trainings,
)
from tests.left import still_running
from tests.shell import new_shell


def test_a_removed_dataset_is_made_again(data_dir: Path) -> None:
    from tasks.data import prepare_and_resize

    experiment = load_experiment("grpo-geo3k-tiny", SMALL)
    prepared = prepare_and_resize(experiment, "train")
    (Path(prepared.path) / "report.json").unlink()
    prepare_and_resize(experiment, "train")
    assert calls(data_dir) == ["prepare train", "resize raw-train", "resize raw-train"]


def test_out_of_memory_is_tried_again_with_half_the_tokens(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "memory")
    experiment = load_experiment("grpo-geo3k-tiny", SMALL)
    train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="memory")
    run_dir = data_dir / "runs" / "memory"
    told = [item.tokens_per_microbatch for item in adjustments(run_dir)]
    assert told == [None, experiment.training.tokens_per_microbatch // 2]
    assert failures(run_dir) == [("out of memory", 0)]


def test_a_full_disk_is_waited_for(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "disk")
    train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="disk")
    assert failures(data_dir / "runs" / "disk") == [("storage outage", 0)]
    assert trainings(data_dir) == ["train from segment 0", "train from segment 1"]


def test_a_paused_run_goes_on_when_somebody_continues_it(data_dir: Path) -> None:
    rule = '[{"metric": "reward/mean", "above": 0.25, "action": "pause"}]'
    overrides = [*SMALL, f"health={rule}"]
    with pytest.raises(
        HealthError, match=r"step 3: reward/mean above 0\.25 for 1 step; its last values are 0\.1, 0\.2"
    ):
        train_grpo("grpo-geo3k-tiny", overrides=overrides, run_id="pause")
    assert trainings(data_dir) == ["train from segment 0"]  # never by itself
    run_dir = data_dir / "runs" / "pause"
    manifest = SegmentManifest.model_validate_json((run_dir / "segments" / "0001.json").read_text())
    assert (manifest.last_step, manifest.complete) == (3, False)
    with pytest.raises(HealthError, match="step 4"):  # counted from there, and step 4 breaks it again
        train_grpo("grpo-geo3k-tiny", overrides=overrides, run_id="pause")
    assert train_grpo("grpo-geo3k-tiny", overrides=overrides, run_id="pause").steps == 5


def test_a_retry_goes_on_with_what_it_began_with_whatever_the_file_says_now(data_dir: Path) -> None:
    @flow(name="train-grpo", flow_run_name=flow_run_name)
    def begins_twice(experiment: str) -> tuple[ExperimentConfig | None, ExperimentConfig | None]:
        first = experiment_of_retry(None)
        open_run(load_experiment(experiment, ["seed=3"]), None, Settings())
        return first, experiment_of_retry(None)

    first, second = begins_twice("grpo-geo3k-tiny")
    assert first is None
    assert second is not None
    assert second.seed == 3
    assert experiment_of_retry("any") is None  # outside a flow


def test_a_run_goes_on_for_more_steps_in_other_segments_and_says_so(data_dir: Path) -> None:
    train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="longer")
    # the rest of SMALL is the run's own by now
    summary = train_grpo("grpo-geo3k-tiny", steps=9, overrides=["segment.steps=3"], run_id="longer")
    assert (summary.steps, summary.segments) == (9, 5)  # 2, 2, 1, then 3, 1
    run = existing_run("longer", Settings())
    assert [run.manifest(segment).last_step for segment in range(5)] == [2, 4, 5, 8, 9]
    (line,) = map(json.loads, (run.run_dir / "changes.jsonl").read_text().splitlines())
    assert line["step"] == 5
    assert [(c["key"], c["was"], c["now"]) for c in line["changes"]] == [
        ("training.steps", 5, 9), ("segment.steps", 2, 3),
    ]  # fmt: skip
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    points = client.get_metric_history(summary.mlflow_run_id, "reward/mean")
    assert [point.step for point in points] == list(range(1, 10))


def test_a_damaged_end_of_the_run_is_trained_again(data_dir: Path) -> None:
    summary = train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="end")
    (data_dir / "runs" / "end" / "checkpoints" / "step-000005" / "weights").write_text("?")
    train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="end")
    assert trainings(data_dir) == ["train from segment 0", "train from segment 2"]
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    points = client.get_metric_history(summary.mlflow_run_id, "reward/mean")
    assert [point.step for point in points] == [1, 2, 3, 4, 5]


def test_an_interrupted_command_commits_cleans_up_and_continues(tmp_path: Path) -> None:
    """Ctrl-C, then SIGTERM to the command that goes on, then to the end."""
    environment = {
        **new_shell(),
        "RLFLOW_DATA_DIR": str(tmp_path / "data"),
        "RLFLOW_TRAINER_PYTHON": str(fake_interpreter(tmp_path)),
        "FAKE_STEP_SECONDS": "0.5",
    }
    values = [*SMALL, "training.steps=9", "segment.steps=4"]
    words = [word for value in values for word in ("--set", value)]
    command = [sys.executable, "-m", "tasks.cli", "train", "grpo-geo3k-tiny", *words, "--run-id", "stopped"]
    run_dir, output = tmp_path / "data" / "runs" / "stopped", tmp_path / "output.txt"

    def steps() -> list[int]:
        return [record.step for record in read_journal(run_dir / "journal.jsonl")]

    for number in (signal.SIGINT, signal.SIGTERM):
        before = len(steps())
        with output.open("wb") as log:
            process = processes.start(
                command, env=environment, mark="outer-test", ends_with_parent=True, output=log, cwd=ROOT
            )
        deadline = time.monotonic() + 600
        while len(steps()) <= before and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(timeout=60) == 130, output.read_text()
        assert "--run-id stopped" in output.read_text()
        assert not still_running(str(tmp_path / "data"))
        processes.kill("outer-test")  # its own temporary folder
        assert not temporary_folders(run_dir)
        newest = max((run_dir / "segments").glob("*.json"))
        manifest = SegmentManifest.model_validate_json(newest.read_text())
        assert before < manifest.last_step < 9
        assert steps() == list(range(1, manifest.last_step + 1))

    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(answer.stdout.splitlines()[-1])["steps"] == 9
    assert steps() == list(range(1, 10))
    assert not still_running(str(tmp_path / "data"))
    assert not temporary_folders(run_dir)
