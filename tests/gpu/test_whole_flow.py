"""The whole flow on one GPU, from preflight to the registered model, for random policies in the shapes of real ones.

Files come from the folder RLFLOW_DATA: geometry3k and gsm8k, each with train and validation (test) parquet. With
``-s`` it prints the seconds of each task and the flow's last line.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.downloaded import make_downloaded

DATA = Path(os.environ.get("RLFLOW_DATA", ""))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1700),
]
# Random weights are never right. The share of vowels differs within a group, so every group has a gradient.
REWARD = """\
def reward(text, problem, num_tokens, finish_reason):
    letters = [c for c in text.lower() if c.isascii() and c.isalpha()]
    return sum(c in "aeiou" for c in letters) / max(1, len(letters))
"""
COMMON = {
    "training.problems_per_step": 16,
    "training.updates_per_batch": 1,
    "rollout.max_completion_tokens": 256,
    "resources.workers": 1,
    "evaluation.problems": 32,
    "reward.name": "user",
    "health": "[]",
}


@dataclass(frozen=True, slots=True)
class Case:
    shape: str
    experiment: str
    train: str
    validation: str
    settings: dict[str, object]


CASES = [
    Case("text-1.5b", "grpo-gsm8k", "gsm8k/train.parquet", "gsm8k/test.parquet",
         {"training.steps": 2, "segment.steps": 2, "segment.keep_checkpoints": 1}),
    Case("vl-3b", "grpo-geo3k-3b", "geometry3k/train.parquet", "geometry3k/validation.parquet",
         {"training.steps": 4, "segment.steps": 2, "segment.keep_checkpoints": 1, "model.lora.rank": 32,
          "data.max_pixels": 401_408}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.shape)
def test_the_flow_ends_with_a_registered_model(case: Case, tmp_path: Path) -> None:
    began = time.monotonic()
    model = make_downloaded(tmp_path / case.shape, case.shape, device="cuda")
    torch.cuda.empty_cache()
    sys.stdout.write(f"\nrandom weights made in {time.monotonic() - began:.1f} s\n")
    reward = tmp_path / "vowels.py"
    reward.write_text(REWARD)
    settings = {
        **COMMON,
        "model.path": model,
        "data.train": DATA / case.train,
        "data.validation": DATA / case.validation,
        "reward.file": reward,
        **case.settings,
    }
    data_dir = tmp_path / "data"
    options = [text for name, value in settings.items() for text in ("--set", f"{name}={value}")]
    began = time.monotonic()
    flow = subprocess.Popen(
        [sys.executable, "-m", "flows.train_grpo", case.experiment, "--run-id", "whole", *options],
        env=os.environ | {"RLFLOW_DATA_DIR": str(data_dir), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert flow.stdout is not None
    last = ""
    for line in flow.stdout:
        sys.stdout.write(f"{time.monotonic() - began:7.1f} {line}")
        sys.stdout.flush()
        last = line.strip() or last
    sys.stdout.write(_seconds_by_task(data_dir))
    assert flow.wait() == 0
    result = json.loads(last)
    assert result["steps"] == case.settings["training.steps"]
    assert (Path(result["merged_model"]) / "verified.json").is_file()


def _seconds_by_task(data_dir: Path) -> str:
    """From Prefect's own record of the flow."""
    rows: list[tuple[str, str, float]] = []
    for database in data_dir.rglob("prefect*.db"):
        query = """select name, state_name, (julianday(end_time) - julianday(start_time)) * 86400 from task_run
                   where end_time is not null order by start_time"""
        with sqlite3.connect(database) as connection:
            rows += connection.execute(query).fetchall()
    return "".join(f"{name:40} {state:12} {seconds:7.1f} s\n" for name, state, seconds in rows)
