"""Two files per rollout batch: the problems it was trained on, and completions for people to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.config import TrainingConfig
from rlcore.errors import StorageError
from rlcore.files import write_json_atomically

if TYPE_CHECKING:
    from rlcore.rollout.groups import Group

PROBLEMS_KEPT = 2


def write_batch(run_dir: Path, step: int, generated: Sequence[Group], trained: Sequence[Group]) -> None:
    """Write ``trained/step-000020.json``, and ``samples/step-000020.json`` with the first generated problems, their
    image hashes and every completion with its score.

    Args:
        step: the batch's last. A replay overwrites the files.
    """
    write_trained(run_dir, step, [group.problem.problem_id for group in trained])
    rows = [
        {
            "problem_id": group.problem.problem_id,
            "question": group.problem.conversation,
            "answer": group.problem.answer,
            "images": [image.sha256 for image in group.problem.images],
            "completion": rollout.completion.text,
            "tokens": len(rollout.completion.token_ids),
            "finish_reason": rollout.completion.finish_reason,
            "reward": rollout.score.reward,
            "parts": dict(rollout.score.parts),
            "graded": rollout.score.graded,
        }
        for group in generated[:PROBLEMS_KEPT]
        for rollout in group.rollouts
    ]
    write_json_atomically(run_dir / "samples" / f"step-{step:06d}.json", json.dumps(rows))


def write_trained(run_dir: Path, step: int, problem_ids: Sequence[str]) -> None:
    """Write the problems of a rollout batch, in training order; ``step`` is the batch's last step."""
    write_json_atomically(_path(run_dir, step), json.dumps({"problems": list(problem_ids)}))


def trained_problems(run_dir: Path, step: int, training: TrainingConfig) -> list[str]:
    """Ids of the problems that optimizer step ``step`` (from 1) was trained on: its part of the rollout batch.

    Raises:
        StorageError: that step has no file.
    """
    last = -(-step // training.steps_per_batch) * training.steps_per_batch
    path = _path(run_dir, last)
    if step < 1 or not path.exists():
        known = sorted(int(file.stem.removeprefix("step-")) for file in path.parent.glob("step-*.json"))
        reach = f"batches up to step {known[-1]} are" if known else "no batch is"
        raise StorageError(f"nothing is known of step {step}: {reach} noted under {path.parent}.")
    problems = [str(item) for item in json.loads(path.read_text())["problems"]]
    share = len(problems) // training.mini_batches
    part = (step - 1) % training.steps_per_batch % training.mini_batches
    return problems[part * share : (part + 1) * share]


def _path(run_dir: Path, step: int) -> Path:
    return run_dir / "trained" / f"step-{step:06d}.json"
