"""Problems that rest: by bounds and epochs, never forever, and the same after any restart."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config import CurriculumConfig
from rlcore.data.stream import PassRates, ProblemStream, next_problems, rests

CONFIG = CurriculumConfig(hardest=0.1, easiest=0.9, rest_epochs=2)
SIZES = st.integers(1, 30)
SEEDS = st.integers(0, 1000)
BATCHES = st.lists(st.integers(0, 12), max_size=14)


def rate_of(index: int, epoch: int) -> float:
    """A made-up policy: a third of the problems is solved, a third is hopeless, and it shifts by the epoch."""
    return ((index + epoch) % 3) / 2


def train(
    stream: ProblemStream, rates: PassRates, n: int, postponed: Sequence[int]
) -> tuple[list[int], PassRates, tuple[int, ...]]:
    """One step, as the loop does it."""
    found = next_problems(stream, n, rates, CONFIG, postponed=postponed)
    epoch = stream.taken // stream.num_problems
    rates = rates.updated({index: rate_of(index, epoch) for index in found.indices}, epoch)
    return found.indices, rates, found.postponed


def test_a_problem_rests_at_or_beyond_the_bounds_for_as_many_epochs_as_configured():
    rates = PassRates().updated({0: 0.1, 1: 0.5, 2: 0.9, 3: 0.11}, 5)
    assert [rests(rates, index, 6, CONFIG) for index in range(5)] == [True, False, True, False, False]
    assert [rests(rates, 0, epoch, CONFIG) for epoch in range(5, 10)] == [True, True, True, False, False]


def test_the_latest_measurement_counts():
    rates = PassRates().updated({0: 1.0}, 1)
    later = rates.updated({0: 0.5}, 2)
    assert rests(rates, 0, 2, CONFIG)
    assert not rests(later, 0, 2, CONFIG)
    assert rates != later


def test_resting_problems_are_skipped_and_counted():
    order = ProblemStream(10, seed=0).take(10)
    rates = PassRates().updated({order[1]: 1.0, order[2]: 0.0, order[3]: 0.5}, 0)
    stream = ProblemStream(10, seed=0)
    assert next_problems(stream, 3, rates, CONFIG).indices == [order[0], order[3], order[4]]
    assert stream.taken == 5
    assert stream.take(1) == [order[5]]


@given(SIZES, SEEDS, BATCHES, st.integers(0, 14))
def test_a_resumed_run_gets_the_same_problems(num_problems, seed, batches, cut):
    def run(interrupted: bool) -> list[list[int]]:
        stream, rates, steps, trained = ProblemStream(num_problems, seed), PassRates(), [], 0
        postponed: tuple[int, ...] = ()
        for step, n in enumerate(batches):
            if interrupted and step == cut:
                next_problems(stream, 5, rates, CONFIG, postponed=postponed)  # the process died before the training
                stream = ProblemStream(num_problems, seed, taken=trained)
                rates = PassRates.from_json(rates.to_json())
            indices, rates, postponed = train(stream, rates, n, postponed)
            trained = stream.taken
            steps.append(indices)
        return steps

    assert run(interrupted=True) == run(interrupted=False)


@given(SIZES, SEEDS, BATCHES)
def test_a_batch_has_as_many_problems_as_asked_for_and_no_needless_repeats(num_problems, seed, batches):
    stream, rates, postponed = ProblemStream(num_problems, seed), PassRates(), ()
    for n in batches:
        indices, rates, postponed = train(stream, rates, n, postponed)
        assert len(indices) == n
        assert len(set(indices)) == min(n, num_problems)


def test_if_all_problems_rest_none_is_skipped():
    rates = PassRates().updated(dict.fromkeys(range(8), 1.0), 0)
    stream = ProblemStream(8, seed=3)
    assert sorted(next_problems(stream, 8, rates, CONFIG).indices) == list(range(8))
    assert stream.taken == 16  # an epoch in vain, and one as it comes
    assert sorted(set(next_problems(stream, 20, rates, CONFIG).indices)) == list(range(8))


def test_no_problem_rests_forever():
    stream, rates = ProblemStream(12, seed=1), PassRates()
    last_seen = dict.fromkeys(range(12), 0)
    postponed: tuple[int, ...] = ()
    for _ in range(200):
        found = next_problems(stream, 4, rates, CONFIG, postponed=postponed)
        indices, postponed = found.indices, found.postponed
        epoch = stream.taken // 12
        # half of them are always solved: they come back to be measured, and rest again
        rates = rates.updated({index: 1.0 if index % 2 else 0.5 for index in indices}, epoch)
        for index in indices:
            assert epoch - last_seen[index] <= CONFIG.rest_epochs + 2
            last_seen[index] = epoch
    assert min(last_seen.values()) >= stream.taken // 12 - CONFIG.rest_epochs - 2


def test_without_a_curriculum_it_is_the_stream():
    rates = PassRates().updated(dict.fromkeys(range(5), 1.0), 0)
    found = next_problems(ProblemStream(5, 0), 12, rates, None)
    assert (found.indices, found.postponed) == (ProblemStream(5, 0).take(12), ())


def batches_of(
    num_problems: int, seed: int, sizes: Sequence[int], *, cut: int | None = None
) -> tuple[list[list[int]], tuple[int, ...], int]:
    """Batches without a curriculum, the last one's postponed problems, and how far the stream was taken; at ``cut`` all
    that goes on is what a checkpoint holds."""
    stream, postponed, batches = ProblemStream(num_problems, seed), (), []
    for number, n in enumerate(sizes):
        if number == cut:
            state = json.loads(json.dumps({"position": stream.taken, "postponed": postponed}))
            stream = ProblemStream(num_problems, seed, taken=state["position"])
            postponed = state["postponed"]
        found = next_problems(stream, n, PassRates(), None, postponed=postponed)
        batches.append(found.indices)
        postponed = found.postponed
    return batches, postponed, stream.taken


SIZES_OF_BATCHES = st.lists(st.integers(0, 75), max_size=12)


@given(SIZES, SEEDS, SIZES_OF_BATCHES)
def test_problems_of_a_batch_are_distinct_up_to_the_size_of_the_dataset(num_problems, seed, sizes):
    batches, _, _ = batches_of(num_problems, seed, sizes)
    for n, batch in zip(sizes, batches, strict=True):
        assert len(batch) == n
        for start in range(0, n, num_problems):  # then all of them before any comes a third time
            part = batch[start : start + num_problems]
            assert len(set(part)) == len(part)


@given(SIZES, SEEDS, SIZES_OF_BATCHES)
def test_every_epoch_is_trained_whole_whatever_the_batches(num_problems, seed, sizes):
    """What was taken from the stream is trained, each epoch's problems once, but for those that are still postponed;
    these wait for one batch."""
    batches, postponed, taken = batches_of(num_problems, seed, sizes)
    trained = Counter(index for batch in batches for index in batch)
    assert trained + Counter(postponed) == Counter(ProblemStream(num_problems, seed).take(taken))
    assert len(postponed) <= max(sizes, default=0)
    following, _, _ = batches_of(num_problems, seed, [*sizes, len(postponed)])
    assert set(postponed) <= set(following[-1])


@given(SIZES, SEEDS, SIZES_OF_BATCHES, st.integers(0, 12))
def test_a_resumed_run_takes_the_same_batches_at_any_position(num_problems, seed, sizes, cut):
    assert batches_of(num_problems, seed, sizes, cut=cut) == batches_of(num_problems, seed, sizes)


@given(SIZES, SEEDS, st.integers(0, 30), st.sets(st.integers(0, 29)))
def test_what_is_trained_together_is_avoided_as_long_as_there_are_others(num_problems, seed, n, avoid):
    avoid = {index for index in avoid if index < num_problems}
    found = next_problems(ProblemStream(num_problems, seed), n, PassRates(), None, avoid=avoid)
    others = num_problems - len(avoid)
    assert avoid.isdisjoint(found.indices[:others])
    assert len(set(found.indices[:others])) == min(n, others)
    assert len(found.indices) == n


def test_pass_rates_survive_files_and_processes():
    rates = PassRates().updated({3: 1 / 3, 0: 1.0}, 7)
    assert PassRates.from_json(rates.to_json()) == rates == pickle.loads(pickle.dumps(rates))
    assert PassRates.from_json(PassRates().to_json()) == PassRates()
    assert rates.by_index[3] == (1 / 3, 7)
    with pytest.raises(TypeError):
        rates.by_index[3] = None


def test_a_rate_outside_its_range_is_an_error():
    with pytest.raises(ValueError, match=r"problem 4 has a pass rate of 1\.5"):
        PassRates().updated({4: 1.5}, 0)
