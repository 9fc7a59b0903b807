"""Pictures whose tokens attend to each other in both directions: packing, and attention against a dense mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlcore.batch import Microbatch, Pictures, on_device, pack
from rlcore.families.internvl import TileLayout
from rlcore.models import attention
from rlcore.models.attention import Scores, shared_prompt_attention
from rlcore.models.sequence import cut
from rlcore.types import TrainingSample
from tests.numerics.attention import SCALE, dense, math_backward, math_forward, segments

PICTURE = 9  # the token that stands for a row of features


def sample(prompt: Sequence[int], completion: Sequence[int]) -> TrainingSample:
    mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
    zeros = np.zeros(len(mask), np.float32)
    tokens = np.array([*prompt, *completion], np.int32)
    return TrainingSample(tokens, loss_mask=mask, sampler_logprobs=zeros, advantages=zeros, images=(), policy_version=0)


class Layout(TileLayout):
    """Without images, which the attention does not need."""

    def positions(self, token_ids, grids):
        return np.arange(len(token_ids))


def packed(*samples: TrainingSample, both_ways: bool = True, monkeypatch: pytest.MonkeyPatch) -> Microbatch:
    monkeypatch.setattr("rlcore.batch._places", lambda samples, *_: (_arange(samples), np.full(_count(samples), -1)))
    return pack(samples, layout=Layout(PICTURE, 3, both_ways), features=None)


def _count(samples: Sequence[TrainingSample]) -> int:
    return sum(s.num_tokens for s in samples)


def _arange(samples: Sequence[TrainingSample]) -> np.ndarray:
    return np.concatenate([np.arange(s.num_tokens) for s in samples])


def test_the_pictures_of_a_row_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt has two pictures and two completions, the second has none, the third begins with one."""
    batch = packed(
        sample([1, 9, 9, 2, 9], [3]),
        sample([4, 5], [6, 7]),
        sample([1, 9, 9, 2, 9], [8]),
        sample([9, 9, 9], [1]),
        monkeypatch=monkeypatch,
    )
    pictures = batch.segments.pictures
    assert batch.token_ids.tolist() == [1, 9, 9, 2, 9, 4, 5, 9, 9, 9, 3, 8, 6, 7, 1]
    assert pictures.rows.tolist() == [1, 2, 4, 7, 8, 9]
    assert pictures.bounds.tolist() == [0, 2, 3, 6]
    assert pictures.key_rows.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 7, 8, 9]
    assert pictures.key_bounds.tolist() == [0, 3, 8, 11]
    assert pictures.sizes.tolist() == [3, 3, 5]


def test_a_row_without_pictures_and_a_family_that_sees_backwards_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packed(sample([1, 2], [3]), monkeypatch=monkeypatch).segments.pictures is None
    assert packed(sample([1, 9], [3]), both_ways=False, monkeypatch=monkeypatch).segments.pictures is None


def test_pictures_go_with_the_row_to_a_device_and_into_the_parts_of_sequence_parallelism(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = packed(sample([1, 9, 9, 2], [3]), monkeypatch=monkeypatch)
    assert len(batch.token_ids) == 5  # padded to 6 over two ranks
    for other in (on_device(batch, torch.device("cpu")), cut(batch, 0, 2, None), cut(batch, 1, 2, None)):
        for part in fields(Pictures):
            assert torch.equal(getattr(other.segments.pictures, part.name), getattr(batch.segments.pictures, part.name))


GROUPS = [(8, [3, 1]), (5, [2]), (4, [])]  # rows 0 to 16 are prompts
RUNS = [(1, 4), (5, 8), (8, 10), (14, 17)]  # of pictures; the last one is half a prompt and ends it


def row() -> attention.Segments:
    of_prompt = [0, 0, 8, 13]
    rows = [np.arange(first, end) for first, end in RUNS]
    keys = [np.arange(start, end) for start, (_, end) in zip(of_prompt, RUNS, strict=True)]
    pictures = Pictures(
        rows=torch.from_numpy(np.concatenate(rows)),
        bounds=torch.tensor(np.cumsum([0, *map(len, rows)]), dtype=torch.int32),
        key_bounds=torch.tensor(np.cumsum([0, *map(len, keys)]), dtype=torch.int32),
        key_rows=torch.from_numpy(np.concatenate(keys)),
        sizes=torch.tensor([len(rows), max(map(len, rows)), max(map(len, keys))]),
    )
    return replace(segments(GROUPS), pictures=pictures)


def leaves_of(total: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(total, heads, 8, generator=generator, dtype=dtype) for heads in (4, 2, 2, 4))
    return [x.requires_grad_() for x in (query, key, value)], grad


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 3, 4, 100])
def test_the_padded_batch_equals_the_dense_mask(window: int | None, cap: float | None) -> None:
    """A window of three leaves out the first tokens of a picture's past, and no token of the picture itself."""
    where = row()
    leaves, grad = leaves_of(int(where.bounds[-1]), torch.float64)
    expected = dense(*leaves, GROUPS, window, cap, RUNS)
    found = shared_prompt_attention(*leaves, where, Scores(SCALE, window, cap))
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert_close(*(torch.autograd.grad(x, leaves, grad) for x in (found, expected)), rtol=1e-11, atol=1e-12)
    causal = shared_prompt_attention(*leaves, replace(where, pictures=None), Scores(SCALE, window, cap))
    differs = (causal - found).abs().amax((1, 2)) > 1e-6
    assert differs.nonzero()[:, 0].tolist() == [1, 2, 5, 6, 8, 14, 15]  # the last token of each sees no more


class MathKernel:
    """A ``FlashKernel`` for the CPU."""

    def forward(self, inputs, where, scale):
        return math_forward(*inputs, *where, scale)

    def backward(self, grad, inputs, out, lse, where, scale):
        return math_backward(grad, *inputs, out, lse, *where, scale)


@pytest.mark.parametrize("window", [None, 4])
def test_the_operator_of_cuda_equals_the_dense_mask(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain arithmetic in the kernels' place."""
    monkeypatch.setattr(attention, "flash_kernel", lambda capped: MathKernel())
    monkeypatch.setattr(attention, "_has_kernel", lambda query: True)
    for operator in (attention._attention, attention._attention_backward):
        operator.register_kernel("cpu", operator._init_fn)
    where = row()
    leaves, grad = leaves_of(int(where.bounds[-1]), torch.float32)
    expected = dense(*leaves, GROUPS, window, None, RUNS)
    found = shared_prompt_attention(*leaves, where, Scores(SCALE, window))
    assert_close(found, expected)
    assert_close(*(torch.autograd.grad(x, leaves, grad) for x in (found, expected)), rtol=1e-4, atol=1e-5)
