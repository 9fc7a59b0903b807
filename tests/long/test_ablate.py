"""ablate in a terminal: a real Prefect server, real processes for the points, fake jobs behind them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from mlflow import MlflowClient

from infra import processes
from infra.settings import Settings
from rlcore.ablation.results import AblationSummary
from rlcore.segment.journal import read_journal
from tasks.champion import all_runs
from tests.flows.interpreter import fake_interpreter
from tests.left import still_running
from tests.shell import new_shell

ROOT = Path(__file__).resolve().parents[2]
WORDS = [
    "grpo-geo3k-tiny", "--run-id", "study", "--grid", "training.learning_rate=[1e-4, 3e-4]",
    "--point", "training.learning_rate=0.01", "--seeds", "5", "--rungs", "2",
    *(word for value in ("training.steps=4", "segment.steps=2", "data.template=math") for word in ("--set", value)),
]  # fmt: skip
# The base has 3e-4. 1e-4 is worse at step 2 and dropped; 0.01 is better, goes on and diverges at step 3.
RIGHT = {"2 0.0003": 3, "2 0.0001": 1, "2 0.01": 7, "4 0.0003": 4}


def test_a_killed_ablation_goes_on_drops_the_worse_half_and_survives_a_point_that_diverges(tmp_path: Path) -> None:
    environment = {
        **new_shell(),
        "RLFLOW_DATA_DIR": str(tmp_path / "data"),
        "RLFLOW_TRAINER_PYTHON": str(fake_interpreter(tmp_path)),
        "RLFLOW_GPU_SLOTS": "2",
        "RLFLOW_RETRY_DELAY_SCALE": "0",
        "FAKE_STEP_SECONDS": "0.5",
        "FAKE_RIGHT": json.dumps(RIGHT),
        "FAKE_FAILURE": "diverge",
        "FAKE_FAILURE_RATE": "0.01",
    }
    command = [sys.executable, "-m", "tasks.cli", "ablate", *WORDS]
    results = tmp_path / "data" / "ablations" / "study" / "results"
    with (tmp_path / "output.txt").open("wb") as output:
        first = processes.start(command, env=environment, mark="ablate-test", output=output, cwd=ROOT,
                                ends_with_parent=True)  # fmt: skip
    deadline = time.monotonic() + 600
    while not list(results.glob("*-step-000002.json")):
        assert first.poll() is None, (tmp_path / "output.txt").read_text()
        assert time.monotonic() < deadline, (tmp_path / "output.txt").read_text()
        time.sleep(0.2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    deadline = time.monotonic() + 120  # Prefect alone would look for its server for 150 s
    processes.kill("ablate-test")  # the rest of it; its points were told by the kernel, and commit
    while still_running(str(tmp_path / "data")):
        assert time.monotonic() < deadline, still_running(str(tmp_path / "data"))
        time.sleep(0.2)
    done = {path.name: path.stat().st_mtime_ns for path in results.glob("*-step-000002.json")}

    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr[-6000:]
    summary = AblationSummary.model_validate_json(answer.stdout.splitlines()[-1])
    assert {name: (results / name).stat().st_mtime_ns for name in done} == done, "what was done was done again"
    assert [(row.label, row.status, row.steps, row.accuracy) for row in summary.rows] == [
        ("base", "finished", 4, 4 / 8),
        ("learning_rate=0.0001", "dropped", 2, 1 / 8),
        ("learning_rate=0.01", "failed", 2, 7 / 8),
    ]
    # at the step that each has reached: 1 - 3 and 7 - 3 of 8; four equal gains: 2 of 16 signs
    assert [row.difference for row in summary.rows] == [None, -2 / 8, 4 / 8]
    assert [row.p for row in summary.rows] == [None, 2 / 4, 2 / 16]
    # on two devices: steps of 0.2 s, and two evaluations of 0.1 s, before step 1 and at the end
    taken = steps_taken(tmp_path / "data" / "runs" / "study-p01-s5")
    assert summary.rows[1].gpu_hours == pytest.approx(2 * (len(taken) * 0.2 + 2 * 0.1) / 3600)
    assert taken in ([1, 2], [1, 1, 2], [1, 2, 2]), "two steps, and what the kill took back"

    counted = Counter((tmp_path / "data" / "calls.txt").read_text().splitlines())
    shared = ("prepare train", "resize raw-train", "prepare validation", "resize raw-validation", "bootstrap")
    assert [counted[name] for name in shared] == [1] * 5, "datasets and policy are made once for all points"
    assert list((tmp_path / "data" / "made").glob("prepare-*.json")), "recorded in the data folder"
    for point, steps in (("base", 4), ("p01", 2), ("p02", 2)):
        journal = tmp_path / "data" / "runs" / f"study-{point}-s5" / "journal.jsonl"
        assert [record.step for record in read_journal(journal)] == list(range(1, steps + 1))
    settings = Settings(data_dir=tmp_path / "data")
    assert all(run.ablation_marker.read_text() == "study" for run in all_runs(settings))
    folder = Path(summary.folder)
    assert "DivergedError" in (folder / "table.md").read_text()
    assert (folder / "learning_curves.png").stat().st_size > 10_000
    check_mlflow(summary, settings)
    assert not still_running(str(tmp_path / "data"))


def steps_taken(folder: Path) -> list[int]:
    """All steps of a run, those that a kill took back too."""
    return sorted(record.step for path in folder.glob("journal*.jsonl") for record in read_journal(path))


def check_mlflow(summary: AblationSummary, settings: Settings) -> None:
    client = MlflowClient(tracking_uri=settings.tracking_uri)
    parent = client.get_run(summary.mlflow_run_id)
    assert (parent.info.run_name, parent.info.status) == ("study", "FINISHED")
    assert parent.data.params["ablation.rungs"] == "2"
    found = {item.path for item in client.list_artifacts(summary.mlflow_run_id, "ablation")}
    assert found == {f"ablation/{name}" for name in (
        "plan.json", "table.csv", "table.md", "learning_curves.png", "differences.png")}  # fmt: skip
    below = f"tags.mlflow.parentRunId = '{summary.mlflow_run_id}'"
    children = client.search_runs([parent.info.experiment_id], below)
    ended = {child.info.run_name: (child.info.status, child.data.tags["rlflow.ablation_status"]) for child in children}
    assert ended == {
        "base, seed 5": ("FINISHED", "finished"),
        "learning_rate=0.0001, seed 5": ("FINISHED", "dropped"),
        "learning_rate=0.01, seed 5": ("FAILED", "failed"),
    }
    assert {child.data.params["training.steps"] for child in children} == {"4"}
    assert not [child for child in children if "rlflow.param_drift" in child.data.tags]
