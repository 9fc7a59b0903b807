"""The packed policy against Hugging Face's own forward pass, and what must not change its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlcore.algorithms.divergence import effective_sample_size
from rlcore.algorithms.loss import StepTotals
from rlcore.config import build_experiment
from rlcore.types import TrainingSample
from tests.numerics import toy
from tests.numerics.toy import huggingface_logprobs, step_gradient

MODES = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")
ALGORITHMS = (
    ("gspo", "sequence_mean_token_mean"),
    ("gspo", "sequence_mean_token_sum"),
    ("gspo_token", "sequence_mean_token_mean"),
    ("cispo", "token_mean"),
    ("sapo", "sequence_mean_token_mean"),
    ("vespo", "token_mean"),
)


def flat(sample: TrainingSample) -> TrainingSample:
    return replace(sample, advantages=np.zeros(sample.num_tokens, np.float32))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("text_only", [False, True])
def test_packed_logprobs_equal_huggingfaces_one_by_one(each_model: Path, text_only: bool) -> None:
    settings = toy.config()
    samples = toy.samples(6, group=2, text_only=text_only)
    found = toy.policy(each_model, settings).logprobs([samples])[0]
    for sample, values in zip(samples, found, strict=True):
        np.testing.assert_allclose(values.logprobs, huggingface_logprobs(each_model, sample, 0.9), atol=2e-5)


@pytest.mark.parametrize(("loss", "mode"), [*(("ppo_clip", mode) for mode in MODES), *ALGORITHMS])
def test_the_gradient_does_not_depend_on_microbatches_or_order(each_model: Path, loss: str, mode: str) -> None:
    settings = toy.config(loss={"name": loss}, aggregation=mode, kl={"coefficient": 0.1})
    samples = toy.samples(8)
    policy = toy.policy(each_model, settings)
    scored = policy.logprobs([samples], reference=True)[0]
    off = np.float32(0.1 if loss == "ppo_clip" else 0.01)  # the others look at the whole sequence
    samples = [
        replace(
            s,
            old_logprobs=r.logprobs + off * s.loss_mask,
            ref_logprobs=r.logprobs - np.float32(0.2) * s.loss_mask,
        )
        for s, r in zip(samples, scored, strict=True)
    ]
    whole, _ = step_gradient(policy, [samples], 0.1)
    assert whole.norm() > 0
    by_two, _ = step_gradient(policy, [samples[i : i + 2] for i in range(0, 8, 2)], 0.1)
    one_by_one, _ = step_gradient(policy, [[s] for s in samples], 0.1)
    parts = [[samples[i] for i in (5, 2, 7, 0)], [], [samples[i] for i in (3, 6, 1, 4)]]
    shuffled, _ = step_gradient(policy, parts, 0.1)
    limit = 1e-5 if loss == "vespo" else 2e-6  # its weights are powers of a sequence's ratio, and of its rounding
    assert relative(by_two, whole) < limit
    assert relative(one_by_one, whole) < limit
    assert relative(shuffled, whole) < limit


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({"gradient_checkpointing": "full"}, {}),
        ({"gradient_checkpointing": "selective"}, {}),
        ({}, {"reshard_after_forward": "on"}),
        ({"gradient_checkpointing": "selective"}, {"reshard_after_forward": "on"}),
        ({"gradient_checkpointing": "full"}, {"compile_blocks": "on"}),
    ],
)
def test_activation_checkpointing_does_not_change_the_gradient(
    each_model: Path, model: dict[str, str], training: dict[str, str]
) -> None:
    samples = toy.samples(4)
    plain = toy.config()
    other = plain.model_copy(
        update={
            "model": plain.model.model_copy(update=model),
            "training": plain.training.model_copy(update=training),
        }
    )
    a, _ = step_gradient(toy.policy(each_model, plain), [samples])
    b, _ = step_gradient(toy.policy(each_model, other), [samples])
    assert relative(b, a) < 1e-6


@pytest.mark.parametrize(
    ("model", "without_gradient"),
    [
        ("model.gradient_checkpointing=none", 1),
        ("model.gradient_checkpointing=full", 1),
        ("model.lora.rank=4", 2),  # the reference is the policy without its adapters
    ],
)
def test_all_blocks_and_the_reference_share_their_compiled_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, without_gradient: int
) -> None:
    """Compiling is most of a start on a GPU. The first block needs no graph of its own either."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=512, num_hidden_layers=3, **shape)).save_pretrained(tmp_path)
    graphs: list[list[object]] = []  # the inputs of each

    def keep(module: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        graphs.append(inputs)
        return module.forward

    monkeypatch.setattr("rlcore.models.sharding.torch.compile", partial(torch.compile, backend=keep))
    # one operator, as on a GPU; its value does not matter here
    monkeypatch.setattr("rlcore.models.attention.shared_prompt_attention", lambda query, *_: query * 1.0)
    torch._dynamo.reset()
    config = toy.config(kl={"coefficient": 0.1}).model_dump(mode="json")
    policy = toy.policy(tmp_path, build_experiment(config, [model, "training.compile_blocks=on"]))
    samples = toy.samples(8, text_only=True)
    policy.logprobs([samples[:2]])
    policy.logprobs([samples[2:5]], reference=True)
    assert len(graphs) == without_gradient
    totals = StepTotals(tokens=sum(sample.num_trained for sample in samples), sequences=len(samples))
    policy.update([samples[:3], samples[3:]], totals, 1e-3, 0.1)
    assert len(graphs) == without_gradient + 1
    for inputs in graphs:
        numbers = {str(value) for value in inputs if isinstance(value, torch.SymInt)}
        assert 1 <= sum(not number.isdigit() for number in numbers) <= 3  # tokens, segments, keys; no size of a head
        # a number that is kept open would be a scalar on the CPU, for which torch compiles C++
        assert not [value for value in inputs if isinstance(value, Tensor) and value.dim() == 0]


@pytest.mark.parametrize(("loss", "mode"), [("ppo_clip", "token_mean"), *ALGORITHMS])
def test_on_policy_the_ratio_is_exactly_one(tiny_model: Path, loss: str, mode: str) -> None:
    """With a learning rate of 0 nothing moves, for two updates per rollout batch and two passes over it: old log-probs
    from their own pass over the same plans are bit for bit those of every update."""
    policy = toy.policy(tiny_model, toy.config(loss={"name": loss}, aggregation=mode, kl={"coefficient": 0.01}))
    before = {name: value.clone() for name, value in policy.full_weights()}
    samples = toy.samples(8)
    updates = []
    for plan in ([samples[:3], samples[3:4]], [samples[4:5], samples[5:]]):
        old, reference = policy.logprobs(plan), policy.logprobs(plan, reference=True)
        updates.append(
            [
                [
                    replace(s, old_logprobs=o.logprobs, ref_logprobs=r.logprobs)
                    for s, o, r in zip(m, os, rs, strict=True)
                ]
                for m, os, rs in zip(plan, old, reference, strict=True)
            ]
        )
    for plan in updates * 2:
        every = [s for m in plan for s in m]
        result = policy.update(plan, StepTotals(sum(s.num_trained for s in every), len(every)), 0.0, 0.01)
        sums = result.sums
        assert result.grad_norm > 0
        assert float(sums.maxima["loss/ratio_max"]) == 1.0
        assert float(sums.means["loss/ratio_mean"]) == float(sums.totals["tokens"])
        assert float(sums.means["loss/clip_fraction"]) == 0.0
        assert float(sums.means["loss/kl_old"]) == 0.0
        assert float(sums.totals["kl_ref"]) < 1e-9  # the reference is the same weights at step 0
    assert all(torch.equal(value, before[name]) for name, value in policy.full_weights())


def test_truncation_by_top_p_and_top_k_is_no_mismatch(tiny_model: Path) -> None:
    """A sampler that scales up what it kept, at the same weights: every weight is 1 and every token counts."""
    settings = toy.config(kl={"coefficient": 0.0})
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"top_p": 0.9, "top_k": 40})})
    policy = toy.policy(tiny_model, settings)
    samples = toy.samples(4)
    scored = policy.logprobs([samples])[0]
    assert all((r.truncation_logprobs[s.loss_mask] < -1e-3).any() for s, r in zip(samples, scored, strict=True))
    samples = [
        replace(s, sampler_logprobs=r.logprobs - r.truncation_logprobs) for s, r in zip(samples, scored, strict=True)
    ]
    count = sum(s.num_trained for s in samples)
    sums = policy.update([samples], StepTotals(count, 4), 0.0, 0.0).sums
    assert float(sums.maxima["rollout/abs_delta_logprob_max"]) < 2e-6
    ratios = (sums.totals["importance_ratio"], sums.totals["importance_ratio_squared"])
    assert float(effective_sample_size(*ratios)) == pytest.approx(count, rel=1e-6)
    stale = [
        replace(s, old_logprobs=r.logprobs, truncation_logprobs=r.truncation_logprobs)
        for s, r in zip(samples, scored, strict=True)
    ]
    sums = policy.update([stale], StepTotals(count, 4), 0.0, 0.0).sums
    assert float(sums.maxima["rollout/abs_delta_logprob_max"]) < 2e-6


def test_zero_advantage_gives_exactly_zero_gradient(tiny_model: Path) -> None:
    policy = toy.policy(tiny_model, toy.config(kl={"coefficient": 0.0}))
    samples = [flat(s) for s in toy.samples(4)]
    gradient, values = step_gradient(policy, [samples])
    assert values["norm"] == 0.0
    assert not gradient.any()


def test_the_sampler_gets_every_tensor_of_the_state_dict(tiny_model: Path) -> None:
    policy = toy.policy(tiny_model, toy.config())
    from transformers import AutoModelForImageTextToText

    expected = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    for bucket_bytes in (1, 1 << 30):
        found = dict(policy.full_weights(bucket_bytes=bucket_bytes))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_no_metric_of_the_step_depends_on_the_kl_coefficient(tiny_model: Path) -> None:
    """Without a KL term three of eight samples are not computed, with one all are: the means stay those over the tokens
    with an advantage, whether the ratio is 1 or (``old_logprobs``) not."""
    from rlcore.distributed.group import WorkerGroup
    from rlcore.distributed.ranks import LocalRanks
    from rlcore.training.metrics import update_metrics

    samples = [flat(s) if i in (1, 4, 5) else s for i, s in enumerate(toy.samples(8))]

    def metrics(coefficient: float, *, old: bool, samples: list[TrainingSample] = samples) -> dict[str, float]:
        settings = toy.config(kl={"coefficient": coefficient})
        policy = toy.policy(tiny_model, settings)
        workers = WorkerGroup(LocalRanks(toy.Rank(policy)), settings)
        if coefficient > 0:
            reference = policy.logprobs([samples], reference=True)[0]
            samples = [replace(s, ref_logprobs=r.logprobs) for s, r in zip(samples, reference, strict=True)]
        if old:
            samples = [replace(s, old_logprobs=s.sampler_logprobs) for s in samples]
        return update_metrics(workers.update(samples, 0.0, coefficient), coefficient, alarm_above=0.01)

    of_the_objective = {"loss/total", "loss/kl_coefficient", "loss/kl_ref", "optim/grad_norm"}
    for old in (False, True):
        without, with_kl = metrics(0.0, old=old), metrics(0.1, old=old)
        assert without.keys() == with_kl.keys()
        for name in without.keys() - of_the_objective:
            assert without[name] == pytest.approx(with_kl[name], rel=1e-5, abs=1e-6), name
    trained = [s for i, s in enumerate(samples) if i not in (1, 4, 5)]
    values = np.concatenate([huggingface_logprobs(tiny_model, s, 0.9)[s.loss_mask] for s in trained])
    sampler = np.concatenate([s.sampler_logprobs[s.loss_mask] for s in trained])
    apart = metrics(0.0, old=False)["rollout/abs_delta_logprob_mean"]
    assert apart == pytest.approx(np.abs(values - sampler).mean(), rel=1e-4)

    left_out = metrics(0.0, old=False).keys() - metrics(0.0, old=False, samples=[flat(s) for s in samples]).keys()
    assert {"loss/entropy", "loss/ratio_mean", "rollout/effective_sample_size"} <= left_out
    assert "rollout/mismatch_alarm" not in left_out


def test_an_entropy_mask_trains_the_tokens_that_the_old_pass_found_most_uncertain(tiny_model: Path) -> None:
    from rlcore.distributed.group import WorkerGroup
    from rlcore.distributed.ranks import LocalRanks

    settings = toy.config(kl={"coefficient": 0.0}, entropy_mask={"share": 0.25})
    workers = WorkerGroup(LocalRanks(toy.Rank(toy.policy(tiny_model, settings))), settings)
    samples = toy.samples(8)
    samples = [
        replace(s, old_logprobs=r.logprobs, truncation_logprobs=r.truncation_logprobs, entropies=r.entropies)
        for s, r in zip(samples, workers.logprobs(samples), strict=True)
    ]
    entropies = np.concatenate([s.entropies[s.loss_mask] for s in samples])
    advantages = np.concatenate([s.advantages[s.loss_mask] for s in samples])
    sums = workers.update(samples, 0.0, 0.0).sums
    assert float(sums.means["loss/entropy"]) == pytest.approx(float(entropies.sum()), rel=1e-5)
    count = len(entropies)
    kept = entropies >= np.sort(entropies)[-int(np.ceil(0.25 * count))]
    assert float(sums.means["loss/entropy_masked"]) == count - kept.sum() == count - np.ceil(0.25 * count)
    # on policy the ratio is 1 and the loss of a token -A
    expected = -float(advantages[kept].sum()) / count
    assert float(sums.totals["policy_loss"]) == pytest.approx(expected, rel=1e-5)


def test_leaving_out_samples_without_gradient_changes_nothing(tiny_model: Path) -> None:
    """The group drops them before the update and keeps them in the denominators; the step taken is the same."""
    from rlcore.distributed.group import WorkerGroup, has_gradient
    from rlcore.distributed.ranks import LocalRanks

    settings = toy.config(kl={"coefficient": 0.0})
    samples = [flat(s) if i in (1, 4, 5) else s for i, s in enumerate(toy.samples(8))]
    assert [has_gradient(s) for s in samples] == [i not in (1, 4, 5) for i in range(8)]
    assert has_gradient(replace(samples[1], ref_logprobs=samples[1].sampler_logprobs))  # its KL term still pulls

    plain = toy.policy(tiny_model, settings)
    everything = plain.update([samples], StepTotals(sum(s.num_trained for s in samples), len(samples)), 1e-3, 0.0)
    grouped = toy.policy(tiny_model, settings)
    result = WorkerGroup(LocalRanks(toy.Rank(grouped)), settings).update(samples, 1e-3, 0.0)
    assert result.grad_norm == pytest.approx(everything.grad_norm, rel=1e-6)
    assert float(result.sums.totals["policy_loss"]) == pytest.approx(
        float(everything.sums.totals["policy_loss"]), rel=1e-5
    )
    for (name, a), (_, b) in zip(plain.full_weights(), grouped.full_weights(), strict=True):
        assert torch.allclose(a, b, atol=2e-5), name

    still = [flat(s) for s in samples]
    assert (
        WorkerGroup(LocalRanks(toy.Rank(grouped)), settings).update(still, 1e-3, 0.0).grad_norm == 0.0
    )  # AdamW's step is still taken
