"""Promise 1: the gradient is one number, however the step is split, packed or ordered."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlcore.algorithms.advantage import group_advantages
from rlcore.algorithms.aggregation import StepTotals, token_weights
from rlcore.algorithms.kl import k3
from rlcore.algorithms.logprobs import chunked_logprobs, trained_positions, trained_sequences
from rlcore.algorithms.loss import clipped_policy_loss

MODES = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
WIDTH, VOCABULARY, MAX_COMPLETION = 6, 9, 12
CLIP_LOW, CLIP_HIGH, KL_COEFFICIENT, TEMPERATURE = 0.2, 0.28, 0.05, 0.8


@dataclass(frozen=True)
class Sequence:
    hidden: Tensor  # [L, H], stands for what the decoder says
    tokens: Tensor  # [L]
    prompt: int
    old: Tensor  # [L]
    ref: Tensor  # [L]
    advantage: float


def make_step(dtype: torch.dtype) -> list[Sequence]:
    """Four groups of three ragged sequences; group 2 is all right, one member of group 3 is not graded."""
    generator = torch.Generator().manual_seed(7)
    rewards = torch.tensor([[1.0, 0.0, 0.1], [0.0, 0.1, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    graded = torch.ones_like(rewards, dtype=torch.bool)
    graded[3, 2] = False
    sequences = []
    for group in range(4):
        values = group_advantages(rewards[group], graded[group], normalize_by_std=True).values
        for member in range(3):
            prompt = 1 + (group + member) % 3
            length = prompt + [1, 5, 2, 9][(2 * group + member) % 4]
            sequences.append(
                Sequence(
                    hidden=torch.randn(length, WIDTH, generator=generator, dtype=torch.float64).to(dtype),
                    tokens=torch.randint(0, VOCABULARY, (length,), generator=generator),
                    prompt=prompt,
                    old=(-2.2 + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64)).to(dtype),
                    ref=(-2.2 + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64)).to(dtype),
                    advantage=float(values[member]),
                )
            )
    return sequences


def make_head(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).mul(0.3).to(dtype).requires_grad_()


def step_gradient(microbatches: list[list[Sequence]], mode: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the LM head, accumulated as the trainer does it."""
    head = make_head(dtype)
    everything = [s for batch in microbatches for s in batch]
    totals = StepTotals(tokens=sum(len(s.tokens) - s.prompt for s in everything), sequences=len(everything))
    total = torch.zeros((), dtype=torch.float64)
    for batch in microbatches:
        mask = torch.cat([torch.arange(len(s.tokens)) >= s.prompt for s in batch])
        bounds = torch.tensor([0, *np.cumsum([len(s.tokens) for s in batch])])
        predict_from, token_index = trained_positions(mask, bounds)
        sequence_index, lengths = trained_sequences(mask, bounds)
        logprobs, _ = chunked_logprobs(
            torch.cat([s.hidden for s in batch])[predict_from],
            lambda hidden: hidden @ head.T,
            torch.cat([s.tokens for s in batch])[token_index],
            temperature=TEMPERATURE,
            chunk_size=4,
        )
        weights = token_weights(sequence_index, lengths, mode=mode, totals=totals, max_completion_tokens=MAX_COMPLETION)
        advantages = torch.tensor([s.advantage for s in batch], dtype=dtype)[sequence_index]
        old = torch.cat([s.old for s in batch])[token_index]
        ref = torch.cat([s.ref for s in batch])[token_index]
        policy = clipped_policy_loss(logprobs, old, advantages, weights, clip_low=CLIP_LOW, clip_high=CLIP_HIGH).loss
        loss = policy + KL_COEFFICIENT * (weights.to(dtype) * k3(logprobs, ref)).sum()
        loss.backward()
        total += loss.detach().double()
    return total, head.grad


def oracle_loss(sequences: list[Sequence], mode: str) -> float:
    """The same number from the formulas alone: python loops over one token at a time."""
    head = make_head(torch.float64).detach().numpy()
    num_tokens = sum(len(s.tokens) - s.prompt for s in sequences)
    loss = 0.0
    for s in sequences:
        trained = len(s.tokens) - s.prompt
        for t in range(s.prompt, len(s.tokens)):
            logits = [float(np.dot(row, s.hidden[t - 1].numpy())) / TEMPERATURE for row in head]
            logprob = logits[int(s.tokens[t])] - math.log(sum(math.exp(x) for x in logits))
            ratio = math.exp(logprob - float(s.old[t]))
            bounded = min(max(ratio, 1 - CLIP_LOW), 1 + CLIP_HIGH)
            log_r = float(s.ref[t]) - logprob
            token = -min(ratio * s.advantage, bounded * s.advantage)
            token += KL_COEFFICIENT * (math.exp(log_r) - log_r - 1)
            loss += (
                token
                / {
                    "token_mean": num_tokens,
                    "sequence_mean_token_mean": len(sequences) * trained,
                    "sequence_mean_token_sum": len(sequences),
                    "constant": len(sequences) * MAX_COMPLETION,
                }[mode]
            )
    return loss


def chunks(sequences: list[Sequence], size: int) -> list[list[Sequence]]:
    return [sequences[i : i + size] for i in range(0, len(sequences), size)]


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], relative: float) -> None:
    assert abs(got[0] - expected[0]) <= relative * abs(expected[0])
    assert (got[1] - expected[1]).norm() <= relative * expected[1].norm()


@pytest.mark.parametrize("mode", MODES)
def test_loss_equals_an_oracle_written_as_loops(mode):
    step = make_step(torch.float64)
    loss, _ = step_gradient([step], mode, torch.float64)
    assert_close(float(loss), oracle_loss(step, mode), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("mode", MODES)
def test_any_split_into_microbatches_gives_the_same_gradient(mode, dtype, relative):
    step = make_step(dtype)
    whole = step_gradient([step], mode, dtype)
    for split in (chunks(step, 1), chunks(step, 2), chunks(step, 5), [step[:1], step[1:11], step[11:]]):
        assert_same(step_gradient(split, mode, dtype), whole, relative)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("mode", MODES)
def test_any_order_of_sequences_and_groups_gives_the_same_gradient(mode, dtype, relative):
    step = make_step(dtype)
    whole = step_gradient([step], mode, dtype)
    shuffled = [step[i] for i in torch.randperm(len(step), generator=torch.Generator().manual_seed(3))]
    groups_turned = [s for group in reversed(chunks(step, 3)) for s in group]
    for order in (shuffled, groups_turned, step[::-1]):
        assert_same(step_gradient(chunks(order, 4), mode, dtype), whole, relative)


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_each_sum_their_share_add_up_to_the_gradient(mode):
    """W ranks: a plain sum of gradients, because the weights hold the global denominators already."""
    step = make_step(torch.float64)
    whole = step_gradient([step], mode, torch.float64)
    for ranks in (2, 4):
        shares = [step[rank::ranks] for rank in range(ranks)]
        assert_same(step_gradient(shares, mode, torch.float64), whole, 1e-12)


def test_the_aggregations_are_different_objectives():
    step = make_step(torch.float64)
    losses = [float(step_gradient([step], mode, torch.float64)[0]) for mode in MODES]
    assert len({round(loss, 6) for loss in losses}) == 4


@pytest.mark.parametrize("mode", MODES)
def test_a_group_without_signal_adds_exactly_nothing(mode, monkeypatch):
    monkeypatch.setattr(f"{__name__}.KL_COEFFICIENT", 0.0)
    step = make_step(torch.float64)
    group = step[6:9]  # all right
    assert [s.advantage for s in group] == [0.0] * 3
    _, gradient = step_gradient([group], mode, torch.float64)
    assert torch.equal(gradient, torch.zeros_like(gradient))
    # its tokens may be anything: the rest of the step does not move by one bit
    other = [replace(s, hidden=s.hidden * 3, old=s.old - 1) for s in group]
    rest = [step[:6], group, step[9:]], [step[:6], other, step[9:]]
    first, second = (step_gradient(parts, mode, torch.float64) for parts in rest)
    assert torch.equal(first[1], second[1])
