"""Which sequences share a forward pass, and on which rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceSize:
    """Tokens of one sequence."""

    prompt: int
    completion: int


def plan_microbatches(
    sizes: Sequence[SequenceSize],
    keys: Sequence[Hashable],
    *,
    num_ranks: int,
    token_budget: int,
    attention_weight: float,
) -> list[list[list[int]]]:
    """Spread sequences over ranks and microbatches: ``plan[rank][microbatch]`` lists indices into ``sizes``.

    Every rank gets the same number of microbatches (ranks meet in collectives), none above ``token_budget`` computed
    tokens. Sequences of one key have the same prompt and stay together where the budget allows it, because a microbatch
    computes a prompt once. Ranks are balanced by cost, and so are the microbatches of one rank. The plan depends on the
    arguments alone; a microbatch may be empty on a rank with little work.

    Args:
        attention_weight: cost of a token that looks at another one, where a token's matrix products cost 1.

    Raises:
        ValueError: one sequence alone exceeds the budget.
    """
    longest = max((size.prompt + size.completion for size in sizes), default=0)
    if longest > token_budget:
        raise ValueError(f"a sequence of {longest} tokens exceeds the budget of {token_budget} per microbatch")

    def tokens(unit: Sequence[int]) -> int:
        return sizes[unit[0]].prompt + sum(sizes[i].completion for i in unit)

    def cost(unit: Sequence[int]) -> float:
        pairs = sum(sizes[i].completion * (sizes[unit[0]].prompt + sizes[i].completion / 2) for i in unit)
        return tokens(unit) + attention_weight * (pairs + sizes[unit[0]].prompt ** 2 / 2)

    per_rank = _spread(_units(sizes, keys, token_budget), cost, num_ranks)
    count = max(1, *(-(-sum(map(tokens, rank)) // token_budget) for rank in per_rank))
    while True:
        plan = [_spread(rank, cost, count) for rank in per_rank]
        if all(sum(map(tokens, micro)) <= token_budget for rank in plan for micro in rank):
            return [[sorted(i for unit in micro for i in unit) for micro in rank] for rank in plan]
        count += 1


def _units(sizes: Sequence[SequenceSize], keys: Sequence[Hashable], token_budget: int) -> list[list[int]]:
    """Sequences of one key, cut where the budget would be exceeded; what is cut off computes the prompt again."""
    by_key: dict[Hashable, list[list[int]]] = {}
    room: dict[Hashable, int] = {}
    for index, (size, key) in enumerate(zip(sizes, keys, strict=True)):
        runs = by_key.setdefault(key, [])
        if not runs or room[key] < size.completion:
            runs.append([])
            room[key] = token_budget - size.prompt
        runs[-1].append(index)
        room[key] -= size.completion
    return [run for runs in by_key.values() for run in runs]


def _spread(units: Sequence[list[int]], cost: Callable[[list[int]], float], bins: int) -> list[list[list[int]]]:
    """Dearest first onto the cheapest bin; ties go to the lower index."""
    loads = [0.0] * bins
    chosen: list[list[list[int]]] = [[] for _ in range(bins)]
    for price, unit in sorted(((cost(unit), unit) for unit in units), key=lambda item: (-item[0], item[1][0])):
        bin_ = loads.index(min(loads))
        loads[bin_] += price
        chosen[bin_].append(unit)
    return chosen
