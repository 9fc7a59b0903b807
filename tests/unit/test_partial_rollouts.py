"""Partial rollouts: which group trains in which batch, what is continued, and the bound. Lengths are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.config import ExperimentConfig, changes
from rlcore.data.stream import ProblemStream
from rlcore.errors import CheckpointError, ConfigError, UngradedError
from rlcore.rollout.schedule import due
from rlcore.training.metrics import update_metrics
from rlcore.training.run import TrainState
from rlcore.types import Completion, Problem, SampledGroup, SampleRequest, Score
from tests.unit.toy_lengths import (
    BUDGET,
    PROBLEMS,
    Grader,
    Workers,
    batches,
    by_first,
    config,
    ids,
    same,
    stream,
    versions,
    wired,
)  # fmt: skip
from tests.unit.toy_run import in_flight, prefetched, result


def test_who_is_trained_in_which_batch_worked_out_by_hand() -> None:
    """Two groups a batch, three in flight, rounds of 4 tokens, two batches of staleness."""
    a, b, c, d, e, f, g, h, i = stream(9)
    run = wired(config({"tokens_per_round": 4, "in_flight": 1.5}, 2), by_first(10, 3, 2, 9, 4, 1, 2, 12, 99))
    found, state = batches(run, TrainState(), 4)

    # 1: a has 4 of its 10 tokens, b and c are whole. 2: a 8, d 4, e whole: one is missing, so another round ends a.
    # 3: d had 8, all are whole, the oldest are d and f. 4: h and i need three rounds; i is cut at its own budget.
    assert [ids(batch) for batch in found] == [[b, c], [a, e], [d, f], [g, h]]
    assert run.workers.rounds == [
        [a, b, c],
        *([a, d, e], [a, d]),
        [d, f, g],
        *([h, i], [h, i], [h, i]),
    ]
    assert [batch.counts.rounds for batch in found] == [1, 2, 1, 3]
    assert [batch.counts.continued for batch in found] == [0, 1, 1, 0]
    assert [batch.counts.tokens for batch in found] == [
        (4 + 1) + (3 + 1) + (2 + 1),
        6 + (8 + 1) + (4 + 1),
        1 + (1 + 1) + (2 + 1),
        (12 + 1) + (12 + 1),
    ]
    assert [group.problem.problem_id for group in in_flight(state)] == [i]
    assert in_flight(state)[0].completions[0].finish_reason == "length"
    assert in_flight(state)[0].unfinished == ()

    # every token keeps the log-prob of the policy that drew it, and a sample's version is that of its oldest one
    assert versions(found[1]) == [[0] * 4 + [1] * 6, [1] * 4]
    assert versions(found[2]) == [[1] * 8 + [2], [2]]
    assert [group.samples[0].policy_version for group in found[1].groups] == [0, 1]
    assert [batch.age_max for batch in found] == [0, 1, 1, 1]
    assert [batch.stale for batch in found] == [False, True, True, True]
    long = found[1].groups[0].rollouts[0].completion
    assert long.token_ids.tolist() == list(range(10))
    assert (long.text, long.finish_reason) == (f"{a}/0/10", "stop")
    assert [r.score.reward for r in found[1].groups[0].rollouts] == [0.0, 1.0]
    assert set(run.grader.asked.values()) == {1}  # once each, when it ended
    assert run.grader.asked.total() == 2 * 9


def test_a_group_at_the_staleness_bound_is_sampled_to_its_end() -> None:
    """One batch of staleness: what is carried has to be trained in the next one, however long it is."""
    a, b, c, d, e = stream(5)
    run = wired(config({"tokens_per_round": 4, "in_flight": 1.5}, 1), by_first(10, 3, 11, 12, 12))
    found, state = batches(run, TrainState(), 2)
    # of three groups one would be too much for the next batch: the first is due at once. Then c is, and d and e wait
    assert [ids(batch) for batch in found] == [[a, b], [c, d]]
    assert run.workers.rounds == [[a, b, c], [c, d, e], [d, e], [d, e]]
    assert [request.max_tokens for request in run.workers.requests[:6]] == [None, 4, 4, None, 4, 4]
    assert versions(found[1]) == [[0] * 4 + [1] * 7, [1] * 12]
    assert [group.problem.problem_id for group in in_flight(state)] == [e]


def test_no_batch_waits_for_its_longest_completion() -> None:
    """Every third group has one of 12 tokens, the others take 2. Counted are tokens one behind the other."""

    class Counting(Workers):
        chain = 0

        def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
            answers = list(super().generate(requests))
            pieces = [len(c.token_ids) for answer in answers for group in answer.values() for c in group.completions]
            self.chain += max(pieces)
            yield from answers

    def chain(settings: ExperimentConfig) -> int:
        run = replace(wired(settings, by_first()), workers=Counting(by_first(*[2, 2, 12] * 8)))
        batches(run, TrainState(), 8)
        return run.workers.chain

    training = {"problems_per_batch": 3}
    assert chain(config(None, 0, training=training)) == 8 * 12
    assert chain(config({"tokens_per_round": 3, "in_flight": 3}, 3, training=training)) == 8 * 3
    assert chain(config({"tokens_per_round": 3, "in_flight": 1}, 3, training=training)) == 8 * 12  # four rounds each


def test_what_is_due_by_hand() -> None:
    assert due([0, 0, 0], 2, 1) == 1
    assert due([1, 0, 0], 2, 1) == 1
    assert due([1, 1, 1], 2, 2) == 1
    assert due([0] * 6, 2, 3) == 0
    assert due([2] * 4 + [1] * 2, 2, 3) == 2  # the first four would not all fit into the batch after this one


def test_an_alarm_is_for_batches_of_one_policy_only() -> None:
    assert update_metrics(result(1.0), 0.0, alarm_above=0.01, stale=False)["rollout/mismatch_alarm"] == 1
    assert update_metrics(result(1.0), 0.0, alarm_above=0.01, stale=True)["rollout/mismatch_alarm"] == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_rounds_that_cut_nothing_are_the_plain_path(ahead: bool) -> None:
    lengths = by_first(*range(1, 25))
    curriculum = {"data": {"curriculum": {"rest_epochs": 1}}}
    whole = {"tokens_per_round": BUDGET, "in_flight": 1, "prefetch": ahead}
    plain, partial = (
        wired(config(None, int(ahead), **curriculum), lengths),
        wired(config(whole, 1 + ahead, **curriculum), lengths),
    )
    found, state = batches(plain, TrainState(), 14)
    others, other = batches(partial, TrainState(), 14)
    for one, two in zip(found, others, strict=True):
        same(one, two)
        assert (one.counts, one.age_max, one.stale) == (two.counts, two.age_max, two.stale)
    asked = [[(r.problem, r.count, r.seed) for r in run.workers.requests] for run in (plain, partial)]
    assert asked[0] == asked[1]
    assert state.scalars() == other.scalars()
    assert state.rollouts.pass_rates == other.rollouts.pass_rates
    assert in_flight(other) == ()


@given(st.data())
@settings(max_examples=150)
def test_no_sample_is_ever_too_old_and_none_is_lost(data: st.DataObject) -> None:
    ahead = data.draw(st.booleans(), "prefetch")
    staleness = data.draw(st.integers(1 + ahead, 4), "max_staleness")
    partial = {
        "tokens_per_round": data.draw(st.integers(1, BUDGET), "tokens_per_round"),
        "in_flight": data.draw(st.sampled_from([1, 1.25, 1.5, staleness + 1 - ahead]), "in_flight"),
        "prefetch": ahead,
    }
    size, passes = data.draw(st.integers(1, 4), "problems_per_batch"), data.draw(st.integers(1, 2), "ppo_epochs")
    training = {"problems_per_batch": size, "ppo_epochs": passes}
    drawn = data.draw(st.lists(st.integers(1, BUDGET + 3), min_size=8, max_size=8), "lengths")
    run = wired(
        config(partial, staleness, training=training),
        lambda problem, which: drawn[(int(problem[1:]) + 3 * which) % 8],
    )
    found, state = batches(run, TrainState(), 8)
    seeds = [request.seed for request in run.workers.requests]
    assert len(set(seeds)) == len(seeds)
    trained: list[str] = []
    for number, batch in enumerate(found):
        assert len(batch.groups) == size
        assert batch.counts.dropped_stale == 0
        assert batch.age_max <= staleness * passes
        for group in batch.groups:
            problem = group.problem.problem_id
            trained.append(problem)
            for which, completion in enumerate(rollout.completion for rollout in group.rollouts):
                own = run.workers.lengths(problem, which)
                assert completion.token_ids.tolist() == [100 * which + n for n in range(min(own, BUDGET))]
                assert completion.finish_reason == ("stop" if own <= BUDGET else "length")
                drew = (-0.5 - completion.logprobs).astype(int)
                assert completion.policy_version == drew[0] == group.samples[0].policy_version
                assert (np.diff(drew) >= 0).all()
                assert drew[-1] <= number * passes
    waiting = [*(g.problem.problem_id for g in prefetched(state)), *(g.problem.problem_id for g in in_flight(state))]
    order = [PROBLEMS[index].problem_id for index in ProblemStream(len(PROBLEMS), 0).take(state.rollouts.problems_seen)]
    postponed = [PROBLEMS[index].problem_id for index in state.rollouts.postponed]
    assert Counter(trained + waiting + postponed) == Counter(order)
    ended = sum(len(group.completions) - len(group.unfinished) for group in in_flight(state))
    assert run.grader.asked.total() == 2 * (len(trained) + len(prefetched(state))) + ended


def test_groups_in_flight_are_of_distinct_problems_as_far_as_the_dataset_reaches(tmp_path: Path) -> None:
    settings = config({"tokens_per_round": 3, "in_flight": 2}, 3)
    lengths = by_first(*[10, 2, 12, 1, 5, 99] * 9)
    run = replace(wired(settings, lengths), problems=PROBLEMS[:5])
    state, carried = TrainState(), 0
    for _ in range(12):
        (batch,), state = batches(run, state, 1)
        together = [group.problem.problem_id for group in batch.groups]
        together += [group.problem.problem_id for group in in_flight(state)]
        assert len(set(together)) == len(together) == 4
        carried += len(in_flight(state))
    assert carried > 12
    assert state.rollouts.problems_seen > 20  # so that borders of epochs were within batches

    fewer = replace(wired(settings, lengths), problems=PROBLEMS[:3])
    _, state = batches(fewer, TrainState(), 1)
    first = [request.seed for request in fewer.workers.requests if not len(request.so_far)]
    assert len(first) == len(set(first)) == 4  # one of the three problems twice, with a seed of its own
    state.save(tmp_path)
    loaded = TrainState.load(tmp_path, state.scalars(), PROBLEMS[:3], mask_truncated=False)
    assert [g.seed_key for g in in_flight(loaded)] == [g.seed_key for g in in_flight(state)]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_state_that_is_saved_and_loaded_goes_on_to_the_last_bit(tmp_path: Path, ahead: bool) -> None:
    settings = config(
        {"tokens_per_round": 3, "in_flight": 2, "prefetch": ahead}, 3, data={"curriculum": {"rest_epochs": 1}}
    )
    lengths = by_first(10, 12, 1, 1, 1, 12, 3, 99, 10, 9, 12, 12, 5)
    _, state = batches(wired(settings, lengths), TrainState(), 1 if ahead else 2)  # ahead: two are sampled
    assert [group.unfinished for group in in_flight(state)] == [(), (0,)]
    state.save(tmp_path)
    loaded = TrainState.load(tmp_path, state.scalars(), PROBLEMS, mask_truncated=False)
    going_on, one = batches(wired(settings, lengths), state, 4)
    resumed, other = batches(wired(settings, lengths), loaded, 4)
    for left, right in zip(going_on, resumed, strict=True):
        same(left, right)
        assert left.counts == right.counts
    assert one.scalars() == other.scalars()
    assert one.rollouts.pass_rates == other.rollouts.pass_rates
    with pytest.raises(CheckpointError, match=r"groups\.parquet holds completions of \d problems that the dataset"):
        TrainState.load(tmp_path, state.scalars(), PROBLEMS[:1], mask_truncated=False)


def test_a_run_continued_with_less_staleness_drops_what_is_too_old() -> None:
    partial = {"tokens_per_round": 1, "in_flight": 3}
    lengths = by_first(12, 12, 12, 12)
    _, state = batches(wired(config(partial, 3), lengths), TrainState(), 2)
    old = [group for group in in_flight(state) if group.policy_version == 0]
    assert len(old) > 1
    stricter = config({"tokens_per_round": 1}, 1)
    found, after = batches(wired(stricter, lengths), state, 1)
    assert found[0].counts.dropped_stale == len(old)
    assert found[0].age_max <= 1
    plain, after = batches(wired(config(None, 0), lengths), state, 1)
    assert (plain[0].counts.dropped_stale, plain[0].age_max, in_flight(after)) == (len(in_flight(state)), 0, ())


@pytest.mark.parametrize(("graded", "fails"), [({"0"}, False), (set(), True)])
def test_too_little_graded_of_what_is_trained_ends_the_run(graded: set[str], fails: bool) -> None:
    class Lost(Grader):
        def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
            future: Future[list[Score]] = Future()
            future.set_result([Score(0.0, {}, graded=c.text.split("/")[1] in graded) for c in completions])
            return future

    run = replace(wired(config({"tokens_per_round": 4, "in_flight": 1.5}), by_first(10, 3, 2)), grader=Lost())
    if not fails:  # half of them
        assert len(batches(run, TrainState(), 2)[0]) == 2
        return
    with pytest.raises(UngradedError, match="4 of 4 completions could not be graded"):
        batches(run, TrainState(), 1)


def test_a_curriculum_learns_of_a_problem_when_its_group_is_trained() -> None:
    run = wired(config({"tokens_per_round": 4, "in_flight": 1.5}, 2, data={"curriculum": {}}), by_first(10, 3, 2))
    found, state = batches(run, TrainState(), 2)
    trained = {PROBLEMS.index(group.problem) for batch in found for group in batch.groups}
    assert set(state.rollouts.pass_rates.by_index) == trained
    assert {measured.rate for measured in state.rollouts.pass_rates.by_index.values()} == {0.5}


@pytest.mark.parametrize(
    ("partial", "staleness", "algorithm", "text"),
    [
        ({}, 1, {}, r"rollout\.partial\.tokens_per_round"),
        ({"tokens_per_round": 13}, 1, {}, r"tokens_per_round \(13\) is above rollout\.max_completion_tokens \(12\)"),
        ({"tokens_per_round": 4}, 0, {}, r"Set max_staleness to 1 or more, or rollout\.partial to null"),
        ({"tokens_per_round": 4, "prefetch": True}, 1, {}, "2 or more, one of them for prefetching"),
        ({"tokens_per_round": 4, "in_flight": 2.5}, 1, {}, r"in_flight is 2\.5: a group has 2 rollout batches"),
        (
            {"tokens_per_round": 4, "in_flight": 2.5, "prefetch": True},
            2,
            {},
            "has 2 rollout batches .*prefetch true",
        ),
        ({"tokens_per_round": 4}, 1, {"correction": None}, r"algorithm\.correction\.name to truncate or mask"),
        ({"tokens_per_round": 4}, 1, {"advantage": {"name": "remax"}}, "its greedy baseline is of one policy"),
        (None, 2, {}, "only one batch is prefetched. Set max_staleness to 0 or 1, or rollout.partial"),
    ],
)
def test_impossible_settings_are_refused(
    partial: dict[str, object] | None, staleness: int, algorithm: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        config(partial, staleness, algorithm=algorithm)


def test_tokens_per_round_affect_results_and_placement_does_not() -> None:
    one = config({"tokens_per_round": 4}, 2)
    assert all(change.affects_results for change in changes(one, config({"tokens_per_round": 5, "prefetch": True}, 2)))
    apart = config({"tokens_per_round": 4}, 2, resources={"rollout_workers": 2})
    assert [change.affects_results for change in changes(one, apart)] == [False]
    assert not one.prefetch


def test_groups_in_flight_are_counted_without_float_noise() -> None:
    partial = config({"tokens_per_round": 4, "in_flight": 1.1}, 1).rollout.partial
    assert partial is not None
    assert [partial.groups(size) for size in (10, 1, 2)] == [11, 2, 3]
