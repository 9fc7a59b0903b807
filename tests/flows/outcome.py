"""What a flow test reads of a run: the jobs it called, its failures, and what it left running or lying about."""

from __future__ import annotations

import json
from pathlib import Path

from prefect.artifacts import Artifact

from infra import processes
from infra.settings import Settings
from rlcore.adjustments import Adjustments
from tasks.driver.jobs import jobs_mark
from tasks.run import drivers, existing_run

ROOT = Path(__file__).resolve().parents[2]


SMALL = ["training.steps=5", "segment.steps=2", "data.template=math"]


MODEL = ["bootstrap", "check"]  # while the data is prepared
DATA = ["prepare train", "resize raw-train", "prepare validation", "resize raw-validation"]
TRAINING = ["train from segment 0", *(f"validate {step}" for step in (0, 2, 4, 5)), "merge 5"]


def calls(data_dir: Path) -> list[str]:
    return (data_dir / "calls.txt").read_text().splitlines()


def trainings(data_dir: Path) -> list[str]:
    return [line for line in calls(data_dir) if line.startswith("train")]


def adjustments(run_dir: Path) -> list[Adjustments]:
    """What each trainer was told."""
    return [Adjustments.model_validate_json(line) for line in (run_dir / "calls.txt").read_text().splitlines()]


def failures(run_dir: Path) -> list[tuple[str, float | None]]:
    lines = (run_dir / "failures.jsonl").read_text().splitlines()
    return [(record["failure"], record["delay"]) for record in map(json.loads, lines)]


def read_health_artifact(key: str) -> str:
    found = Artifact.get(key)
    assert found is not None
    return str(found.data)


def temporary_folders(run_dir: Path) -> list[Path]:
    """What the processes of a run have left under the system's temporary folder, its flow runs' jobs included."""
    run = existing_run(run_dir.name, Settings(data_dir=run_dir.parent.parent))
    marks = [run.trainer_mark, *(jobs_mark(driver.flow_run_id) for driver in drivers(run))]
    root = processes.temporary_folder("any").parent
    return [path for mark in marks for path in root.glob(f"rlflow-{mark}*")]
