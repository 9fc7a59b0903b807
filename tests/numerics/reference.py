"""The algorithms once more, as loops over plain numbers: written from the papers, sharing no line with the code.

A group is a list of rewards and a list of verdicts (graded or not); a token is a row of the lists. Everything is as
slow as its formula reads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

Rows = Sequence[Sequence[float]]
Verdicts = Sequence[Sequence[bool]]
SPREAD = 1e-6  # rewards closer than this are equal


def kept(rewards: Sequence[float], graded: Sequence[bool]) -> list[float]:
    return [reward for reward, ok in zip(rewards, graded, strict=True) if ok]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float], *, sample: bool) -> float:
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - 1 if sample else len(values)))


def spread(values: Sequence[float]) -> bool:
    return len(values) >= 2 and max(values) - min(values) > SPREAD


def _by_group(
    rewards: Rows, graded: Verdicts, of_member: Callable[[float, list[float], list[float]], float]
) -> list[list[float]]:
    """``of_member(reward, group, others)`` for graded members of groups with spread, 0 for the rest."""
    out = []
    for row, oks in zip(rewards, graded, strict=True):
        group = kept(row, oks)
        found = []
        for i, (reward, ok) in enumerate(zip(row, oks, strict=True)):
            others = [r for j, (r, o) in enumerate(zip(row, oks, strict=True)) if o and j != i]
            found.append(of_member(reward, group, others) if ok and spread(group) else 0.0)
        out.append(found)
    return out


def grpo(rewards: Rows, graded: Verdicts, *, sample: bool) -> list[list[float]]:
    return _by_group(rewards, graded, lambda r, group, _: (r - mean(group)) / deviation(group, sample=sample))


def dr_grpo(rewards: Rows, graded: Verdicts) -> list[list[float]]:
    return _by_group(rewards, graded, lambda r, group, _: r - mean(group))


def rloo(rewards: Rows, graded: Verdicts) -> list[list[float]]:
    return _by_group(rewards, graded, lambda r, _, others: r - mean(others))


def batch_std(rewards: Rows, graded: Verdicts) -> list[list[float]]:
    everything = [r for row, oks in zip(rewards, graded, strict=True) for r in kept(row, oks)]
    return _by_group(rewards, graded, lambda r, group, _: (r - mean(group)) / deviation(everything, sample=True))


def beta_density(x: float, alpha: float, beta: float) -> float:
    log_scale = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    return math.exp(log_scale + (alpha - 1) * math.log(x) + (beta - 1) * math.log(1 - x))


def bnpo(rewards: Rows, graded: Verdicts) -> list[list[float]]:
    p = [mean(kept(row, oks)) for row, oks in zip(rewards, graded, strict=True) if any(oks)]
    a = b = 0.0
    if spread(p):
        centre, variance = mean(p), deviation(p, sample=True) ** 2
        a = (centre * (1 - centre) / variance - 1) * centre
        b = (centre * (1 - centre) / variance - 1) * (1 - centre)
    alpha, beta = max(1.0, 1 + a / 3), max(1.0, 1 + b / 3)

    def of_member(reward: float, group: list[float], _: list[float]) -> float:
        inside = min(max(mean(group), 1e-6), 1 - 1e-6)
        return (reward - mean(group)) / max(1e-6, beta_density(inside, alpha, beta))

    return _by_group(rewards, graded, of_member)


def pass_at_k(rewards: Rows, graded: Verdicts, k: int) -> list[list[float]]:
    """Every subset of k is formed; its best is what all of its members are worth."""
    out = []
    for row, oks in zip(rewards, graded, strict=True):
        members = [i for i, ok in enumerate(oks) if ok]
        subsets = list(itertools.combinations(members, k))
        best = [max(row[i] for i in subset) for subset in subsets]
        found = [0.0] * len(row)
        if len(subsets) > 1 and deviation(best, sample=False) > SPREAD:
            for i in members:
                of_i = [b for subset, b in zip(subsets, best, strict=True) if i in subset]
                found[i] = (mean(of_i) - mean(best)) / deviation(best, sample=False)
        out.append(found)
    return out


def pass_at_k_binary(right: int, wrong: int, k: int) -> tuple[float, float]:
    """The paper's closed forms for a right and a wrong completion."""
    total = right + wrong
    average = 1 - math.comb(wrong, k) / math.comb(total, k)
    std = math.sqrt(average * (1 - average))
    of_wrong = 1 - average - math.comb(wrong - 1, k - 1) / math.comb(total - 1, k - 1)
    return (1 - average) / std, of_wrong / std


def remax(rewards: Rows, graded: Verdicts, baselines: Sequence[float], found: Sequence[bool]) -> list[list[float]]:
    return [
        [r - baseline if ok and has and abs(r - baseline) > SPREAD else 0.0 for r, ok in zip(row, oks, strict=True)]
        for row, oks, baseline, has in zip(rewards, graded, baselines, found, strict=True)
    ]


def reinforce_plus_plus(
    returns: Sequence[Rows], tokens: Sequence[Verdicts], graded: Verdicts
) -> list[list[list[float]]]:
    """Returns and tokens are [problem][completion][token]."""
    counted = [
        value
        for b, group in enumerate(returns)
        for g, row in enumerate(group)
        for t, value in enumerate(row)
        if graded[b][g] and tokens[b][g][t]
    ]
    if not spread(counted):
        return [[[0.0 for _ in row] for row in group] for group in returns]
    centre, std = mean(counted), deviation(counted, sample=False)
    return [
        [
            [(v - centre) / std if graded[b][g] and tokens[b][g][t] else 0.0 for t, v in enumerate(row)]
            for g, row in enumerate(group)
        ]
        for b, group in enumerate(returns)
    ]


def reinforce_plus_plus_baseline(
    rewards: Rows, graded: Verdicts, lengths: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Centred by group, then every token of the batch votes on mean and deviation."""
    votes: list[float] = []
    for row, oks, counts in zip(rewards, graded, lengths, strict=True):
        for reward, ok, count in zip(row, oks, counts, strict=True):
            if ok:
                votes += [reward - mean(kept(row, oks))] * count
    if not votes or deviation(votes, sample=False) <= SPREAD:
        return [[0.0] * len(row) for row in rewards]
    centre, std = mean(votes), deviation(votes, sample=False)
    return _by_group(rewards, graded, lambda r, group, _: (r - mean(group) - centre) / std)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ppo_clip(new: float, old: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    ratio = math.exp(new - old)
    objective = min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def sequence_ratio(new: Sequence[float], old: Sequence[float]) -> float:
    """GSPO's, of one whole sequence: the geometric mean of its tokens' ratios."""
    return math.prod(math.exp(n - o) for n, o in zip(new, old, strict=True)) ** (1 / len(new))


def gspo(new: Sequence[float], old: Sequence[float], advantage: float, low: float, high: float) -> float:
    s = sequence_ratio(new, old)
    return -min(s * advantage, clip(s, 1 - low, 1 + high) * advantage)


def ratios(new: Sequence[float], old: Sequence[float], level: str) -> list[float]:
    """Of each token of one sequence, or for all of them that of the sequence."""
    if level == "sequence":
        return [sequence_ratio(new, old)] * len(new)
    return [math.exp(n - o) for n, o in zip(new, old, strict=True)]


def cispo(new: Sequence[float], old: Sequence[float], advantage: float, max_ratio: float, level: str) -> list[float]:
    found = zip(new, ratios(new, old, level), strict=True)
    return [-min(ratio, max_ratio) * advantage * n for n, ratio in found]


def sapo(ratio: float, advantage: float, tau_positive: float, tau_negative: float) -> float:
    tau = tau_positive if advantage > 0 else tau_negative
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * advantage


def vespo_weight(
    new: Sequence[float],
    old: Sequence[float],
    advantage: float,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> float:
    w = math.prod(math.exp(n - o) for n, o in zip(new, old, strict=True))
    power, rate = positive if advantage >= 0 else negative
    return w**power * math.exp(rate * (1 - w))


def k1(p: float, q: float) -> float:
    return p - q


def k2(p: float, q: float) -> float:
    return (p - q) ** 2 / 2


def k3(p: float, q: float) -> float:
    return math.exp(q) / math.exp(p) - 1 - (q - p)


def token_weight(mode: str, *, length: int, tokens: int, sequences: int, budget: int) -> float:
    return {
        "token_mean": 1 / tokens,
        "sequence_mean_token_mean": 1 / (sequences * length) if length else 0.0,
        "sequence_mean_token_sum": 1 / sequences,
        "constant": 1 / (sequences * budget),
    }[mode]


def importance(trainer: Sequence[float], sampler: Sequence[float], sequence: Sequence[int] | None) -> list[float]:
    """p_trainer / p_sampler of each token, or the product over its sequence."""
    ratios = [math.exp(t - s) for t, s in zip(trainer, sampler, strict=True)]
    if sequence is None:
        return ratios
    return [math.prod(r for r, other in zip(ratios, sequence, strict=True) if other == own) for own in sequence]


def effective_sample_size(weights: Sequence[float]) -> float:
    return math.fsum(weights) ** 2 / math.fsum(w * w for w in weights)


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    total = math.fsum(math.exp(x - top) for x in logits)
    return [math.exp(x - top) / total for x in logits]


def sampler_keeps(logits: Sequence[float], *, top_p: float, top_k: int) -> list[int]:
    """The tokens that vLLM leaves: those at or above the k-th logit; of these, scaled up, the most probable until
    ``top_p`` is reached. Ties are taken in the order of their ids."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        threshold = logits[ranked[min(top_k, len(logits)) - 1]]
        ranked = [i for i in ranked if logits[i] >= threshold]
    shares = softmax([logits[i] for i in ranked])
    found, before = [], 0.0
    for token, share in zip(ranked, shares, strict=True):
        if before < top_p or top_p >= 1:
            found.append(token)
        before += share
    return found
