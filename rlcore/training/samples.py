"""What is kept of every rollout batch: which problems it was trained on, and completions for people to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlcore.job import write_json_atomically
from rlcore.segment.trained import write_trained
from rlcore.types import RolloutGroup

PROBLEMS_KEPT = 2


class BatchLog:
    """Two files per rollout batch, named after its last step, that a replayed step writes again:
    ``trained/step-000020.json`` (``rlcore.segment.trained``), and ``samples/step-000020.json`` with the first generated
    problems, their picture hashes, and every completion with its score."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def __call__(self, step: int, generated: Sequence[RolloutGroup], trained: Sequence[RolloutGroup]) -> None:
        write_trained(self._run_dir, step, [group.problem.problem_id for group in trained])
        self._write_samples(step, generated)

    def _write_samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
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
            for group in groups[:PROBLEMS_KEPT]
            for rollout in group.rollouts
        ]
        write_json_atomically(self._run_dir / "samples" / f"step-{step:06d}.json", json.dumps(rows))
