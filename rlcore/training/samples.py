"""Completions kept for people to read: the first problems of every rollout batch, one JSON file per step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rlcore.job import write_json_atomically
from rlcore.types import RolloutGroup

PROBLEMS_KEPT = 2


class SampleLog:
    """``folder/step-000020.json``: problem, picture hashes, and every completion with its score. A replayed step
    writes the same file again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        rows = [
            {
                "problem_id": group.problem.problem_id,
                "question": group.problem.question,
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
        write_json_atomically(self._folder / f"step-{step:06d}.json", json.dumps(rows))
