"""The whole flow on one GPU, from preflight to the registered model, for random policies in the shapes of real ones.

Files come from the folder RLFLOW_DATA: geometry3k and gsm8k, as published. ``-s`` shows the seconds of each task.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.downloaded import make_downloaded
from tests.whole_flow import run_flow

DATA = Path(os.environ.get("RLFLOW_DATA", ""))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1700),
]
SMALL = {
    "training.problems_per_step": 16,
    "training.updates_per_batch": 1,
    "rollout.max_completion_tokens": 256,
    "resources.workers": 1,
    "evaluation.problems": 32,
    "segment.keep_checkpoints": 1,
}


@dataclass(frozen=True, slots=True)
class Case:
    shape: str
    experiment: str
    train: str
    validation: str
    settings: dict[str, object]


CASES = [
    Case(
        "text-1.5b",
        "grpo-gsm8k",
        "gsm8k/train.parquet",
        "gsm8k/test.parquet",
        {"data.problem_column": "problem", "training.steps": 2, "segment.steps": 2},
    ),
    Case(
        "vl-3b",
        "grpo-geo3k-3b",
        "geometry3k/train.parquet",
        "geometry3k/validation.parquet",
        {"training.steps": 4, "segment.steps": 2, "model.lora.rank": 32, "data.max_pixels": 401_408},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.shape)
def test_the_flow_ends_with_a_registered_model(case: Case, tmp_path: Path) -> None:
    began = time.monotonic()
    model = make_downloaded(tmp_path / case.shape, case.shape, device="cuda")
    torch.cuda.empty_cache()
    sys.stdout.write(f"\nrandom weights made in {time.monotonic() - began:.1f} s\n")
    data = {"data.train": DATA / case.train, "data.validation": DATA / case.validation}
    result = run_flow(case.experiment, {**SMALL, "model.path": model, **data, **case.settings}, tmp_path)
    assert result["steps"] == case.settings["training.steps"]
    assert (Path(result["merged_model"]) / "verified.json").is_file()
