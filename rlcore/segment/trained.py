"""Which problems an optimizer step was trained on: one small file per rollout batch. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlcore.config import TrainingConfig
from rlcore.errors import StorageError
from rlcore.job import write_json_atomically


def write_trained(run_dir: Path, step: int, problem_ids: Sequence[str]) -> None:
    """Note the problems of a rollout batch, in the order they are trained on; ``step`` is its last one."""
    write_json_atomically(_path(run_dir, step), json.dumps({"problems": list(problem_ids)}))


def trained_problems(run_dir: Path, step: int, training: TrainingConfig) -> list[str]:
    """Ids of the problems whose groups optimizer step ``step`` (from 1) was trained on: its share of its batch.

    Raises:
        StorageError: nothing is known of that step.
    """
    last = -(-step // training.steps_per_batch) * training.steps_per_batch
    path = _path(run_dir, last)
    if step < 1 or not path.exists():
        known = sorted(int(file.stem.removeprefix("step-")) for file in path.parent.glob("step-*.json"))
        reach = f"batches up to step {known[-1]} are" if known else "no batch is"
        raise StorageError(f"nothing is known of step {step}: {reach} noted under {path.parent}.")
    problems = [str(item) for item in json.loads(path.read_text())["problems"]]
    share = len(problems) // training.updates_per_batch
    part = (step - 1) % training.steps_per_batch % training.updates_per_batch
    return problems[part * share : (part + 1) * share]


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / "trained" / f"step-{step:06d}.json"
