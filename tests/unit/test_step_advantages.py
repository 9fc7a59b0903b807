"""From the scores of groups to advantages of tokens, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlcore.config import AlgorithmConfig, build_experiment
from rlcore.errors import ConfigError
from rlcore.rollout.advantages import attach_advantages, has_signal
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


def with_teacher(group: Group, old: list[list[float]], teacher: list[list[float]]) -> Group:
    """The group with log-probs of the policy and the teacher."""
    both = with_logprobs(group, old, teacher)
    return replace(
        both, samples=tuple(replace(s, teacher_logprobs=s.ref_logprobs, ref_logprobs=None) for s in both.samples)
    )


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


OLD, TEACHER = [[-1.0, -2.0], [-0.5]], [[-3.0, -1.5], [-0.5]]
"""Signals log p_teacher - log p_old of -2 and 0.5, and of 0."""


def test_a_teachers_signal_is_added_to_the_tasks_advantage():
    group = with_teacher(scored([1.0, 0.0], [2, 1]), OLD, TEACHER)
    settings = algorithm(advantage={"name": "dr_grpo"}, teacher={"path": "t", "coefficient": 0.1})
    found = attach_advantages([group], settings, kl_coefficient=0.0)
    assert found.samples[0].advantages.tolist() == pytest.approx([0, 0, 0, 0.5 - 0.2, 0.5 + 0.05])
    assert found.samples[1].advantages.tolist() == pytest.approx([0, 0, 0, -0.5])
    assert found.teacher_kl == pytest.approx((2 - 0.5 + 0) / 3)  # mean of log p_old - log p_teacher over three tokens
    assert all(s.teacher_logprobs is None for s in found.samples)


def test_a_teacher_alone_does_not_look_at_rewards_and_trains_ungraded_completions():
    group = with_teacher(scored([1.0, 0.0], [2, 1], graded=[True, False]), OLD, TEACHER)
    settings = algorithm(teacher={"path": "t", "coefficient": 2.0, "task_reward": False})
    found = attach_advantages([group], settings, kl_coefficient=0.0)
    assert found.samples[0].advantages.tolist() == [0, 0, 0, -4.0, 1.0]
    assert found.samples[1].advantages.tolist() == [0, 0, 0, 0]
    assert found.signal == [True]


def test_a_group_with_equal_rewards_has_the_teachers_signal_unless_the_teacher_agrees():
    settings = algorithm(teacher={"path": "t"})
    differs, agrees = (
        with_teacher(scored([1.0, 1.0], [2, 1]), OLD, teacher) for teacher in (TEACHER, [list(row) for row in OLD])
    )
    assert attach_advantages([differs, agrees], settings, kl_coefficient=0.0).signal == [True, False]
    assert has_signal(differs, settings)
    assert not has_signal(agrees, settings)


def test_a_teacher_and_a_kl_in_the_reward_keep_their_own_advantages():
    with_kl = with_logprobs(scored([1.0, 0.0], [2, 1]), [[-1.0, -1.0], [-1.0]], [[-2.0, -1.0], [-1.0]])
    samples = [replace(s, teacher_logprobs=s.old_logprobs + np.float32(0.25) * s.loss_mask) for s in with_kl.samples]
    group = replace(with_kl, samples=tuple(samples))
    settings = algorithm(
        advantage={"name": "dr_grpo"}, kl={"place": "reward", "estimator": "k1"}, teacher={"path": "t"}
    )
    found = attach_advantages([group], settings, kl_coefficient=0.5)
    assert [float(s.advantages[-1]) for s in found.samples] == [0.5, 0.0]  # 0.25 and -0.25 without the teacher
    assert found.kl_penalty == pytest.approx(1 / 3)
    assert found.teacher_kl == pytest.approx(-0.25)


def test_a_reward_to_go_per_token_takes_the_teachers_signal_too():
    group = with_teacher(scored([1.0, 0.0], [2, 1]), OLD, TEACHER)
    plain, taught = (
        attach_advantages([group], algorithm(advantage={"name": "reinforce_plus_plus"}, **more), kl_coefficient=0.0)
        for more in ({}, {"teacher": {"path": "t"}})
    )
    for before, after, signal in zip(plain.samples, taught.samples, ([-2.0, 0.5], [0.0]), strict=True):
        assert (after.advantages - before.advantages)[3:].tolist() == pytest.approx(signal)


def test_a_teacher_without_its_log_probs_is_refused():
    with pytest.raises(ValueError, match="no log-probs of the policy or the teacher"):
        attach_advantages([scored([1.0, 0.0], [2, 1])], algorithm(teacher={"path": "t"}), kl_coefficient=0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": {"name": "gspo"}}, "algorithm.loss is gspo, which weights a whole sequence"),
        ({"loss": {"name": "vespo"}}, "algorithm.loss is vespo"),
        ({"loss": {"name": "cispo", "level": "sequence"}}, "algorithm.loss is cispo with level sequence"),
        ({"loss": {"name": "sapo", "level": "sequence"}}, "algorithm.loss is sapo with level sequence"),
        ({"dynamic_sampling": {}}, "algorithm.dynamic_sampling replaces groups without signal"),
        ({"off_policy_mask": {}}, "algorithm.off_policy_mask masks sequences"),
    ],
)
def test_settings_that_do_not_fit_a_teacher_are_refused(settings: dict[str, object], words: str):
    with pytest.raises(ValueError, match=words):
        algorithm(teacher={"path": "t"}, **settings)


def test_settings_that_fit_a_teacher():
    for name in ("ppo_clip", "gspo_token", "cispo", "sapo"):
        algorithm(teacher={"path": "t"}, loss={"name": name})


def test_a_group_of_one_is_enough_for_a_teacher_alone():
    values = {"name": "e", "rollout": {"group_size": 1}, "algorithm": {"teacher": {"path": "t", "task_reward": False}}}
    build_experiment(values)
    with pytest.raises(ConfigError, match="rollout.group_size is 1"):
        build_experiment(values, ["algorithm.teacher.task_reward=true"])
