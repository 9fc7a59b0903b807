"""Which sequences share a microbatch."""

import random

import pytest

from rlcore.distributed.group import SequenceSize, plan_microbatches


def plan(sizes, keys, ranks=1, budget=100, weight=0.0):
    return plan_microbatches(sizes, keys, num_ranks=ranks, token_budget=budget, attention_weight=weight)


def test_a_prompt_counts_once_for_its_group():
    """4 sequences of 20 + 20 tokens are 160 alone and 100 together."""
    sizes = [SequenceSize(20, 20)] * 4
    assert plan(sizes, ["a"] * 4) == [[[0, 1, 2, 3]]]
    assert [sorted(map(len, rank)) for rank in plan(sizes, list("abcd"))] == [[2, 2]]


def test_a_group_that_exceeds_the_budget_is_cut_and_pays_its_prompt_again():
    sizes = [SequenceSize(40, 30)] * 4  # 40 + 2 * 30 fill a microbatch
    assert plan(sizes, ["a"] * 4) == [[[0, 1], [2, 3]]]


def test_ranks_are_balanced_by_cost_and_not_by_tokens():
    """100 tokens and three times 50, all of other prompts: two ranks with as many tokens would take two sequences
    each. With attention the long one costs 100 + 0.02 * 5000 = 200 and a short one 50 + 0.02 * 1250 = 75."""
    sizes = [SequenceSize(50, 50), *[SequenceSize(25, 25)] * 3]
    of_rank = [sorted(i for micro in rank for i in micro) for rank in plan(sizes, range(4), ranks=2)]
    assert of_rank == [[0, 3], [1, 2]]
    of_rank = [sorted(i for micro in rank for i in micro) for rank in plan(sizes, range(4), ranks=2, weight=0.02)]
    assert of_rank == [[0], [1, 2, 3]]


def test_every_sequence_is_planned_once_within_the_budget_and_all_ranks_meet():
    draw = random.Random(0)
    prompts = [draw.randint(1, 200) for _ in range(20)]
    keys = [index // 8 for index in range(160)]
    sizes = [SequenceSize(prompts[key], draw.randint(1, 300)) for key in keys]
    found = plan(sizes, keys, ranks=4, budget=1000, weight=1e-3)
    assert sorted(i for rank in found for micro in rank for i in micro) == list(range(160))
    assert len({len(rank) for rank in found}) == 1
    costs = []
    for rank in found:
        for micro in rank:
            assert (
                sum({keys[i]: prompts[keys[i]] for i in micro}.values()) + sum(sizes[i].completion for i in micro)
                <= 1000
            )
        costs.append(sum(sizes[i].completion for micro in rank for i in micro))
    assert max(costs) < 1.3 * min(costs)
    assert found == plan(sizes, keys, ranks=4, budget=1000, weight=1e-3)


def test_a_sequence_beyond_the_budget_is_refused():
    with pytest.raises(ValueError, match="a sequence of 101 tokens exceeds the budget of 100"):
        plan([SequenceSize(60, 41)], ["a"])
