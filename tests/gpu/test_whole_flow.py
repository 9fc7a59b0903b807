"""The whole flow on one GPU, from preflight to the registered model: for random policies in the shapes of real ones,
with a trainer that is killed (``make demo-gpu``), and for the tiny policy, which must learn.

Problems are the real ones where they are (tests/data_sets.py). ``-s`` shows the seconds and the memory of each stage.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data_sets import DataSets, kinds
from tests.whole_flow import run_demo, run_flow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1700),
]
GEOMETRY = ("geometry3k/train", "geometry3k/validation")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Emptied after each test: models and checkpoints of all of them together have about 100 GB."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.parametrize("data_sets", [kinds()[-1]], indirect=True)
@pytest.mark.parametrize(
    ("shape", "files"),
    [("text-1.5b", ("gsm8k/train", "gsm8k/test")), ("vl-3b", GEOMETRY), ("vl-7b", GEOMETRY)],
    ids=["text-1.5b", "vl-3b", "vl-7b"],
)
def test_a_killed_trainer_comes_back_and_the_flow_ends_with_a_registered_model(
    shape: str, files: tuple[str, str], folder: Path, data_sets: DataSets
) -> None:
    train, validation = map(data_sets.file, files)
    settings = {"data.train": train, "data.validation": validation, "data.problem_column": "problem"}
    outcome = run_demo(shape, folder, settings)
    sys.stdout.write(f"\n{outcome.text()}\n")
    assert outcome.harms == []


def test_the_tiny_policy_learns_as_on_a_cpu(folder: Path) -> None:
    """What ``make demo`` shows there: the accuracy on new pictures is at least 0.85 afterwards."""
    flow = run_flow("grpo-geo3k-tiny", {"resources.device": "cuda", "resources.workers": 1}, folder)
    assert flow.result["accuracy_after"] >= 0.85
