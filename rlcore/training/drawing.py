"""What every way of collecting a rollout batch shares: the next problems, their pass rates, and what was asked of the
sampler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace

from rlcore.config import DataConfig
from rlcore.data.curriculum import next_problems
from rlcore.data.stream import ProblemStream
from rlcore.training.state import TrainState
from rlcore.types import RolloutGroup


def draw_problems(
    data: DataConfig, num_problems: int, state: TrainState, count: int, avoid: Collection[int] = ()
) -> tuple[list[int], TrainState]:
    """Indices of the next ``count`` problems, and the state after them. Arguments as ``next_problems``."""
    at = {"num_problems": num_problems, "seed": data.shuffle_seed, "position": state.problems_seen}
    stream = ProblemStream.at(at)
    found = next_problems(stream, count, state.pass_rates, data.curriculum, postponed=state.postponed, avoid=avoid)
    return found.indices, replace(state, problems_seen=stream.taken, postponed=found.postponed)


def with_pass_rates(
    state: TrainState, data: DataConfig, measured: Iterable[tuple[int, int, RolloutGroup]]
) -> TrainState:
    """The state with what groups say about their problems.

    Args:
        measured: index of the problem, epoch that it was drawn in, and its group.
    """
    if data.curriculum is None:
        return state
    found: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for index, epoch, group in measured:
        graded = [r.score for r in group.rollouts if r.score.graded]
        if graded:
            right = sum(score.parts.get("accuracy", score.reward) >= 1 for score in graded)
            found[epoch][index] = right / len(graded)
    rates = state.pass_rates
    for epoch in sorted(found):
        rates = rates.updated(found[epoch], epoch)
    return replace(state, pass_rates=rates)
