"""Every setting of the schedule, alone and combined: when groups train, and that none is stale, lost or repeated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.config import ExperimentConfig
from rlcore.errors import StarvedError
from rlcore.rollout.advantages import has_signal
from rlcore.rollout.collect import RolloutBatch
from rlcore.rollout.groups import Group, joined, new_groups, to_sample
from rlcore.rollout.schedule import Schedule, due
from rlcore.training.run import TrainingRun, TrainState
from rlcore.types import Completion, Floats, Ints, SampledGroup, Turn
from tests.unit.toy_lengths import BUDGET, PROBLEMS, Workers, batches, by_first, config, ids, same, stream, wired
from tests.unit.toy_run import in_flight, prefetched, surplus


@st.composite
def experiments(draw: st.DrawFn) -> ExperimentConfig:
    partial, dynamic, ahead = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    least = partial + ahead
    staleness = draw(st.integers(least, 4)) if partial else draw(st.integers(1, 3)) if ahead and dynamic else int(ahead)
    rounds = {
        "tokens_per_round": draw(st.integers(1, BUDGET)),
        "in_flight": draw(st.sampled_from([1, 1.25, 1.5, staleness + 1 - ahead])),
        "prefetch": ahead,
    }
    replacing = {"max_rounds": draw(st.integers(1, 3)), "surplus_staleness": draw(st.integers(0, 3))}
    return config(
        rounds if partial else None,
        staleness,
        training={"problems_per_batch": draw(st.integers(1, 4)), "ppo_epochs": draw(st.integers(1, 2))},
        algorithm={"dynamic_sampling": replacing if dynamic else None},
        data={"curriculum": {"rest_epochs": 1} if draw(st.booleans()) else None},
    )


@st.composite
def runs(draw: st.DrawFn) -> TrainingRun:
    lengths = draw(st.lists(st.integers(1, BUDGET + 3), min_size=8, max_size=8))
    flags = draw(st.lists(st.booleans(), min_size=7, max_size=7))
    equal = {problem.problem_id for problem in PROBLEMS if flags[int(problem.problem_id[1:]) % 7]}
    run = wired(draw(experiments()), lambda problem, which: lengths[(int(problem[1:]) + 3 * which) % 8], equal)
    run.workers.disaggregated = draw(st.booleans())
    return run


def begun(run: TrainingRun) -> list[tuple[str, int]]:
    """Problem and seed of every group that the sampler began, in the order of the stream."""
    return [(r.problem.problem_id, r.seed) for r in run.workers.requests if not len(r.so_far)]


def names(run: TrainingRun, groups: list[Group]) -> list[tuple[str, int]]:
    return [(group.problem.problem_id, group_seed(run, group)) for group in groups]


def group_seed(run: TrainingRun, group: Group) -> int:
    (first,) = new_groups([(group.index, group.problem)], 1, batch=group.seed_key, epoch=0, policy_version=0)
    ((_, request),) = first.requests(run.config.seed, None)
    return request.seed


@given(runs())
@settings(max_examples=300)
def test_batches_are_full_and_no_group_is_stale_lost_or_repeated(run: TrainingRun) -> None:
    schedule, algorithm = Schedule.of(run.config), run.config.algorithm
    found, state = batches(run, TrainState(), 7)
    order = begun(run)
    assert len(set(order)) == len(order)
    trained = [group for batch in found for group in batch.groups]
    for number, batch in enumerate(found):
        step = number * schedule.steps_per_version
        assert len(batch.groups) == schedule.size
        assert batch.age_max == max(schedule.age(group, step) for group in batch.groups) <= schedule.max_staleness
        assert all(len(sample.token_ids) > 2 for group in batch.groups for sample in group.samples)
        assert all(not group.unfinished and None not in group.scores for group in batch.groups)
        without = [group for group in batch.groups if not has_signal(group, algorithm)]
        assert batch.filled == (len(without) if schedule.needs_signal else 0)
        if schedule.tokens_per_round is not None:
            assert batch.counts.dropped_stale == 0  # due groups are sampled to their ends

    waiting = list(state.rollouts.groups)
    used = {group.key for group in [*trained, *waiting]}
    assert len(used) == len(trained) + len(waiting)  # nothing is trained twice
    judged = [group for batch in found for group in batch.generated]
    replaced = [group for group in judged if group.key not in used and not has_signal(group, algorithm)]
    dropped = sum(batch.counts.dropped_stale for batch in found)
    accounted = names(run, [*trained, *waiting, *replaced])
    lost = Counter(order)
    lost.subtract(accounted)
    assert set(lost.values()) <= {0, 1}
    assert lost.total() == dropped or (schedule.needs_signal and not schedule.keeps_surplus)

    if run.config.data.curriculum is not None:
        graded = judged if schedule.needs_signal else [*trained, *prefetched(state)]
        assert set(state.rollouts.pass_rates.by_index) == {group.index for group in graded}

    places = {name: place for place, name in enumerate(order)}
    assert_rising([places[name] for name in names(run, [g for g in waiting if g.state != "ready"])])
    if schedule.tokens_per_round is None:
        assert_rising([places[name] for name in names(run, [g for g in trained if has_signal(g, algorithm)])])
    elif not schedule.needs_signal:
        for batch in found:
            assert_rising([places[name] for name in names(run, list(batch.groups))])


def assert_rising(values: list[int]) -> None:
    assert values == sorted(values)


@given(runs(), st.integers(1, 5))
@settings(max_examples=100)
def test_a_saved_state_goes_on_to_the_last_bit_wherever_the_sampler_is(run: TrainingRun, cut: int) -> None:
    whole, end = batches(run, TrainState(), 6)
    elsewhere = replace(run, workers=Workers(run.workers.lengths), grader=run.grader)
    elsewhere.workers.disaggregated = not run.workers.disaggregated
    first, state = batches(elsewhere, TrainState(), cut)
    with TemporaryDirectory() as folder:
        state.save(Path(folder))
        loaded = TrainState.load(Path(folder), state.scalars(), PROBLEMS, mask_truncated=False)
    for before, after in zip(state.rollouts.groups, loaded.rollouts.groups, strict=True):
        assert (before.key, before.state, before.surplus, before.epoch) == (
            after.key,
            after.state,
            after.surplus,
            after.epoch,
        )
    rest, resumed = batches(elsewhere, loaded, 6 - cut)
    for one, other in zip(whole, [*first, *rest], strict=True):
        same(one, other)
        assert one.counts == other.counts
        assert (one.age_max, one.stale, one.filled, one.from_buffer) == (
            other.age_max,
            other.stale,
            other.filled,
            other.from_buffer,
        )
        assert [group.key for group in one.generated] == [group.key for group in other.generated]
    assert end.scalars() == resumed.scalars()
    assert end.rollouts.pass_rates == resumed.rollouts.pass_rates


def test_groups_that_ended_in_an_earlier_batch_are_measured_when_they_are_trained() -> None:
    """The second round of two tokens ends nothing: c and d have ended before, e and f go on."""
    a, b, c, d = stream(4)
    settings = config({"tokens_per_round": 2, "in_flight": 2}, 3, data={"curriculum": {}})
    run = wired(settings, lambda problem, _: 1 if problem in (a, b, c, d) else 12)
    found, state = batches(run, TrainState(), 2)
    assert [ids(batch) for batch in found] == [[a, b], [c, d]]
    assert set(state.rollouts.pass_rates.by_index) == {int(problem[1:]) for problem in (a, b, c, d)}


def starving(**dynamic: object) -> tuple[dict[str, object], list[str]]:
    return {"dynamic_sampling": {"max_rounds": 2, **dynamic}}, [problem.problem_id for problem in PROBLEMS]


@pytest.mark.parametrize("partial", [None, {"tokens_per_round": 4, "in_flight": 1.5}])
def test_a_batch_that_stays_short_is_filled_or_reported(partial: dict[str, object] | None) -> None:
    fill, equal = starving()
    found, _ = batches(wired(config(partial, 1, algorithm=fill), by_first(10, 3), equal), TrainState(), 2)
    assert [(len(batch.groups), batch.filled) for batch in found] == [(2, 2), (2, 2)]
    fail, _ = starving(if_short="fail")
    with pytest.raises(StarvedError, match=r"step 1: \d groups in \d rounds gave 0 with signal, and 2 were needed"):
        batches(wired(config(partial, 1, algorithm=fail), by_first(10, 3), equal), TrainState(), 1)


def test_dynamic_sampling_of_partial_rollouts_worked_out_by_hand() -> None:
    """Two groups a batch, three in flight, rounds of 4 tokens, two versions of staleness; b and d have no signal."""
    a, b, c, d, e, f, g = stream(7)
    settings = config({"tokens_per_round": 4, "in_flight": 1.5}, 2, algorithm={"dynamic_sampling": {"max_rounds": 3}})
    run = wired(settings, by_first(10, 3, 2, 4, 4, 9, 1), equal={b, d})
    found, state = batches(run, TrainState(), 2)
    # 1: a has 4 of its 10 tokens; b and c end, b without signal. d replaces b and has no signal either. e replaces d; a
    # ends with it, and is older. 2: e has ended, f and g join it, and g ends first
    assert [ids(batch) for batch in found] == [[c, a], [e, g]]
    assert run.workers.rounds == [[a, b, c], [a, d], [a, e], [f, g]]
    assert ids_of(found[0]) == [c, a, e, b, d]
    assert [group.problem.problem_id for group in in_flight(state)] == [f]


def ids_of(batch: RolloutBatch) -> list[str]:
    return [group.problem.problem_id for group in batch.generated]


def test_dynamic_sampling_one_batch_ahead_worked_out_by_hand() -> None:
    """Two groups a batch, two versions of staleness; b and e have no signal."""
    a, b, c, d, e, f, g, h = stream(8)
    dynamic = {"dynamic_sampling": {"max_rounds": 3}}
    run = wired(config(None, 2, algorithm=dynamic), by_first(), equal={b, e})
    found, state = batches(run, TrainState(), 2)
    # the first policy fills a batch, which leaves d as surplus, and the batch after it, where f replaces e
    assert [ids(batch) for batch in found] == [[a, c], [d, f]]
    assert run.workers.rounds == [[a, b], [c, d], [e, f], [g, h]]
    assert [batch.age_max for batch in found] == [0, 1]
    assert [batch.stale for batch in found] == [False, True]
    assert [group.problem.problem_id for group in prefetched(state)] == [g, h]
    assert surplus(state) == ()
    assert ids_of(found[0]) == [a, c, d, b, f, e]
    assert ids_of(found[1]) == [g, h]
    assert all(sample.old_logprobs is None for batch in found for group in batch.groups for sample in group.samples)


def test_a_group_goes_from_new_to_ready() -> None:
    (group,) = new_groups([(0, PROBLEMS[0])], 1, batch="0", epoch=0, policy_version=3)
    assert (group.state, group.policy_version) == ("new", 3)
    run = wired(config({"tokens_per_round": 2, "in_flight": 1}, 1), lambda *_: 3)
    states = []
    for _ in range(2):
        ((which, request),) = group.requests(0, 2)
        ((answer,),) = [answers.values() for answers in run.workers.generate([request])]
        group = group.continued(answer, which)
        states.append(group.state)
    scored = group.scored({0: run.grader.submit([group.problem], group.completions).result()[0]})
    assert [*states, scored.admitted(mask_truncated=False).state] == ["sampling", "graded", "ready"]


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def floats(*values: float) -> Floats:
    return np.array(values, np.float32)


def test_given_tokens_are_no_tokens_of_the_policy() -> None:
    own = Completion.one_turn(ints(5, 6), floats(-1, -2), "a", "unfinished", 0)
    asked = replace(own, turns=(*own.turns, Turn(ints(7), floats(0), given=True)))
    whole = joined(asked, Completion.one_turn(ints(8, 9), floats(-3, -4), "ab", "stop", 1))
    assert [turn.given for turn in whole.turns] == [False, True, False]
    sample = to_sample(PROBLEMS[0], ints(1, 2), whole)
    assert sample.token_ids.tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert sample.sampler_logprobs.tolist() == [0, 0, -1, -2, 0, -3, -4]
    assert (whole.policy_version, whole.text, whole.finish_reason) == (0, "ab", "stop")


def test_routes_are_those_of_the_last_policy() -> None:
    older, newer = np.zeros((3, 2, 1), np.uint8), np.ones((5, 2, 1), np.uint8)
    begun = Completion.one_turn(ints(5, 6), floats(-1, -2), "a", "unfinished", 0, older)
    whole = joined(begun, Completion.one_turn(ints(8, 9), floats(-3, -4), "ab", "stop", 1, newer))
    sample = to_sample(PROBLEMS[0], ints(1, 2), whole)
    assert sample.routes is newer
    assert len(sample.routes) == sample.num_tokens - 1


def test_the_samples_of_a_group_share_the_routes_of_the_prompt() -> None:
    group = Group.new(0, PROBLEMS[0], 3, seed_key="0", epoch=0, policy_version=0)
    ended = tuple(
        Completion.one_turn(ints(5, 6), floats(-1, -2), "a", "stop", 0, routes)
        for routes in (np.zeros((3, 2, 1), np.uint8), None, np.ones((3, 2, 1), np.uint8))
    )
    group = group.continued(SampledGroup(ints(1, 2), ended), (0, 1, 2))
    first, without, last = (sample.routes for sample in group.admitted(mask_truncated=False).samples)
    assert first[:, 0, 0].tolist() == [0, 0, 0]
    assert without is None
    assert last[:, 0, 0].tolist() == [0, 0, 1]


@given(
    st.lists(st.integers(0, 4), max_size=12).map(lambda ages: sorted(ages, reverse=True)),
    st.integers(1, 4),
    st.integers(0, 4),
)
def test_groups_that_are_due_leave_just_enough_to_wait(ages: list[int], size: int, max_staleness: int) -> None:
    """Worked out batch by batch: without the due groups, all others fit into the batches that they have left."""
    ages = [min(age, max_staleness) for age in ages]
    first = due(ages, size, max_staleness)
    rest = ages[first:]
    for place, age in enumerate(rest, 1):
        assert place <= size * (max_staleness - age)
    if first:  # with one due group fewer, some group would be left over
        assert any(place > size * (max_staleness - age) for place, age in enumerate(ages[first - 1 :], 1))
