"""The flow: order, caching, retries and interruption, with fake jobs behind the real process boundary."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect import flow
from prefect.artifacts import Artifact

from flows.train_grpo import grpo_geo3k
from infra import processes
from infra.settings import Settings
from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.errors import ConfigError, DivergedError, HealthError
from rlcore.segment.adjustments import Adjustments
from rlcore.segment.spec import SegmentManifest
from tasks import training
from tasks.experiments import load_experiment
from tasks.jobs import jobs_mark
from tasks.runs import Run, begun_with, drivers, existing_run, flow_run_name, open_run
from tests.flows.conftest import fake_interpreter
from tests.shell import new_shell

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["training.steps=5", "segment.steps=2", "data.template=math"]
ORDER = [
    "prepare train", "resize raw-train", "prepare validation", "resize raw-validation", "bootstrap",
    "evaluate 0", "train from segment 0", "evaluate 5", "merge 5",
]  # fmt: skip


def calls(data_dir: Path) -> list[str]:
    return (data_dir / "calls.txt").read_text().splitlines()


def test_steps_run_in_order_and_a_second_run_repeats_only_training(data_dir: Path) -> None:
    summary = grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="first")
    assert calls(data_dir) == ORDER
    assert (summary.steps, summary.segments) == (5, 3)
    assert (summary.accuracy_before, summary.accuracy_after) == (0.25, 0.75)
    assert (summary.reward_first, summary.reward_last) == pytest.approx((0.1, 0.5))
    assert (data_dir / "runs" / "first" / "report" / "report.html").stat().st_size > 20_000

    again = grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="first")
    assert calls(data_dir) == ORDER  # everything was found done
    assert again.mlflow_run_id == summary.mlflow_run_id
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    points = client.get_metric_history(summary.mlflow_run_id, "reward/mean")
    assert [point.step for point in points] == [1, 2, 3, 4, 5]
    assert len(client.get_metric_history(summary.mlflow_run_id, "eval/accuracy")) == 2
    run = client.get_run(summary.mlflow_run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["rlflow.dataset_digest"] == "resized-raw-train"

    grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="second")
    assert calls(data_dir) == [*ORDER, "train from segment 0", "evaluate 5", "merge 5"]


def test_a_removed_dataset_is_made_again(data_dir: Path) -> None:
    from tasks.data import prepare_and_resize

    experiment = load_experiment("grpo-geo3k-tiny", SMALL)
    prepared = prepare_and_resize(experiment, "train")
    (Path(prepared.path) / "report.json").unlink()
    prepare_and_resize(experiment, "train")
    assert calls(data_dir) == ["prepare train", "resize raw-train", "resize raw-train"]


def test_a_killed_trainer_is_replaced_and_goes_on_from_its_checkpoint(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "crash")
    grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="crash")
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
        grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="diverged")
    assert [line for line in calls(data_dir) if line.startswith("train")] == ["train from segment 0"]
    (run,) = MlflowClient(tracking_uri=Settings().tracking_uri).search_runs(["1"])
    assert run.info.status == "FAILED"


def trainings(data_dir: Path) -> list[str]:
    return [line for line in calls(data_dir) if line.startswith("train")]


def adjustments(run_dir: Path) -> list[Adjustments]:
    """What each trainer was told."""
    return [Adjustments.model_validate_json(line) for line in (run_dir / "calls.txt").read_text().splitlines()]


def failures(run_dir: Path) -> list[tuple[str, float | None]]:
    lines = (run_dir / "failures.jsonl").read_text().splitlines()
    return [(record["failure"], record["delay"]) for record in map(json.loads, lines)]


def test_out_of_memory_is_tried_again_with_half_the_tokens(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "memory")
    experiment = load_experiment("grpo-geo3k-tiny", SMALL)
    grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="memory")
    run_dir = data_dir / "runs" / "memory"
    told = [item.tokens_per_microbatch for item in adjustments(run_dir)]
    assert told == [None, experiment.training.tokens_per_microbatch // 2]
    assert failures(run_dir) == [("out of memory", 0)]


def test_a_full_disk_is_waited_for(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "disk")
    grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="disk")
    assert failures(data_dir / "runs" / "disk") == [("storage outage", 0)]
    assert trainings(data_dir) == ["train from segment 0", "train from segment 1"]


def test_a_stuck_trainer_tells_its_stacks_and_is_replaced(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_FAILURE", "hang")
    grpo_geo3k("grpo-geo3k-tiny", overrides=[*SMALL, "segment.hang_minutes=0.05"], run_id="hang")
    run_dir = data_dir / "runs" / "hang"
    assert failures(run_dir) == [("hang", 0)]
    (dump,) = (run_dir / "stacks" / "hang-1").glob("trainer-*.txt")
    assert "_fail_once" in dump.read_text()
    record = json.loads((run_dir / "failures.jsonl").read_text())
    assert "no progress for 0.05 minutes" in record["error"]
    assert "in _fail_once" in record["error"]
    assert trainings(data_dir) == ["train from segment 0", "train from segment 1"]


def test_a_paused_run_goes_on_when_somebody_continues_it(data_dir: Path) -> None:
    rule = '[{"metric": "reward/mean", "above": 0.25, "action": "pause"}]'
    overrides = [*SMALL, f"health={rule}"]
    with pytest.raises(
        HealthError, match=r"step 3: reward/mean above 0\.25 for 1 step; its last values are 0\.1, 0\.2"
    ):
        grpo_geo3k("grpo-geo3k-tiny", overrides=overrides, run_id="pause")
    assert trainings(data_dir) == ["train from segment 0"]  # never by itself
    run_dir = data_dir / "runs" / "pause"
    manifest = SegmentManifest.model_validate_json((run_dir / "segments" / "0001.json").read_text())
    assert (manifest.last_step, manifest.complete) == (3, False)
    with pytest.raises(HealthError, match="step 4"):  # counted from there, and step 4 breaks it again
        grpo_geo3k("grpo-geo3k-tiny", overrides=overrides, run_id="pause")
    assert grpo_geo3k("grpo-geo3k-tiny", overrides=overrides, run_id="pause").steps == 5


def test_a_rollback_goes_on_changed_and_pauses_after_too_many(data_dir: Path) -> None:
    rule = '[{"metric": "reward/mean", "above": 0.25, "action": "rollback", "max_rollbacks": 2}]'
    overrides = [*SMALL, f"health={rule}"]
    with pytest.raises(HealthError, match="The run has gone back 2 times already"):
        grpo_geo3k("grpo-geo3k-tiny", overrides=overrides, run_id="back")
    run_dir = data_dir / "runs" / "back"
    assert failures(run_dir) == [("health: rollback", 0), ("health: rollback", 0), ("health: pause", None)]
    assert trainings(data_dir) == ["train from segment 0", "train from segment 1", "train from segment 1"]
    told = adjustments(run_dir)
    assert [len(item.interventions) for item in told] == [0, 1, 1]
    assert [item.learning_rate_factor(3) for item in told] == [1.0, 0.5, 0.25]
    steps = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    rates = [step["metrics"]["optim/learning_rate"] for step in steps]
    assert rates == pytest.approx([3e-4, 3e-4, 3e-4 / 4])
    assert "Paused at step 3" in read_health_artifact("grpo-geo3k-tiny-health")


def read_health_artifact(key: str) -> str:
    found = Artifact.get(key)
    assert found is not None
    return str(found.data)


def test_a_continued_run_must_be_the_same_science(data_dir: Path) -> None:
    open_run(load_experiment("grpo-geo3k-tiny"), "same", Settings())
    other = load_experiment("grpo-geo3k-tiny", ["training.steps=7", "seed=5", "segment.steps=1"])
    with pytest.raises(ConfigError, match=r"(?s)- seed: was 0, now 5.*steps: was \d+, now 7.*--allow-changes"):
        open_run(other, "same", Settings())
    changes = data_dir / "runs" / "same" / "changes.jsonl"
    assert not changes.exists()
    assert open_run(other, "same", Settings(), allow_changes=True).experiment == other
    (line,) = map(json.loads, changes.read_text().splitlines())
    assert [(c["key"], c["science"]) for c in line["changes"]] == [
        ("seed", True), ("training.steps", True), ("segment.steps", False),
    ]  # fmt: skip
    assert line["step"] == 0
    open_run(other, "same", Settings())  # these are the run's values now
    assert len(changes.read_text().splitlines()) == 1


def test_a_retry_goes_on_with_what_it_began_with_whatever_the_file_says_now(data_dir: Path) -> None:
    @flow(name="grpo-geo3k", flow_run_name=flow_run_name)
    def begins_twice(experiment: str) -> tuple[ExperimentConfig | None, ExperimentConfig | None]:
        first = begun_with(None)
        open_run(load_experiment(experiment, ["seed=3"]), None, Settings())
        return first, begun_with(None)

    first, second = begins_twice("grpo-geo3k-tiny")
    assert first is None
    assert second is not None
    assert second.seed == 3
    assert begun_with("any") is None  # outside a flow


def test_a_run_goes_on_for_more_steps_in_other_segments_and_says_so(data_dir: Path) -> None:
    grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="longer")
    # the rest of SMALL is the run's own by now
    summary = grpo_geo3k("grpo-geo3k-tiny", steps=9, overrides=["segment.steps=3"], run_id="longer")
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


def test_steps_replayed_after_damage_are_published_once(data_dir: Path) -> None:
    grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="damaged")
    run_dir = data_dir / "runs" / "damaged"
    (run_dir / "checkpoints" / "step-000005" / "weights").write_text("?")
    (run_dir / "checkpoints" / "step-000004" / "manifest.json").unlink()
    summary = grpo_geo3k("grpo-geo3k-tiny", overrides=[*SMALL, "training.steps=7"], run_id="damaged")
    assert [line for line in calls(data_dir) if line.startswith("train")][1:] == ["train from segment 1"]
    assert [path.name for path in sorted((run_dir / "segments").iterdir()) if path.suffix == ".json"] == [
        "0000.json", "0001.json", "0002.json", "0003.json",
    ]  # fmt: skip
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    points = client.get_metric_history(summary.mlflow_run_id, "reward/mean")
    assert [point.step for point in points] == list(range(1, 8))


def test_a_damaged_end_of_the_run_is_trained_again(data_dir: Path) -> None:
    summary = grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="end")
    (data_dir / "runs" / "end" / "checkpoints" / "step-000005" / "weights").write_text("?")
    grpo_geo3k("grpo-geo3k-tiny", overrides=SMALL, run_id="end")
    assert trainings(data_dir) == ["train from segment 0", "train from segment 2"]
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    points = client.get_metric_history(summary.mlflow_run_id, "reward/mean")
    assert [point.step for point in points] == [1, 2, 3, 4, 5]


def test_an_interrupt_between_two_segments_lets_the_trainer_commit_too(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = training.train_segment

    def interrupted(run: Run, dataset: DatasetRef, model: ModelRef, index: int) -> SegmentManifest:
        if index == 1:
            while len(run.journal()) < 4:  # the trainer has gone on by itself
                time.sleep(0.05)
            raise KeyboardInterrupt
        return whole(run, dataset, model, index)

    monkeypatch.setattr(training, "train_segment", interrupted)
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.3")
    overrides = ["training.steps=32", "segment.steps=2", "data.template=math"]
    with pytest.raises(KeyboardInterrupt):
        grpo_geo3k("grpo-geo3k-tiny", overrides=overrides, run_id="between")
    run = existing_run("between", Settings())
    assert not processes.marked(run.trainer_mark)
    assert run.committed_step() == len(run.journal()) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_commits_cleans_up_and_continues(tmp_path: Path, number: int) -> None:
    environment = {
        **new_shell(),
        "RLFLOW_DATA_DIR": str(tmp_path / "data"),
        "RLFLOW_TRAINER_PYTHON": str(fake_interpreter(tmp_path)),
        "FAKE_STEP_SECONDS": "0.5",
    }
    words = [word for value in SMALL for word in ("--set", value)]
    command = [sys.executable, "-m", "flows.train_grpo", "grpo-geo3k-tiny", *words, "--run-id", "stopped"]
    process = processes.start(
        command,
        env=environment,
        mark="outer-test",
        ends_with_parent=True,
        output=(tmp_path / "output.txt").open("wb"),
        cwd=ROOT,
    )
    run_dir = tmp_path / "data" / "runs" / "stopped"
    deadline = time.monotonic() + 120
    while not (run_dir / "journal.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait(timeout=60) == 130, (tmp_path / "output.txt").read_text()
    assert "--run-id stopped" in (tmp_path / "output.txt").read_text()
    assert not still_running(tmp_path)
    processes.kill("outer-test")  # its own temporary folder
    assert not temporary_folders(run_dir)
    manifest = SegmentManifest.model_validate_json((run_dir / "segments" / "0000.json").read_text())

    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(answer.stdout.splitlines()[-1])["steps"] == 5
    steps = [json.loads(line)["step"] for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]
    assert manifest.last_step < 5
    assert not still_running(tmp_path)
    assert not temporary_folders(run_dir)


def temporary_folders(run_dir: Path) -> list[Path]:
    """What the processes of a run have left under the system's temporary folder, its flow runs' jobs included."""
    run = existing_run(run_dir.name, Settings(data_dir=run_dir.parent.parent))
    marks = [run.trainer_mark, *(jobs_mark(driver.flow_run_id) for driver in drivers(run))]
    root = processes.temporary_folder("any").parent
    return [path for mark in marks for path in root.glob(f"rlflow-{mark}*")]


def still_running(tmp_path: Path) -> list[str]:
    """Processes that work for this test's data folder: server, jobs, trainer and whatever these started."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("RLFLOW_DATA_DIR") == str(tmp_path / "data")
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
