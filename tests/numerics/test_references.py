"""Every estimator, loss and weight against its formula written as loops (reference.py), over random inputs."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

from rlcore.algorithms import advantage, divergence
from rlcore.algorithms.loss import StepTotals, cispo, gspo, gspo_token, ppo_clip, sapo, token_weights, vespo
from tests.numerics import reference

SEEDS = range(12)
each_seed = pytest.mark.parametrize("seed", SEEDS)


def draw_groups(seed: int) -> tuple[Tensor, Tensor]:
    """Groups of one to six; rewards in [0, 1], often equal; some members ungraded, their rewards NaN."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1 + seed % 5, 1 + seed % 6)
    rewards = torch.rand(shape, generator=generator, dtype=torch.float64)
    if seed % 3:
        rewards = (rewards * 2).round() / 2
    graded = torch.rand(shape, generator=generator) < (1.0 if seed % 4 == 0 else 0.7)
    return torch.where(graded, rewards, torch.nan), graded


PAIRS = {
    "grpo_sample": (
        lambda r, g: advantage.grpo(r, g, std="sample"),
        lambda r, g: reference.grpo(r, g, sample=True),
    ),
    "grpo_population": (
        lambda r, g: advantage.grpo(r, g, std="population"),
        lambda r, g: reference.grpo(r, g, sample=False),
    ),
    "dr_grpo": (advantage.dr_grpo, reference.dr_grpo),
    "batch_std": (advantage.batch_std, reference.batch_std),
    "rloo": (advantage.rloo, reference.rloo),
    "bnpo": (advantage.bnpo, reference.bnpo),
    **{
        f"pass_at_{k}": (
            lambda r, g, k=k: advantage.pass_at_k(r, g, k=k),
            lambda r, g, k=k: reference.pass_at_k(r, g, k),
        )
        for k in (1, 2, 3, 4)
    },
}


@each_seed
@pytest.mark.parametrize("name", PAIRS)
def test_advantages_of_groups(name, seed):
    ours, loops = PAIRS[name]
    rewards, graded = draw_groups(seed)
    found = ours(rewards, graded)
    expected = tensor(loops(rewards.tolist(), graded.tolist()), dtype=torch.float64)
    assert_close(found.values, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(found.signal, expected.abs().gt(1e-12).any(-1))


@each_seed
def test_advantages_over_tokens_and_baselines(seed):
    rewards, graded = draw_groups(seed)
    generator = torch.Generator().manual_seed(100 + seed)
    lengths = torch.randint(1, 5, rewards.shape, generator=generator)
    found = advantage.reinforce_plus_plus_baseline(rewards, graded, lengths).values
    loops = reference.reinforce_plus_plus_baseline(rewards.tolist(), graded.tolist(), lengths.tolist())
    assert_close(found, tensor(loops, dtype=torch.float64))

    tokens = torch.arange(4) < lengths[..., None]
    returns = torch.rand((*rewards.shape, 4), generator=generator, dtype=torch.float64) * tokens
    found = advantage.reinforce_plus_plus(returns, tokens, graded).values
    loops = reference.reinforce_plus_plus(returns.tolist(), tokens.tolist(), graded.tolist())
    assert_close(found, tensor(loops, dtype=torch.float64))

    baselines = (torch.rand(len(rewards), generator=generator, dtype=torch.float64) * 2).round() / 2
    has = torch.rand(len(rewards), generator=generator) < 0.7
    found = advantage.remax(rewards, graded, baselines, has).values
    loops = reference.remax(rewards.tolist(), graded.tolist(), baselines.tolist(), has.tolist())
    assert_close(found, tensor(loops, dtype=torch.float64))


@dataclass(frozen=True)
class Drawn:
    """Ragged sequences with log-probs far and near, and an advantage for each sequence."""

    new: list[list[float]]
    old: list[list[float]]
    advantages: list[float]
    sequence_index: Tensor
    lengths: Tensor

    def flat(self, rows: list[list[float]]) -> Tensor:
        return tensor([value for row in rows for value in row], dtype=torch.float64)

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        per_token = tensor(self.advantages, dtype=torch.float64)[self.sequence_index]
        return self.flat(self.new), self.flat(self.old), per_token

    def expected(self, of_sequence) -> Tensor:
        """``of_sequence(new, old, advantage)`` gives the values of its tokens."""
        rows = zip(self.new, self.old, self.advantages, strict=True)
        return self.flat([of_sequence(new, old, a) for new, old, a in rows])


def draw_tokens(seed: int) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (5,), generator=generator)
    new = [torch.randn(int(n), generator=generator).double().mul(0.6).sub(2).tolist() for n in lengths]
    old = [[v + float(torch.randn((), generator=generator)) * (0.02 + 0.3 * (seed % 3)) for v in row] for row in new]
    advantages = [*torch.randn(4, generator=generator).tolist(), 0.0]
    return Drawn(new, old, advantages, torch.repeat_interleave(torch.arange(5), lengths), lengths)


@each_seed
@pytest.mark.parametrize("dual", [None, 1.5])
def test_ppo_clip(seed, dual):
    drawn = draw_tokens(seed)
    found = ppo_clip(*drawn.arguments, clip_low=0.2, clip_high=0.28, dual_clip=dual)
    expected = drawn.expected(
        lambda new, old, a: [reference.ppo_clip(n, o, a, 0.2, 0.28, dual) for n, o in zip(new, old, strict=True)]
    )
    assert_close(found.values, expected)


@each_seed
@pytest.mark.parametrize("loss", [gspo, gspo_token])
@pytest.mark.parametrize("clips", [(3e-4, 4e-4), (0.1, 0.2)])
def test_gspo_and_gspo_token(seed, loss, clips):
    drawn = draw_tokens(seed)
    found = loss(*drawn.arguments, drawn.sequence_index, drawn.lengths, clip_low=clips[0], clip_high=clips[1])
    expected = drawn.expected(lambda new, old, a: [reference.gspo(new, old, a, *clips)] * len(new))
    assert_close(found.values, expected)
    assert_close(found.ratios, drawn.expected(lambda new, old, _: [reference.sequence_ratio(new, old)] * len(new)))


@each_seed
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_cispo(seed, level):
    drawn = draw_tokens(seed)
    found = cispo(*drawn.arguments, drawn.sequence_index, drawn.lengths, level=level, max_ratio=1.1)
    assert_close(found.values, drawn.expected(lambda new, old, a: reference.cispo(new, old, a, 1.1, level)))


@each_seed
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_sapo(seed, level):
    drawn = draw_tokens(seed)
    found = sapo(*drawn.arguments, drawn.sequence_index, drawn.lengths, level=level, tau_positive=1.0, tau_negative=1.3)
    expected = drawn.expected(
        lambda new, old, a: [reference.sapo(ratio, a, 1.0, 1.3) for ratio in reference.ratios(new, old, level)]
    )
    assert_close(found.values, expected)


@each_seed
def test_vespo(seed):
    drawn = draw_tokens(seed)
    found = vespo(
        *drawn.arguments,
        drawn.sequence_index,
        drawn.lengths,
        k_positive=2.0,
        lambda_positive=3.0,
        k_negative=3.0,
        lambda_negative=2.0,
    )
    expected = drawn.expected(
        lambda new, old, a: [-reference.vespo_weight(new, old, a, (2.0, 3.0), (3.0, 2.0)) * a * n for n in new]
    )
    assert_close(found.values, expected)


@each_seed
def test_kl_estimates(seed):
    drawn = draw_tokens(seed)
    new, old, _ = drawn.arguments
    for name in ("k1", "k2", "k3"):
        expected = [getattr(reference, name)(p, q) for p, q in zip(new.tolist(), old.tolist(), strict=True)]
        assert_close(getattr(divergence, name)(new, old), tensor(expected, dtype=torch.float64))
    assert_close(divergence.straight_through(new, old), divergence.k3(new, old))


@each_seed
@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"])
def test_token_weights(seed, mode):
    drawn = draw_tokens(seed)
    totals = StepTotals(tokens=int(drawn.lengths.sum()) + 7, sequences=8)
    found = token_weights(drawn.sequence_index, drawn.lengths, mode=mode, totals=totals, max_completion_tokens=16)
    expected = [
        reference.token_weight(
            mode, length=int(drawn.lengths[i]), tokens=totals.tokens, sequences=totals.sequences, budget=16
        )
        for i in drawn.sequence_index
    ]
    assert_close(found, tensor(expected, dtype=torch.float64))


@each_seed
@pytest.mark.parametrize("of_sequence", [False, True])
def test_importance_weights_and_effective_sample_size(seed, of_sequence):
    drawn = draw_tokens(seed)
    trainer, sampler, _ = drawn.arguments
    index = drawn.sequence_index if of_sequence else None
    ratios = reference.importance(trainer.tolist(), sampler.tolist(), index.tolist() if of_sequence else None)
    cut = divergence.truncated_importance(trainer, sampler, index, max_weight=1.2)
    assert_close(cut, tensor([min(r, 1.2) for r in ratios], dtype=torch.float64))
    masked = divergence.masked_importance(trainer, sampler, index, min_weight=0.8, max_weight=1.2)
    assert_close(masked, tensor([r if 0.8 <= r <= 1.2 else 0.0 for r in ratios], dtype=torch.float64))
    if not of_sequence:
        weights = divergence.importance_ratios(trainer, sampler)
        found = divergence.effective_sample_size(weights.sum(), weights.square().sum())
        assert_close(found, tensor(reference.effective_sample_size(ratios), dtype=torch.float64))
