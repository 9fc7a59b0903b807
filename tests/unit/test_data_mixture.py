"""Which source comes next, and which of its problems: shares, epochs, curriculum, and the same after any restart."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config import CurriculumConfig
from rlcore.data.mixture import MixturePosition, next_of_mixture, next_sources, restored, seed_of
from rlcore.data.stream import PassRates, ProblemStream
from rlcore.errors import CheckpointError
from rlcore.types import Problem

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.1, 0.3, 0.5, 1, 2, 3.7, 10]), min_size=1)


def problems_of(sizes: dict[str, int]) -> list[Problem]:
    """In turn, as a mixed dataset has them."""
    rows = [(rank, name) for name, size in sizes.items() for rank in range(size)]
    return [Problem(f"{name}/{rank}", "?", (), "1", "s", source_name=name) for rank, name in sorted(rows)]


def test_a_hand_worked_order() -> None:
    # Shares 2/3 and 1/3; the least that must be owed is 1/2, and the bound is 1 - 1/2. Owed before each place, and how
    # long (in places) until more than 1/2 is owed too much:
    # 1: a 2/3, b 1/3 -> only a may. 2: a 4/3 - 1 = 1/3, b 2/3 -> only b may. 3: a 2 - 1 = 1, b 1 - 1 = 0 -> a.
    assert next_sources({"a": 2, "b": 1}, {"a": 0, "b": 0}, 6) == ["a", "b", "a", "a", "b", "a"]
    # Three equal sources: at least 1/4 owed. Equals come in the order of their names.
    assert next_sources({"c": 5, "a": 5, "b": 5}, {"a": 0, "b": 0, "c": 0}, 6) == ["a", "b", "c"] * 2
    assert next_sources({"only": 0.2}, {"only": 7}, 3) == ["only"] * 3


@given(WEIGHTS, st.integers(1, 80))
def test_after_any_place_the_shares_are_within_the_bound(weights, n) -> None:
    total = sum(Fraction(str(weight)) for weight in weights.values())
    bound = 1 - Fraction(1, max(1, 2 * len(weights) - 2))
    order = next_sources(weights, dict.fromkeys(weights, 0), n)
    for length in range(1, n + 1):
        counts = Counter(order[:length])
        for name, weight in weights.items():
            assert abs(counts[name] - length * Fraction(str(weight)) / total) <= bound


@given(WEIGHTS, st.lists(st.integers(0, 9), max_size=8))
def test_the_order_of_sources_does_not_depend_on_the_batches(weights, batches) -> None:
    had, order = Counter(dict.fromkeys(weights, 0)), []
    for n in batches:
        some = next_sources(weights, had, n)
        order += some
        had.update(some)
    assert order == next_sources(weights, dict.fromkeys(weights, 0), sum(batches))


def test_the_batches_of_two_small_sources() -> None:
    """Three places of ``a`` for one of ``b``; the problems of each come in the order of its own stream."""
    sizes, weights = {"a": 6, "b": 3}, {"a": 3, "b": 1}
    problems = problems_of(sizes)  # a/0 b/0 a/1 b/1 a/2 b/2 a/3 a/4 a/5
    found = next_of_mixture(problems, MixturePosition.start(weights, sizes), 8, PassRates(), None, seed=5)
    a = ProblemStream(6, seed_of(5, "a")).take(6)
    b = ProblemStream(3, seed_of(5, "b")).take(2)
    expected = [f"a/{a[0]}", f"a/{a[1]}", f"b/{b[0]}", f"a/{a[2]}", f"a/{a[3]}", f"a/{a[4]}", f"b/{b[1]}", f"a/{a[5]}"]
    names = [problems[index].problem_id for index, _ in found.problems]
    assert [name[0] for name in names] == next_sources(weights, {"a": 0, "b": 0}, 8)
    assert sorted(names) == sorted(expected)
    assert [name for name in names if name[0] == "a"] == [name for name in expected if name[0] == "a"]
    assert {name: (at.taken, at.places, at.epoch) for name, at in found.position.sources.items()} == {
        "a": (6, 6, 1),
        "b": (2, 2, 0),
    }


SIZES = st.fixed_dictionaries({"a": st.integers(1, 9), "b": st.integers(1, 9), "c": st.integers(1, 9)})
THREE = st.fixed_dictionaries({name: st.sampled_from([0.2, 1, 2.5, 4]) for name in "abc"})
BATCHES = st.lists(st.integers(0, 12), max_size=8)


def trained(sizes, weights, batches, *, cut=None, rates=None, config=None, seed=3):
    """The problems and epochs of each batch, and the last position. At ``cut`` the run is killed and restored."""
    problems = problems_of(sizes)
    position, postponed, found = MixturePosition.start(weights, sizes), (), []
    for number, n in enumerate(batches):
        if number == cut and position.taken:
            stored = json.loads(json.dumps(position.to_json()))
            position = restored(stored, problems, seen=position.taken)
        result = next_of_mixture(
            problems, position.with_weights(weights), n, rates or PassRates(), config, seed=seed, postponed=postponed
        )
        position, postponed = result.position, result.postponed
        found.append([(problems[index].problem_id, epoch) for index, epoch in result.problems])
    return found, position, [problems[index].problem_id for index in postponed]


@given(SIZES, THREE, BATCHES, st.integers(0, 8))
def test_a_restored_run_takes_the_same_problems(sizes, weights, batches, cut) -> None:
    assert trained(sizes, weights, batches, cut=cut) == trained(sizes, weights, batches)


@given(SIZES, THREE, BATCHES)
def test_every_epoch_of_every_source_is_a_permutation(sizes, weights, batches) -> None:
    batches, position, postponed = trained(sizes, weights, batches)
    taken = Counter(name for batch in batches for name, _ in batch) + Counter(postponed)
    for name, size in sizes.items():
        of_source = Counter({key: count for key, count in taken.items() if key.startswith(name)})
        whole, rest = divmod(position.sources[name].taken, size)
        assert of_source.total() == whole * size + rest
        assert all(of_source[f"{name}/{rank}"] in (whole, whole + 1) for rank in range(size))


@given(SIZES, THREE, BATCHES)
def test_places_are_shared_by_weight_also_if_problems_are_postponed(sizes, weights, batches) -> None:
    found, _, _ = trained(sizes, weights, batches)
    sources = [name[0] for batch in found for name, _ in batch]
    assert sources == next_sources(weights, dict.fromkeys(weights, 0), len(sources))


def test_a_problem_that_rests_is_replaced_by_one_of_its_own_source() -> None:
    sizes, weights = {"a": 4, "b": 4}, {"a": 1, "b": 1}
    problems = problems_of(sizes)
    easy = [index for index, problem in enumerate(problems) if problem.problem_id in ("a/0", "a/1", "a/2")]
    rates = PassRates().updated(dict.fromkeys(easy, 1.0), 0)
    found, position, _ = trained(sizes, weights, [4], rates=rates, config=CurriculumConfig())
    names = [name for name, _ in found[0]]
    assert [name[0] for name in names] == ["a", "b", "a", "b"]
    assert "a/3" in names
    assert position.sources["a"].taken > 2 == position.sources["b"].taken


def test_new_weights_hold_from_where_they_were_set_and_no_problem_is_lost() -> None:
    sizes, problems = {"a": 40, "b": 40}, problems_of({"a": 40, "b": 40})
    first = next_of_mixture(problems, MixturePosition.start({"a": 1, "b": 1}, sizes), 40, PassRates(), None, seed=0)
    changed = first.position.with_weights({"a": 1, "b": 3})
    second = next_of_mixture(problems, changed, 8, PassRates(), None, seed=0)
    counts = Counter(problems[index].source_name for index, _ in second.problems)
    assert counts == {"a": 2, "b": 6}, "b does not catch up what it would have had with these weights before"
    assert not {index for index, _ in first.problems} & {index for index, _ in second.problems}
    assert first.position.with_weights({"b": 1.0, "a": 1.0}) is first.position


def test_sources_of_one_size_have_different_orders() -> None:
    orders = [ProblemStream(50, seed_of(0, name)).take(50) for name in ("a", "b")]
    assert orders[0] != orders[1]
    assert seed_of(0, "a") != seed_of(1, "a")


def test_a_checkpoint_of_other_sources_is_refused() -> None:
    position = next_of_mixture(
        problems_of({"a": 3, "b": 2}),
        MixturePosition.start({"a": 1, "b": 1}, {"a": 3, "b": 2}),
        2,
        PassRates(),
        None,
        seed=0,
    ).position
    stored, single = position.to_json(), [Problem("row-0", "?", (), "1", "s")]
    for given_, data, words in (
        (stored, {"a": 3, "c": 2}, r"a \(3 problems\), b \(2 problems\), and the dataset has .* c \(2 problems\)"),
        (stored, {"a": 4, "b": 2}, r"a \(4 problems\)"),
        (None, {"a": 3, "b": 2}, "trained on a single source"),
    ):
        with pytest.raises(CheckpointError, match=words):
            restored(given_, problems_of(data), seen=2)
    with pytest.raises(CheckpointError, match="the dataset has a single source"):
        restored(stored, single, seen=2)
    assert restored(None, single, seen=9) is None  # a checkpoint of an older version
    assert restored(None, problems_of({"a": 3}), seen=0) is None  # nothing is trained yet
