"""A prompt that is computed once for its group against the same sequences one by one: values, loss, gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlcore.algorithms.loss import StepTotals
from rlcore.batch import Microbatch, pack
from rlcore.distributed.group import microbatch_work
from rlcore.errors import ModelError
from rlcore.flops import ModelShape
from rlcore.models import attention
from rlcore.models.attention import Scores, packed_attention, shared_prompt_attention
from rlcore.models.torch_policy import TorchPolicy
from rlcore.types import TrainingSample
from tests.numerics import toy
from tests.numerics.attention import LAYOUTS, SCALE, dense, math_backward, math_forward, segments


class Gemma(torch.nn.Module):
    """A layer by name."""


def sample(prompt: Sequence[int], completion: Sequence[int], trained: Sequence[bool] | None = None) -> TrainingSample:
    mask = np.array([*[False] * len(prompt), *(trained or [True] * len(completion))], np.bool_)
    values = np.arange(len(mask), dtype=np.float32)
    return TrainingSample(
        token_ids=np.array([*prompt, *completion], np.int32),
        loss_mask=mask,
        sampler_logprobs=-values * mask,
        advantages=(100 + values) * mask,
        images=(),
        policy_version=0,
    )


def packed(*samples: TrainingSample) -> Microbatch:
    return pack(samples, layout=None, features=None)


def test_the_row_by_hand():
    """Two prompts, 10 11 and 20 21 22; the first has two completions, given around the other one's."""
    batch = packed(
        sample([10, 11], [1, 2, 3], [True, False, True]), sample([20, 21, 22], [4]), sample([10, 11], [5, 6])
    )
    assert batch.token_ids.tolist() == [10, 11, 20, 21, 22, 1, 2, 3, 5, 6, 4]
    assert batch.position_ids.tolist() == [0, 1, 0, 1, 2, 2, 3, 4, 2, 3, 3]
    assert batch.segments.bounds.tolist() == [0, 2, 5, 8, 10, 11]
    assert batch.segments.key_rows.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 0, 1, 8, 9, 2, 3, 4, 10]
    assert batch.segments.key_bounds.tolist() == [0, 2, 5, 10, 14, 18]
    assert batch.segments.sizes.tolist() == [2, 3, 5]
    assert batch.targets.tolist() == [1, 3, 4, 5, 6]  # in the order given
    assert batch.predict_from.tolist() == [1, 6, 4, 1, 8]  # the first of both completions from the one prompt's end
    assert batch.sequence_index.tolist() == [0, 0, 1, 2, 2]
    assert batch.sequence_lengths.tolist() == [2, 1, 2]
    assert batch.advantages.tolist() == [102, 104, 103, 102, 103]


def test_a_sequence_without_anything_trained_is_all_prompt_and_keeps_its_place():
    batch = packed(sample([1, 2], [3], [False]), sample([1, 2], [3]))
    assert batch.token_ids.tolist() == [1, 2, 3, 1, 2, 3]
    assert batch.segments.key_bounds.tolist() == [0, 3, 5, 8]
    assert batch.sequence_lengths.tolist() == [0, 1]
    assert batch.predict_from.tolist() == [4]


def test_a_trained_first_token_is_refused():
    with pytest.raises(ValueError, match="the first token of a sequence"):
        packed(sample([], [1, 2]))


def test_tokens_packed_are_tokens_counted():
    samples = toy.samples(8, text_only=True)
    shape = ModelShape(parameters=1, head_parameters=1, layers=1, width=1, weights_train=True, tower=None)
    batch = packed(*samples)
    work = microbatch_work(shape, samples)
    assert work.tokens == len(batch.token_ids) < sum(s.num_tokens for s in samples)
    assert work.tokens + work.shared_tokens == sum(s.num_tokens for s in samples)
    assert work.prompt_tokens == int(batch.segments.bounds[batch.segments.sizes[0]])


# --- attention alone ---


def test_a_soft_cap_by_hand():
    """The second token's scores are 3 ln 3 and 0, under a cap of 1: tanh(3 ln 3) = (9^3 - 1) / (9^3 + 1) = 728 / 730.
    Without the cap the first key would have 27 / 28 of the weight."""
    ln3 = float(np.log(3))
    query, key = torch.tensor([[[0.0]], [[3 * ln3]]]), torch.tensor([[[1.0]], [[0.0]]])
    value = torch.tensor([[[1.0]], [[0.0]]])
    where = segments([(2, [])])
    weight = 1 / (1 + np.exp(-728 / 730))
    found = shared_prompt_attention(query, key, value, where, Scores(1.0, cap=1.0))
    assert found[1].item() == pytest.approx(weight, rel=1e-6)
    assert shared_prompt_attention(query, key, value, where, Scores(1.0))[1].item() == pytest.approx(27 / 28, rel=1e-6)


def test_a_soft_cap_is_of_text_alone():
    query = torch.randn(1, 2, 4, 8)
    with pytest.raises(ModelError, match="Gemma.* softcap"):
        packed_attention(Gemma(), query, query, query, None, cu_seq_lens_q=torch.tensor([0, 4]), softcap=1.0)


class MathKernel:
    """A ``FlashKernel`` for the CPU."""

    def forward(self, inputs, where, scale):
        return math_forward(*inputs, *where, scale)

    def backward(self, grad, inputs, out, lse, where, scale):
        return math_backward(grad, *inputs, out, lse, *where, scale)


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_padded_batch_equals_the_dense_mask(layout, window, cap):
    """Completions begin right after their prompts, also for a window that reaches from one into the other."""
    groups = LAYOUTS[layout]
    where = segments(groups)
    generator = torch.Generator().manual_seed(0)
    total = int(where.bounds[-1])
    query, key, value, grad = (
        torch.randn(total, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)
    )
    leaves = [x.requires_grad_() for x in (query, key, value)]
    expected = dense(*leaves, groups, window, cap)
    found = shared_prompt_attention(*leaves, where, Scores(SCALE, window, cap))
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients = (torch.autograd.grad(x, leaves, grad) for x in (found, expected))
    assert_close(*gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (4, None), (4, 0.5)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operator_of_cuda_equals_the_dense_mask_and_compiles_whole(layout, window, cap, monkeypatch):
    """Plain arithmetic in the kernels' place; schema, shapes without data and autograd are checked by torch."""
    monkeypatch.setattr(attention, "flash_kernel", lambda capped: MathKernel())
    for operator in (attention._attention, attention._attention_backward):
        operator.register_kernel("cpu", operator._init_fn)
    groups = LAYOUTS[layout]
    where = segments(groups)
    ends = (where.bounds, where.key_bounds, where.key_rows, where.sizes)
    generator = torch.Generator().manual_seed(0)
    total = int(where.bounds[-1])
    query, key, value, grad = (torch.randn(heads, total, 8, generator=generator) for heads in (4, 2, 2, 4))
    leaves = [x.transpose(0, 1).requires_grad_() for x in (query, key, value)]
    torch.library.opcheck(attention.OPERATOR, (*leaves, *ends, SCALE, window, cap, True))

    def block(*parts: Tensor) -> Tensor:
        return attention.OPERATOR(*(part * 2 for part in parts), *ends, SCALE, window, cap, True)[0] + 1

    expected = dense(*(leaf * 2 for leaf in leaves), groups, window, cap) + 1
    wanted = torch.autograd.grad(expected, leaves, grad.transpose(0, 1))
    for found in (block(*leaves), torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")(*leaves)):
        assert_close(found, expected)
        assert_close(torch.autograd.grad(found, leaves, grad.transpose(0, 1)), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [("s_aux", torch.zeros(2)), ("dropout", 0.1), ("is_causal", False)],
)
def test_a_keyword_that_attention_does_not_compute_is_refused(keyword, value):
    where = segments([(5, [3, 1, 7])])
    query = torch.randn(1, 2, int(where.bounds[-1]), 8)
    with pytest.raises(ModelError, match=f"Gemma.* {keyword}"):
        packed_attention(Gemma(), query, query, query, None, segments=where, **{keyword: value})


def test_keywords_without_effect_pass():
    where = segments([(5, [3, 1, 7])])
    query = torch.randn(1, 2, int(where.bounds[-1]), 8)
    expected, _ = packed_attention(Gemma(), query, query, query, None, segments=where)
    harmless = {"softcap": None, "s_aux": None, "sliding_window": None, "dropout": 0.0, "position_ids": torch.arange(5)}
    found, _ = packed_attention(Gemma(), query, query, query, None, segments=where, **harmless)
    assert torch.equal(found, expected)


# --- the whole policy ---


def gradient(policy: TorchPolicy, microbatches: list[list[TrainingSample]]) -> tuple[float, Tensor]:
    """Loss and gradient of one optimizer step that is not taken."""
    gradients = toy.keep_gradients(policy, then_step=False)
    every = [s for m in microbatches for s in m]
    totals = StepTotals(tokens=sum(s.num_trained for s in every), sequences=len(every))
    result = policy.update(microbatches, totals, 1e-3, 0.0)
    return float(result.sums.totals["policy_loss"]), toy.in_one_vector(policy, gradients) * max(1.0, result.grad_norm)


@pytest.mark.parametrize("text_only", [False, True])
@pytest.mark.parametrize(("count", "group"), [(4, 4), (8, 4), (9, 3), (5, 4)])
def test_sharing_changes_neither_loss_nor_gradient_nor_logprobs(each_model: Path, count, group, text_only):
    """One group, several, and one whose last member lies in another microbatch."""
    policy = toy.policy(each_model, toy.config())
    samples = toy.samples(count, group=group, text_only=text_only)
    alone = [[s] for s in samples]
    loss, expected = gradient(policy, alone)
    splits = [[samples], [samples[: group - 1], samples[group - 1 :]], [samples[::-1]]]
    for split in splits:
        found_loss, found = gradient(policy, split)
        assert found_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert float((found - expected).norm() / expected.norm()) < 2e-6
    together = policy.logprobs([samples])[0]
    for one, (by_itself,) in zip(together, policy.logprobs(alone), strict=True):
        np.testing.assert_allclose(one.logprobs, by_itself.logprobs, atol=1e-5)


def test_a_prompt_is_shared_where_its_tokens_and_images_are_the_same(tiny_model: Path):
    policy = toy.policy(tiny_model, toy.config())
    pack_ = partial(policy._pack, model=policy.model)
    samples = toy.samples(8, group=4)
    row = pack_(samples)
    prompts = {s.token_ids[: s.num_prompt].tobytes(): s.num_prompt for s in samples}
    assert len(row.token_ids) == sum(prompts.values()) + sum(s.num_trained for s in samples)
    assert len(row.image_index) == len(set(row.image_index.tolist())) == len(row.image_rows)

    image = samples[1].images[0]
    toy.PICTURES["another"] = toy.PICTURES[image.sha256]
    other = replace(samples[1], images=(replace(image, sha256="another"),))
    assert len(pack_([samples[0], other]).token_ids) == samples[0].num_tokens + other.num_tokens
