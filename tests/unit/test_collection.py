"""Dynamic sampling, surplus groups, curriculum and greedy baselines, with a sampler of known rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlcore.errors import CheckpointError, ConfigError, SamplerError, StarvedError
from rlcore.process import Clock
from rlcore.rollout.advantages import has_signal
from rlcore.rollout.collect import RolloutBatch
from rlcore.rollout.policy_logprobs import first_update_with_old_logprobs
from rlcore.training.run import TrainingRun, TrainState
from rlcore.types import Completion, Problem, SampledGroup, SampleRequest, Score
from tests.unit.toy_run import (
    MIXED,
    PROBLEMS,
    RIGHT,
    WRONG,
    Grader,
    Workers,
    collect,
    config,
    ids,
    order,
    prefetched,
    surplus,
    wired,
    with_prefetched,
)

DYNAMIC = {"kl": {"coefficient": 0.0}, "dynamic_sampling": {"max_rounds": 3, "surplus_staleness": 2}}


def test_without_dynamic_sampling_every_group_is_trained_and_no_log_prob_pass_is_run():
    run = wired(config(), {order(24)[0]: WRONG})
    found, state = collect(run, TrainState(), Clock())
    assert ids(found.groups) == order(4)
    assert [has_signal(g, run.config.algorithm) for g in found.groups] == [False, True, True, True]
    assert (state.rollouts.problems_seen, found.counts.rounds, surplus(state)) == (4, 1, ())
    assert run.workers.scored == []
    assert all(s.old_logprobs is None for g in found.groups for s in g.samples)


def test_groups_without_signal_are_replaced_and_surplus_waits_for_the_next_step():
    stream = order(24)
    run = wired(config(algorithm=DYNAMIC), {stream[0]: WRONG, stream[2]: RIGHT})
    found, state = collect(run, TrainState(), Clock())
    assert ids(found.groups) == [stream[1], stream[3], stream[4], stream[5]]
    assert (found.counts.rounds, found.filled, found.from_buffer, len(found.generated)) == (2, 0, 0, 8)
    assert run.workers.released == 1  # not between the rounds
    assert ids(surplus(state)) == [stream[6], stream[7]]
    assert state.rollouts.problems_seen == 8

    run.workers.version = 1
    found, state = collect(run, replace(state, step=1), Clock())
    assert ids(found.groups) == [stream[6], stream[7], stream[8], stream[9]]
    assert (found.from_buffer, found.age_max, found.counts.dropped_stale) == (2, 1, 0)
    assert ids(surplus(state)) == [stream[10], stream[11]]
    # old log-probs stay those of the policy that sampled
    assert [float(g.samples[0].old_logprobs[-1]) for g in found.groups] == [-0.5, -0.5, -1.5, -1.5]


def test_groups_that_waited_too_long_are_dropped_and_counted():
    stream = order(24)
    run = wired(config(algorithm=DYNAMIC), {stream[0]: WRONG})
    _, state = collect(run, TrainState(), Clock())
    assert len(surplus(state)) == 3
    found, _ = collect(run, replace(state, step=3), Clock())
    assert (found.counts.dropped_stale, found.from_buffer, found.age_max) == (3, 0, 0)


def test_no_staleness_allowed_keeps_no_buffer_and_needs_no_old_log_probs():
    algorithm = {**DYNAMIC, "dynamic_sampling": {"surplus_staleness": 0}}
    run = wired(config(algorithm=algorithm), {order(24)[0]: WRONG})
    found, state = collect(run, TrainState(), Clock())
    assert (len(found.groups), surplus(state), run.workers.scored) == (4, (), [])


def test_for_pass_at_k_a_group_with_too_few_wrong_ones_has_no_signal():
    """Of four completions one wrong: every two of them hold a right one, so the best of two is always the same."""
    algorithm = {**DYNAMIC, "advantage": {"name": "pass_at_k", "k": 2}}
    settings = config(algorithm=algorithm, rollout={"group_size": 4, "max_completion_tokens": 8})
    rewards = {problem.problem_id: [1.0, 0.0, 0.0, 1.0] for problem in PROBLEMS}
    first = order(24)[0]
    found, _ = collect(wired(settings, rewards | {first: [1.0, 0.0, 1.0, 1.0]}), TrainState(), Clock())
    assert ids(found.groups) == order(24)[1:5]


def test_at_the_cap_the_step_is_filled_with_groups_that_add_nothing():
    wrong = {problem.problem_id: WRONG for problem in PROBLEMS} | {order(24)[5]: MIXED}
    run = wired(config(algorithm=DYNAMIC), wrong)
    found, state = collect(run, TrainState(), Clock())
    assert [has_signal(g, run.config.algorithm) for g in found.groups] == [True, False, False, False]
    assert (found.counts.rounds, found.filled, len(found.generated)) == (3, 3, 12)
    assert state.rollouts.problems_seen == 12


def test_at_the_cap_the_run_ends_if_the_config_says_so():
    algorithm = {**DYNAMIC, "dynamic_sampling": {"max_rounds": 2, "if_short": "fail"}}
    wrong = {problem.problem_id: WRONG for problem in PROBLEMS}
    with pytest.raises(StarvedError, match=r"step 1: 8 groups in 2 rounds gave 0 with signal, and 4 were needed"):
        collect(wired(config(algorithm=algorithm), wrong), TrainState(), Clock())


def test_rounds_of_one_step_sample_with_seeds_of_their_own():
    few = PROBLEMS[:6]  # the second round comes back to problems of the first
    wrong = {problem.problem_id: WRONG for problem in few}
    run = replace(wired(config(algorithm=DYNAMIC), wrong), problems=few)
    collect(run, TrainState(), Clock())
    seeds = [request.seed for request in run.workers.requests]
    assert len(set(seeds)) == len(seeds) == 12


def test_problems_of_a_batch_are_distinct_and_those_of_a_larger_batch_have_seeds_of_their_own():
    few = PROBLEMS[:7]
    state = TrainState()
    for size in (5, 5, 7, 7, 6):
        run = replace(wired(config(training={"problems_per_batch": size, "steps": 8})), problems=few)
        found, state = collect(run, state, Clock())
        assert len(set(ids(found.groups))) == size
    run = replace(wired(config(training={"problems_per_batch": 20, "steps": 8})), problems=few)
    found, state = collect(run, state, Clock())
    assert all(ids(found.groups).count(problem.problem_id) in (2, 3) for problem in few)
    assert len({request.seed for request in run.workers.requests}) == 20


def test_groups_of_one_step_are_of_distinct_problems_also_over_rounds_and_with_a_buffer():
    first = order(24)
    run = wired(config(algorithm=DYNAMIC, training={"problems_per_batch": 7, "steps": 40}), {first[0]: WRONG})
    state = TrainState()
    for step in range(20):
        run.workers.version = step
        found, state = collect(run, replace(state, step=step), Clock())
        assert len(set(ids(found.groups))) == 7
        sampled = [*ids(found.generated), *ids(found.groups)[: found.from_buffer]]
        assert len(set(sampled)) == min(24, len(sampled))


def test_a_checkpoint_of_before_problems_were_postponed_goes_on(tmp_path: Path):
    run = wired(config(training={"problems_per_batch": 20, "steps": 8}))
    _, state = collect(run, TrainState(), Clock())
    _, state = collect(run, replace(state, step=1), Clock())
    assert state.rollouts.postponed
    state.save(tmp_path)
    loaded = TrainState.load(tmp_path, json.loads(json.dumps(state.scalars())), PROBLEMS, mask_truncated=False)
    assert loaded.scalars() == state.scalars()
    old = {name: value for name, value in state.scalars().items() if name != "postponed"}
    loaded = TrainState.load(tmp_path, old, PROBLEMS, mask_truncated=False)
    assert (loaded.rollouts.postponed, loaded.rollouts.problems_seen) == ((), state.rollouts.problems_seen)


def test_remax_asks_for_one_greedy_completion_per_problem():
    run = wired(config(algorithm={"kl": {"coefficient": 0.0}, "advantage": {"name": "remax"}}))
    found, _ = collect(run, TrainState(), Clock())
    assert [r.greedy for r in run.workers.requests] == [False] * 4 + [True] * 4
    assert [g.baseline.reward for g in found.groups] == [0.5] * 4
    assert all(len(g.samples) == 2 for g in found.groups)


def test_masked_truncated_completions_train_no_token_and_stay_in_their_group():
    run = wired(
        config(
            algorithm={"kl": {"coefficient": 0.0}, "mask_truncated": True},
            training={"problems_per_batch": 24, "steps": 1},
        )
    )
    found, _ = collect(run, TrainState(), Clock())
    trained = {g.problem.problem_id: [s.num_trained for s in g.samples] for g in found.groups}
    assert trained.pop("p7") == [0, 0]
    assert set(map(tuple, trained.values())) == {(2, 2)}


def test_curriculum_leaves_out_what_is_always_right_and_comes_back_to_it():
    stream = order(24)
    settings = config(data={"curriculum": {"rest_epochs": 1}}, training={"problems_per_batch": 12, "steps": 8})
    run = wired(settings, {stream[0]: RIGHT, stream[13]: WRONG})
    state = TrainState()
    epochs: list[list[str]] = []
    for _ in range(6):
        found, state = collect(run, state, Clock())
        epochs.append(ids(found.groups))
    first, second = sum(epochs[:2], []), sum(epochs[2:4], [])
    assert sorted(first) == sorted(stream)
    assert stream[0] not in second[:22]
    assert stream[13] not in second[:22]
    assert stream[0] in sum(epochs[4:], [])


def test_old_log_probs_are_needed_exactly_where_the_policy_may_have_moved():
    first = first_update_with_old_logprobs
    assert first(config()) == 1
    assert first(config(training={"mini_batches": 2})) == 1
    assert first(config(training={"ppo_epochs": 2})) == 0
    assert first(config(algorithm=DYNAMIC)) == 0
    assert first(config(algorithm={"kl": {"place": "reward", "estimator": "k1"}})) == 0
    assert first(config(algorithm={"kl": {"place": "loss"}})) == 1
    assert first(config(algorithm={"entropy_mask": {"share": 0.5}})) == 0
    assert first(config(algorithm={"recompute_old_logprobs": True})) == 0


def test_the_entropies_of_surplus_groups_are_in_the_checkpoint(tmp_path: Path):
    """The policy that they belong to is gone when the groups are trained."""
    stream = order(24)
    run = wired(config(algorithm=DYNAMIC), {stream[0]: WRONG, stream[2]: RIGHT})
    _, state = collect(run, TrainState(), Clock())
    assert state.rollouts.groups
    drawn = [
        replace(group, samples=tuple(replace(s, entropies=s.loss_mask * np.float32(0.1)) for s in group.samples))
        for group in state.rollouts.groups
    ]
    state = replace(state, rollouts=replace(state.rollouts, groups=tuple(drawn)))
    state.save(tmp_path)
    loaded = TrainState.load(tmp_path, state.scalars(), PROBLEMS, mask_truncated=False)
    for group in loaded.rollouts.groups:
        for sample in group.samples:
            assert np.array_equal(sample.entropies, sample.loss_mask * np.float32(0.1))
            assert sample.entropies.dtype == np.float32


def test_a_saved_state_gives_the_same_next_step_to_the_last_bit(tmp_path: Path):
    stream = order(24)
    settings = config(algorithm=DYNAMIC, data={"curriculum": {}})
    rewards = {stream[0]: WRONG, stream[2]: RIGHT}
    _, state = collect(wired(settings, rewards), TrainState(), Clock())
    state = replace(state, step=1, kl_coefficient=0.1 + 0.2)
    state.save(tmp_path)
    loaded = TrainState.load(tmp_path, state.scalars(), PROBLEMS, mask_truncated=False)
    assert loaded.scalars() == state.scalars()
    assert loaded.rollouts.pass_rates == state.rollouts.pass_rates
    going_on, _ = collect(wired(settings, rewards), state, Clock())
    resumed, _ = collect(wired(settings, rewards), loaded, Clock())
    assert ids(going_on.groups) == ids(resumed.groups)
    for left, right in zip(going_on.groups, resumed.groups, strict=True):
        assert left.baseline == right.baseline
        for one, other in zip(left.samples, right.samples, strict=True):
            for name in ("token_ids", "loss_mask", "sampler_logprobs", "old_logprobs", "truncation_logprobs"):
                assert np.array_equal(getattr(one, name), getattr(other, name))
                assert getattr(one, name).dtype == getattr(other, name).dtype
        for one, other in zip(left.rollouts, right.rollouts, strict=True):
            assert one.score == other.score
            assert (one.completion.text, one.completion.finish_reason) == (
                other.completion.text,
                other.completion.finish_reason,
            )


STALE = {
    "training": {"problems_per_batch": 4, "steps": 8, "max_staleness": 1},
    "algorithm": {"kl": {"coefficient": 0.0}, "correction": {}},
}


def stale_steps(run: TrainingRun, state: TrainState, count: int) -> tuple[list[RolloutBatch], TrainState]:
    """``count`` rounds of: collect, one optimizer step, take the batch that came ahead, sync."""
    found = []
    for _ in range(count):
        run.workers.version = state.step
        collected, state = collect(run, state, Clock())
        state, collected = with_prefetched(replace(state, step=state.step + 1), collected, Clock())
        found.append(collected)
    return found, state


@pytest.mark.parametrize("apart", [False, True])
def test_a_batch_ahead_is_of_the_policy_before_and_of_the_same_problems_and_seeds(apart: bool):
    run, on_policy = wired(config(**STALE)), wired(config())
    run.workers.disaggregated = apart
    found, state = stale_steps(run, TrainState(), 3)
    assert [ids(collected.groups) for collected in found] == [order(12)[start : start + 4] for start in (0, 4, 8)]
    assert [collected.age_max for collected in found] == [0, 1, 1]
    assert [collected.stale for collected in found] == [False, True, True]
    assert [{s.policy_version for g in c.groups for s in g.samples} for c in found] == [{0}, {0}, {1}]
    assert {s.policy_version for g in prefetched(state) for s in g.samples} == {2}
    assert state.rollouts.problems_seen == 16  # the batch that waits is drawn
    assert run.workers.scored == []  # old log-probs are those of the policy that trains: no pass

    plain = TrainState()
    for step in range(3):
        _, plain = collect(on_policy, replace(plain, step=step), Clock())
    assert [r.seed for r in run.workers.requests[:12]] == [r.seed for r in on_policy.workers.requests]


def test_a_batch_ahead_is_in_the_checkpoint(tmp_path: Path):
    settings = config(**STALE, data={"curriculum": {}})
    _, state = stale_steps(wired(settings, {order(24)[4]: WRONG}), TrainState(), 1)
    state.save(tmp_path)
    loaded = TrainState.load(tmp_path, state.scalars(), PROBLEMS, mask_truncated=False)
    assert ids(prefetched(loaded)) == ids(prefetched(state)) == order(8)[4:]
    assert loaded.rollouts.pass_rates == state.rollouts.pass_rates
    going_on, one = stale_steps(wired(settings), state, 2)
    resumed, other = stale_steps(wired(settings), loaded, 2)
    assert [ids(c.groups) for c in going_on] == [ids(c.groups) for c in resumed]
    assert [g.rollouts[0].score for g in going_on[0].groups] == [g.rollouts[0].score for g in resumed[0].groups]
    assert one.scalars() == other.scalars()
    assert [g.samples[0].policy_version for g in resumed[0].groups] == [0] * 4


@pytest.mark.parametrize("algorithm", [{"kl": {"coefficient": 0.0}}, DYNAMIC])
def test_a_run_continued_on_policy_drops_the_batch_ahead(algorithm: dict[str, object]):
    _, state = stale_steps(wired(config(**STALE)), TrainState(), 1)
    found, state = collect(wired(config(algorithm=algorithm)), state, Clock())
    assert (found.counts.dropped_stale, found.age_max, prefetched(state)) == (4, 0, ())


def test_what_fails_ahead_fails_the_step():
    class Broken(Workers):
        apart = True

        def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
            if self.requests:
                raise SamplerError("no weights")
            return super().generate(requests)

    run = replace(wired(config(**STALE)), workers=Broken())
    with pytest.raises(SamplerError, match="no weights"):
        stale_steps(run, TrainState(), 1)


def test_a_batch_ahead_without_a_correction_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.correction\.name to truncate or mask"):
        config(training={"max_staleness": 1}, algorithm={"correction": None})


def test_a_buffer_from_another_dataset_is_refused(tmp_path: Path):
    _, state = collect(wired(config(algorithm=DYNAMIC), {order(24)[0]: WRONG}), TrainState(), Clock())
    state.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"3 problems that the dataset lacks"):
        TrainState.load(tmp_path, state.scalars(), [Problem("other", "?", (), "1", "x")], mask_truncated=False)


def test_ended_completions_are_graded_while_others_are_sampled():
    events: list[str] = []

    class Slow(Workers):
        def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
            for ended in super().generate(requests):
                events.append("ended")
                yield ended

    class Noted(Grader):
        def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
            events.append("graded")
            return super().submit(problems, completions)

    run = replace(wired(config()), workers=Slow(), grader=Noted({}))
    found, _ = collect(run, TrainState(), Clock())
    assert events == ["ended", "graded"] * 4
    assert ids(found.groups) == order(4)  # although the last request ended first
    for scored in found.groups:
        texts = [r.completion.text for r in scored.rollouts]
        assert texts == [f"{scored.problem.problem_id}/{j}" for j in range(2)]
        assert [r.score.reward for r in scored.rollouts] == MIXED
