"""From the scores of groups to advantages of tokens, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlcore.config import AlgorithmConfig
from rlcore.rollout.advantages import attach_advantages
from rlcore.rollout.groups import Group
from rlcore.types import Completion, Problem, Score


def scored(
    rewards: list[float], lengths: list[int], *, baseline: float | None = None, graded: list[bool] | None = None
):
    problem = Problem("p", "?", (), "1", "test")
    prompt = np.array([7, 8, 9], np.int32)
    completions = tuple(
        Completion.one_turn(np.arange(n, dtype=np.int32), np.full(n, -0.5, np.float32), "", "stop", 0) for n in lengths
    )
    flags = graded or [True] * len(rewards)
    scores = [Score(r, {"accuracy": r}, g) for r, g in zip(rewards, flags, strict=True)]
    of_baseline = None if baseline is None else Score(baseline, {}, graded=True)
    group = Group(0, problem, "0", 0, prompt, completions, tuple(scores), of_baseline)
    return group.admitted(mask_truncated=False)


def with_logprobs(group: Group, old: list[list[float]], ref: list[list[float]]) -> Group:
    def rows(values: list[float], length: int) -> np.ndarray:
        return np.concatenate([np.zeros(length - len(values)), values]).astype(np.float32)

    samples = tuple(
        replace(s, old_logprobs=rows(o, s.num_tokens), ref_logprobs=rows(r, s.num_tokens))
        for s, o, r in zip(group.samples, old, ref, strict=True)
    )
    return replace(group, samples=samples)


def algorithm(**values: object) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(values)


def test_every_trained_token_has_its_completions_advantage_and_the_prompt_has_none():
    found = attach_advantages(
        [scored([1.0, 0.0], [2, 1])], algorithm(advantage={"name": "dr_grpo"}), kl_coefficient=0.0
    )
    assert found.samples[0].advantages.tolist() == [0, 0, 0, 0.5, 0.5]
    assert found.samples[1].advantages.tolist() == [0, 0, 0, -0.5]
    assert found.signal == [True]
    assert found.kl_penalty is None


def test_ungraded_completions_and_groups_without_spread_train_nothing():
    groups = [scored([1.0, 0.0, 9.0], [1, 1, 1], graded=[True, True, False]), scored([0.3] * 3, [1, 1, 1])]
    found = attach_advantages(groups, algorithm(), kl_coefficient=0.0)
    values = [float(s.advantages[-1]) for s in found.samples]
    assert values == pytest.approx([2**-0.5, -(2**-0.5), 0, 0, 0, 0])
    assert found.signal == [True, False]


def test_remax_compares_with_the_greedy_completion():
    found = attach_advantages(
        [scored([1.0, 0.25], [1, 1], baseline=0.5)], algorithm(advantage={"name": "remax"}), kl_coefficient=0.0
    )
    assert [float(s.advantages[-1]) for s in found.samples] == [0.5, -0.25]


def test_kl_in_the_reward_is_taken_off_before_the_group_is_compared_and_leaves_the_loss():
    # k1 sums: (-1 + 2) + (-1 + 1) = 1 and -1 + 1 = 0; rewards 1 - 0.5 * 1 and 0 - 0
    group = with_logprobs(scored([1.0, 0.0], [2, 1]), [[-1.0, -1.0], [-1.0]], [[-2.0, -1.0], [-1.0]])
    settings = algorithm(advantage={"name": "dr_grpo"}, kl={"place": "reward", "estimator": "k1"})
    found = attach_advantages([group], settings, kl_coefficient=0.5)
    assert [float(s.advantages[-1]) for s in found.samples] == [0.25, -0.25]
    assert found.kl_penalty == pytest.approx(1 / 3)
    assert all(s.ref_logprobs is None for s in found.samples)


def test_reinforce_plus_plus_gives_each_token_the_penalties_that_are_still_to_come():
    # to go, coefficient 0.5: 1 - 0.5 * (1 + 0) = 0.5 and 1 - 0 = 1 for the first; 0 for the second
    group = with_logprobs(scored([1.0, 0.0], [2, 1]), [[-1.0, -1.0], [-1.0]], [[-2.0, -1.0], [-1.0]])
    settings = algorithm(
        advantage={"name": "reinforce_plus_plus"}, kl={"place": "reward", "estimator": "k1", "coefficient": 0.5}
    )
    found = attach_advantages([group], settings, kl_coefficient=0.5)
    deviation = np.std([0.5, 1.0, 0.0])
    assert found.samples[0].advantages[3:].tolist() == pytest.approx([0.0, 0.5 / deviation], abs=1e-6)
    assert found.samples[1].advantages[3:].tolist() == pytest.approx([-0.5 / deviation], abs=1e-6)


def test_kl_in_the_loss_keeps_the_reference_log_probs():
    group = with_logprobs(scored([1.0, 0.0], [1, 1]), [[-1.0], [-1.0]], [[-2.0], [-1.0]])
    found = attach_advantages([group], algorithm(advantage={"name": "dr_grpo"}), kl_coefficient=0.5)
    assert [float(s.advantages[-1]) for s in found.samples] == [0.5, -0.5]
    assert all(s.ref_logprobs is not None for s in found.samples)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "batch_std", "rloo", "bnpo", "pass_at_k", "reinforce_plus_plus_baseline"]
)
def test_every_estimator_prefers_the_right_completion(name: str):
    groups = [scored([1.0, 0.0, 0.0, 1.0], [2, 2, 2, 2]), scored([0.0, 0.0, 0.0, 1.0], [2, 2, 2, 2])]
    choice = {"name": name, **({"k": 2} if name == "pass_at_k" else {})}
    found = attach_advantages(groups, algorithm(advantage=choice), kl_coefficient=0.0)
    values = np.array([s.advantages[-1] for s in found.samples]).reshape(2, 4)
    assert (values[0, [0, 3]] > 0).all()
    assert (values[0, [1, 2]] < 0).all()
    assert values[1, 3] > 0
    assert found.signal == [True, True]
