import math

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from rlcore.algorithms.logprobs import linear_logprobs, logprobs_and_entropy
from rlcore.batch import trained_positions, trained_sequences


def test_positions_shift_by_one_inside_each_sequence():
    # two sequences: tokens 0..3 with 2, 3 trained; tokens 4..6 with 5, 6 trained
    mask = tensor([False, False, True, True, False, True, True])
    predict_from, token_index = trained_positions(mask, tensor([0, 4, 7]))
    assert predict_from.tolist() == [1, 2, 4, 5]
    assert token_index.tolist() == [2, 3, 5, 6]
    sequence_index, lengths = trained_sequences(mask, tensor([0, 4, 7]))
    assert sequence_index.tolist() == [0, 0, 1, 1]
    assert lengths.tolist() == [2, 2]


def test_a_trained_first_token_is_refused():
    with pytest.raises(ValueError, match="position 3, the first token"):
        trained_positions(tensor([False, True, True, True]), tensor([0, 3, 4]))
    with pytest.raises(ValueError, match="position 0"):
        trained_positions(tensor([True, True]), tensor([0, 2]))


def test_sequences_with_nothing_trained_and_empty_ones_keep_their_place():
    mask = tensor([False, False, False, True, True])
    bounds = tensor([0, 2, 2, 5, 5], dtype=torch.int32)  # lengths 2, 0, 3, 0
    predict_from, token_index = trained_positions(mask, bounds)
    assert predict_from.tolist() == [2, 3]
    sequence_index, lengths = trained_sequences(mask, bounds)
    assert sequence_index.tolist() == [2, 2]
    assert lengths.tolist() == [0, 0, 2, 0]


def test_packed_logprobs_equal_those_of_each_sequence_alone():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (9,), generator=generator)
    logits = torch.randn(9, 11, generator=generator)  # row t is what the model says after token t
    mask = tensor([False, True, True, False, False, True, True, True, True])
    predict_from, token_index = trained_positions(mask, tensor([0, 3, 9]))
    packed, _ = logprobs_and_entropy(logits[predict_from], tokens[token_index])
    alone = [
        logits[t - 1].log_softmax(-1)[tokens[t]]
        for start, end in ((0, 3), (3, 9))
        for t in range(start, end)
        if mask[t]
    ]
    assert_close(packed, torch.stack(alone))


def test_entropy_and_logprob_agree_with_torch_distributions():
    logits, targets = torch.randn(20, 50) * 4, torch.randint(0, 50, (20,))
    oracle = torch.distributions.Categorical(logits=logits)
    logprobs, entropy = logprobs_and_entropy(logits, targets)
    assert_close(logprobs, oracle.log_prob(targets))
    assert_close(entropy, oracle.entropy())


def test_bfloat16_logits_are_scored_in_float32():
    logits = torch.randn(5, 30).bfloat16()
    logprobs, entropy = logprobs_and_entropy(logits, torch.arange(5))
    exact, _ = logprobs_and_entropy(logits.double(), torch.arange(5))
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert_close(logprobs.double(), exact, rtol=1e-6, atol=1e-6)


def test_a_banned_token_has_no_share_and_harms_nothing():
    logits = torch.randn(3, 6)
    banned = logits.clone().requires_grad_()
    logprobs, entropy = logprobs_and_entropy(banned.index_fill(-1, tensor([5]), float("-inf")), tensor([0, 1, 2]))
    expected = logprobs_and_entropy(logits[:, :5], tensor([0, 1, 2]))
    assert_close((logprobs, entropy), expected)
    logprobs.sum().backward()
    assert torch.isfinite(banned.grad).all()
    assert torch.equal(banned.grad[:, 5], torch.zeros(3))


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100])
def test_chunked_equals_unchunked_in_value_and_gradient(chunk_size):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(13, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 13, (7,), generator=generator)
    upstream = torch.randn(7, generator=generator, dtype=torch.float64)

    whole = logprobs_and_entropy(hidden @ head.T / 0.7, targets)
    expected = torch.autograd.grad((whole[0] * upstream).sum(), (hidden, head))
    chunked = linear_logprobs(hidden, head, targets, temperature=0.7, chunk_size=chunk_size)
    got = torch.autograd.grad((chunked[0] * upstream).sum(), (hidden, head))

    assert_close(chunked[:2], whole, rtol=1e-12, atol=1e-12)
    assert torch.equal(chunked[2], torch.zeros(7, dtype=torch.float64))  # nothing is cut
    assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert not chunked[1].requires_grad


def test_a_capped_logit_and_its_gradient_by_hand():
    """Logits 2 ln 2 and 0 under a cap of 2: tanh(ln 2) = (4 - 1) / (4 + 1) = 0.6, so 1.2 and 0. The temperature of 0.5
    comes after the cap: 2.4 and 0. The slope of the cap is 1 - 0.6^2 = 0.64."""
    hidden = tensor([[1.0]], dtype=torch.float64, requires_grad=True)
    head = tensor([[2 * math.log(2)], [0.0]], dtype=torch.float64, requires_grad=True)
    logprobs, entropy, _ = linear_logprobs(hidden, head, tensor([0]), temperature=0.5, cap=2.0)
    p = 1 / (1 + math.exp(-2.4))
    assert logprobs.item() == pytest.approx(math.log(p))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p))
    logprobs.sum().backward()
    # the second logit is 0, where the cap has a slope of 1
    assert head.grad.flatten().tolist() == pytest.approx([(1 - p) * 0.64 / 0.5, -(1 - p) / 0.5])
    assert hidden.grad.item() == pytest.approx((1 - p) * 0.64 / 0.5 * 2 * math.log(2))


@pytest.mark.parametrize("cap", [0.5, 3.0, 1e6])
def test_capped_chunks_equal_capped_logits_with_banned_tokens_in_value_and_gradient(cap):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(13, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (7,), generator=generator)
    upstream = torch.randn(7, generator=generator, dtype=torch.float64)
    banned = tensor([11, 12])
    logits = (cap * torch.tanh(hidden @ head.T / cap) / 0.7).index_fill(-1, banned, float("-inf"))
    whole = logprobs_and_entropy(logits, targets)
    expected = torch.autograd.grad((whole[0] * upstream).sum(), (hidden, head))
    found = linear_logprobs(hidden, head, targets, temperature=0.7, cap=cap, banned=banned, chunk_size=3)
    assert_close(found[:2], whole, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad((found[0] * upstream).sum(), (hidden, head))
    assert_close(gradients, expected, rtol=1e-12, atol=1e-12)


def test_chunked_keeps_no_logits_for_backward():
    kept: list[int] = []
    hidden, head = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        linear_logprobs(hidden, head, torch.zeros(64, dtype=torch.int64), temperature=1.0, chunk_size=8)
    assert max(kept) == head.numel()


def test_chunked_runs_where_nothing_is_trained_and_without_gradients():
    head = torch.randn(5, 4, requires_grad=True)
    hidden = torch.empty(0, 4, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    found = linear_logprobs(hidden, head, none, temperature=1.0, chunk_size=8, top_p=0.9, top_k=2)
    logprobs, entropy, kept = found
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == kept.shape == (0,)
    assert torch.equal(head.grad, torch.zeros(5, 4))  # the head takes part: with sharded weights it has to
    with torch.no_grad():
        logprobs, _, _ = linear_logprobs(torch.randn(3, 4), head, tensor([0, 1, 2]), temperature=1.0, chunk_size=2)
    assert logprobs.shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_fused_head_equals_the_plain_one_with_banned_tokens_and_without_entropy(dtype):
    """Loss and both gradients, against autograd through float64 logits of the same rounded inputs."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(37, 16, generator=generator).to(dtype).requires_grad_()
    head = (torch.randn(101, 16, generator=generator) / 3).to(dtype).requires_grad_()
    targets = torch.randint(0, 99, (37,), generator=generator)
    upstream = torch.randn(37, generator=generator, dtype=torch.float64)
    banned = tensor([99, 100])

    exact = [x.detach().double().requires_grad_() for x in (hidden, head)]
    logits = (exact[0] @ exact[1].T / 0.9).index_fill(-1, banned, float("-inf"))
    values, entropy = logprobs_and_entropy(logits, targets)
    expected = torch.autograd.grad((values * upstream).sum(), exact)
    for with_entropy in (True, False):
        found = linear_logprobs(
            hidden, head, targets, temperature=0.9, banned=banned, with_entropy=with_entropy, chunk_size=10
        )
        gradients = torch.autograd.grad((found[0] * upstream.to(found[0].dtype)).sum(), (hidden, head))
        slack = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
        assert_close(found[0].double(), values, rtol=slack, atol=slack)
        assert_close(found[1].double(), entropy if with_entropy else torch.zeros_like(entropy), rtol=slack, atol=slack)
        for got, wanted in zip(gradients, expected, strict=True):
            assert got.dtype == dtype
            assert (got.double() - wanted).norm() <= slack * wanted.norm()


def test_a_frozen_head_gets_no_gradient():
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4)
    linear_logprobs(hidden, head, torch.zeros(5, dtype=torch.int64), temperature=1.0)[0].sum().backward()
    assert head.grad is None
    assert hidden.grad.norm() > 0
