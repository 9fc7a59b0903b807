"""The whole flow on one GPU, from preflight to the registered model, for random policies in the shapes of real ones.

Problems are the real ones where they are (tests/data_sets.py). ``-s`` shows the seconds of each task.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.data_sets import DataSets, kinds
from tests.downloaded import make_downloaded
from tests.whole_flow import run_flow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1700),
]
SMALL = {
    "training.problems_per_batch": 16,
    "training.mini_batches": 1,
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
        "gsm8k/train",
        "gsm8k/test",
        {"data.problem_column": "problem", "training.steps": 2, "segment.steps": 2},
    ),
    Case(
        "vl-3b",
        "grpo-geo3k-3b",
        "geometry3k/train",
        "geometry3k/validation",
        {"training.steps": 4, "segment.steps": 2, "model.lora.rank": 32, "data.max_pixels": 401_408},
    ),
]


@pytest.mark.parametrize("data_sets", [kinds()[-1]], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.shape)
def test_the_flow_ends_with_a_registered_model(case: Case, tmp_path: Path, data_sets: DataSets) -> None:
    began = time.monotonic()
    model = make_downloaded(tmp_path / case.shape, case.shape, device="cuda")
    torch.cuda.empty_cache()
    sys.stdout.write(f"\nrandom weights made in {time.monotonic() - began:.1f} s\n")
    data = {"data.train": data_sets.file(case.train), "data.validation": data_sets.file(case.validation)}
    result = run_flow(case.experiment, {**SMALL, "model.path": model, **data, **case.settings}, tmp_path)
    assert result["steps"] == case.settings["training.steps"]
    assert (Path(result["merged_model"]) / "verified.json").is_file()
