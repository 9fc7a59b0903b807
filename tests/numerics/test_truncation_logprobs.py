"""What top-p and top-k left: against the cut written as loops, and with it the sampler's log-probs are the policy's."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, tensor
from torch.testing import assert_close

from rlcore.algorithms.logprobs import linear_logprobs, logprobs_and_entropy, truncation_logprobs
from tests.numerics import reference

CUTS = [(1.0, 0), (1.0, 3), (0.8, 0), (0.3, 0), (0.7, 4), (0.95, 2), (1.0, 1), (0.01, 0), (1.0, 100)]
each_cut = pytest.mark.parametrize(("top_p", "top_k"), CUTS)


def brute_force(logits: Tensor, top_p: float, top_k: int) -> list[tuple[list[int], float]]:
    """The kept tokens of each row, and the log of the probability that they hold."""
    out = []
    for row in logits.tolist():
        kept = reference.sampler_keeps(row, top_p=top_p, top_k=top_k)
        probs = reference.softmax(row)
        out.append((kept, math.log(min(1.0, math.fsum(probs[i] for i in kept)))))
    return out


def test_equals_the_values_worked_out_by_hand():
    # probabilities 0.5, 0.3, 0.15, 0.05
    logits = tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()
    first = tensor([0])

    def mass(top_p: float, top_k: int) -> float:
        return float(truncation_logprobs(logits, first, top_p=top_p, top_k=top_k).exp())

    assert mass(1.0, 2) == pytest.approx(0.8)
    assert mass(0.7, 0) == pytest.approx(0.8)  # 0.5 is not enough, 0.8 is
    assert mass(0.6, 2) == pytest.approx(0.5)  # of the two left the first holds 0.625
    assert mass(0.0001, 0) == pytest.approx(0.5)  # one is always kept
    assert mass(1.0, 0) == pytest.approx(1.0)


def test_ties_with_the_kth_are_all_kept_as_vllm_keeps_them():
    # e^0 five times and e^-1 twice: the second place is shared by five
    logits = tensor([[0.0, -1.0, 0.0, 0.0, 0.0, -1.0, 0.0]], dtype=torch.float64)
    total = 5 + 2 * math.exp(-1)
    assert_close(
        truncation_logprobs(logits, tensor([6]), top_p=1.0, top_k=2).exp(), tensor([5 / total], dtype=torch.float64)
    )
    # each of the five holds a fifth of what top-k left: 0.5 takes three of them, whichever they are
    assert_close(
        truncation_logprobs(logits, tensor([6]), top_p=0.5, top_k=2).exp(), tensor([3 / total], dtype=torch.float64)
    )


@each_cut
def test_equals_brute_force(top_p, top_k):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 9, generator=generator, dtype=torch.float64) * 2
    for row, (kept, expected) in zip(logits, brute_force(logits, top_p, top_k), strict=True):
        for token in kept:
            found = truncation_logprobs(row[None], tensor([token]), top_p=top_p, top_k=top_k)
            assert_close(found, tensor([expected], dtype=torch.float64), rtol=1e-12, atol=1e-12)


@given(
    st.lists(st.integers(-3, 3), min_size=2, max_size=12),
    st.sampled_from([0.05, 0.33, 0.61, 0.87, 1.0]),
    st.integers(0, 13),
)
@settings(max_examples=200)
def test_equals_brute_force_where_many_tie(row, top_p, top_k):
    logits = tensor([row], dtype=torch.float64)
    ((kept, expected),) = brute_force(logits, top_p, top_k)
    found = float(truncation_logprobs(logits, tensor([kept[0]]), top_p=top_p, top_k=top_k))
    # where top_p falls on a boundary to the last bit, one tied token more or less is rounding's choice
    one = math.exp(min(logits[0, i] for i in kept) - float(logits.logsumexp(-1)))
    boundary = any(
        abs(math.fsum(sorted(reference.softmax([row[i] for i in kept]), reverse=True)[:n]) - top_p) < 1e-9
        for n in range(1, len(kept) + 1)
    )
    assert math.exp(found) == pytest.approx(math.exp(expected), abs=one + 1e-9 if boundary else 1e-9)


@each_cut
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sampler_logprobs_plus_truncation_logprobs_are_the_policys(top_p, top_k, dtype):
    """The sampler as vLLM does it: temperature, top-k, top-p, scaled up to one."""
    generator = torch.Generator().manual_seed(1)
    temperature = 0.7
    raw = torch.randn(64, 50, generator=generator, dtype=dtype) * 3
    logits = raw / temperature
    keep = torch.zeros(raw.shape, dtype=torch.bool)
    for row, (kept, _) in enumerate(brute_force(logits, top_p, top_k)):
        keep[row, kept] = True
    sampled_from = logits.masked_fill(~keep, -torch.inf).log_softmax(-1)
    targets = torch.multinomial(sampled_from.exp(), 1, generator=generator)[:, 0]
    sampler = sampled_from.gather(-1, targets[:, None])[:, 0]
    full, _ = logprobs_and_entropy(logits, targets)
    noise = 1e-12 if dtype == torch.float64 else 2e-6
    found = truncation_logprobs(logits, targets, top_p=top_p, top_k=top_k)
    assert_close(sampler + found, full, rtol=0, atol=noise)

    identity = torch.eye(raw.shape[1], dtype=raw.dtype)
    chunked = linear_logprobs(raw, identity, targets, temperature=temperature, chunk_size=10, top_p=top_p, top_k=top_k)
    assert_close(sampler + chunked[2], chunked[0], rtol=0, atol=noise)
    assert (chunked[2] <= 0).all()


def test_a_target_just_outside_the_cut_counts_as_kept():
    logits = tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    found = truncation_logprobs(logits, tensor([2]), top_p=1.0, top_k=1).exp()
    assert_close(found, tensor([0.7], dtype=torch.float64))


def test_banned_tokens_are_never_kept_and_bfloat16_is_scored_in_float32():
    logits = tensor([[1.0, 0.5, -torch.inf, -torch.inf]])
    assert_close(truncation_logprobs(logits, tensor([0]), top_p=1.0, top_k=3), tensor([0.0]))
    assert_close(truncation_logprobs(logits, tensor([1]), top_p=0.9999, top_k=4), tensor([0.0]))
    assert truncation_logprobs(logits.bfloat16(), tensor([0]), top_p=0.5, top_k=0).dtype == torch.float32


def test_a_large_vocabulary_loses_nothing_to_rounding():
    logits = torch.randn(3, 150_000, generator=torch.Generator().manual_seed(2)) * 2
    targets = logits.argmax(-1)
    for top_p, top_k in ((0.95, 0), (1.0, 50), (0.9, 200)):
        exact = truncation_logprobs(logits.double(), targets, top_p=top_p, top_k=top_k)
        found = truncation_logprobs(logits, targets, top_p=top_p, top_k=top_k)
        assert_close(found.double(), exact, rtol=0, atol=1e-5)
