"""What every way of collecting a rollout batch shares: the next problems, their pass rates, and what was asked of the
sampler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from rlcore.config import DataConfig
from rlcore.data.curriculum import next_problems
from rlcore.data.stream import ProblemStream
from rlcore.errors import UngradedError
from rlcore.ports import Grader
from rlcore.training.state import TrainState
from rlcore.types import RolloutGroup, Score


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


def require_graded(scores: Sequence[Score], max_share: float, grader: Grader) -> None:
    """
    Raises:
        UngradedError: more than ``max_share`` of ``scores`` are ungraded.
    """
    ungraded = sum(not score.graded for score in scores)
    if ungraded > max_share * len(scores):
        last = "\n- ".join(grader.last_failures())
        raise UngradedError(
            f"{ungraded} of {len(scores)} completions could not be graded, allowed is a share of {max_share:g} "
            f"(reward.max_ungraded_share). The last ones:\n- {last}\nMend the reward, give it more "
            "reward.deadline_seconds or reward.processes, or raise the share."
        )
