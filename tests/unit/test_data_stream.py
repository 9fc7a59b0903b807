"""The order of problems: complete epochs, no early repeats, and the same after any restart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data.stream import ProblemStream

SIZES = st.integers(1, 60)
SEEDS = st.integers(-(2**40), 2**40)
BATCHES = st.lists(st.integers(0, 40), max_size=12)


@given(SIZES, SEEDS)
def test_every_epoch_holds_every_problem_once(num_problems, seed):
    stream = ProblemStream(num_problems, seed)
    for _ in range(4):
        assert sorted(stream.take(num_problems)) == list(range(num_problems))


@given(SIZES, SEEDS)
def test_a_third_of_the_problems_in_a_row_are_distinct_also_across_epochs(num_problems, seed):
    order = ProblemStream(num_problems, seed).take(4 * num_problems)
    width = max(1, num_problems // 3)
    windows = [order[start : start + width] for start in range(len(order) - width + 1)]
    assert all(len(set(window)) == width for window in windows)


@given(SIZES, SEEDS, BATCHES, st.integers(0, 12))
def test_a_restored_stream_continues_with_the_same_problems(num_problems, seed, batches, killed_at):
    uninterrupted = ProblemStream(num_problems, seed)
    expected = [uninterrupted.take(n) for n in batches]

    stream, order, trained = ProblemStream(num_problems, seed), [], 0
    for index, n in enumerate(batches):
        if index == killed_at:
            stream.take(7)  # taken, but the process died before it trained on them
            stream = ProblemStream(num_problems, seed, taken=trained)
        order.append(stream.take(n))
        trained = stream.taken
    assert order == expected


@given(SIZES, SEEDS, BATCHES)
def test_the_order_does_not_depend_on_the_batch_size(num_problems, seed, batches):
    one, other = ProblemStream(num_problems, seed), ProblemStream(num_problems, seed)
    assert [i for n in batches for i in one.take(n)] == other.take(sum(batches))


def test_seeds_and_epochs_differ():
    first = ProblemStream(100, seed=0)
    assert first.take(100) != first.take(100)
    assert ProblemStream(100, seed=0).take(100) != ProblemStream(100, seed=1).take(100)


def test_a_dataset_without_problems_is_an_error():
    with pytest.raises(ValueError, match="num_problems is 0"):
        ProblemStream(0, seed=0)
