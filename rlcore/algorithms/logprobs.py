"""Log-probs of the trained tokens, and the only home of the shift by one.

The hidden state of token t - 1 predicts token t. Letters: T packed tokens, B sequences, N trained tokens,
H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def trained_positions(loss_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Where the trained tokens of a packed row are, and what predicts them.

    Args:
        loss_mask: [T] bool, True on trained tokens.
        cu_seqlens: [B+1] int, starts of the sequences, then T.

    Returns:
        predict_from [N] int64, the position whose hidden state predicts the token, and token_index [N] int64,
        the position of the token. Both in packing order.

    Raises:
        ValueError: the first token of a sequence is to be trained; nothing in its sequence predicts it.
    """
    starts = cu_seqlens[:-1][cu_seqlens[:-1] < cu_seqlens[1:]].long()  # an empty sequence starts at its neighbour's
    bad = starts[loss_mask[starts]]
    if bad.numel():
        raise ValueError(
            f"loss_mask is True at packed position {bad[0]}, the first token of a sequence: nothing predicts "
            "it. A sequence starts with at least one prompt token."
        )
    token_index = loss_mask.nonzero()[:, 0]
    return token_index - 1, token_index


def trained_sequences(loss_mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Which sequence each trained token is of, and how many each sequence has.

    Args:
        loss_mask: [T] bool.
        cu_seqlens: [B+1] int.

    Returns:
        sequence_index [N] int64 in 0..B-1, and lengths [B] int64, in trained tokens.
    """
    bounds = cu_seqlens.long()
    before = torch.cat([bounds.new_zeros(1), loss_mask.long().cumsum(0)])  # trained tokens left of each position
    lengths = before[bounds[1:]] - before[bounds[:-1]]
    return torch.searchsorted(bounds[1:], loss_mask.nonzero()[:, 0], right=True), lengths


def logprobs_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of the target and entropy of the whole distribution, in nats, float32 (float64 stays float64).

    Args:
        logits: [N, V] float; -inf bans a token.
        targets: [N] int64.

    Returns:
        logprobs [N], differentiable, and entropy [N], detached: -sum p log p, not the -log p of one sample.
    """
    logits = _at_least_float32(logits)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
    with torch.no_grad():
        entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    return logprobs, entropy


@torch.no_grad()
def log_kept(logits: Tensor, targets: Tensor, *, top_p: float, top_k: int) -> Tensor:
    """[N] log of the probability that top-k, then top-p leave: what a sampler's log-prob is too high by.

    As vLLM cuts: top-k keeps every token that ties with the k-th; of what it leaves, scaled up, top-p keeps a token if
    those before it hold less than ``top_p``, however ties are ordered. The target counts as kept even where the
    sampler's arithmetic put it inside and this one just outside.

    Args:
        logits: [N, V] float, after temperature; targets [N] int64.
        top_p: 1 keeps all; top_k: 0 keeps all.
    """
    probs = _at_least_float32(logits).softmax(-1)
    target = probs.gather(-1, targets[:, None])
    count = min(top_k, probs.shape[-1]) if top_k else probs.shape[-1]
    ranked = probs.topk(count, dim=-1).values  # [N, count], falling
    last = ranked[:, -1:]
    tied = (probs >= last).sum(-1, keepdim=True) - count  # [N, 1], as probable as the k-th and not in ``ranked``
    ranked_mass = ranked.sum(-1, keepdim=True)
    mass, lowest = ranked_mass + tied * last, last
    if top_p < 1:
        before = ranked.cumsum(-1) - ranked
        kept = before < top_p * mass
        room = torch.where(last > 0, (top_p * mass - ranked_mass) / last, 0.0).ceil().clamp_min(0.0)
        lowest = torch.where(kept, ranked, torch.inf).amin(-1, keepdim=True)
        mass = torch.where(kept, ranked, 0.0).sum(-1, keepdim=True) + torch.minimum(room, tied) * last
    mass = mass + torch.where(target < lowest, target, 0.0)
    return mass.clamp_max(1.0).log()[:, 0]


def chunked_logprobs(
    hidden: Tensor,
    project: Callable[[Tensor], Tensor],
    targets: Tensor,
    *,
    temperature: float,
    chunk_size: int,
    top_p: float = 1.0,
    top_k: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """``logprobs_and_entropy`` of project(hidden) / temperature without ever holding [N, V] logits.

    Forward keeps the hidden states alone; backward computes each chunk's logits again. So ``project`` runs
    ceil(N / chunk_size) times per pass (once for N = 0) and must not communicate between ranks.

    Args:
        hidden: [N, H], the states that predict the targets.
        project: [n, H] -> [n, V], the LM head; gradients reach its weights.
        targets: [N] int64.
        temperature: the sampling temperature, so that the distribution is the one sampled from.
        chunk_size: rows of logits alive at a time.
        top_p, top_k: what the sampler cut; the log-probs are of the whole distribution all the same.

    Returns:
        logprobs [N], differentiable; entropy [N] and ``log_kept`` [N], detached. The last is 0 where nothing is cut.
    """

    def of_chunk(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = _at_least_float32(project(states)) / temperature
        logprobs, entropy = logprobs_and_entropy(logits, wanted)
        if top_p >= 1 and top_k == 0:
            return logprobs, entropy, torch.zeros_like(entropy)
        return logprobs, entropy, log_kept(logits, wanted, top_p=top_p, top_k=top_k)

    parts = [
        checkpoint(of_chunk, states, wanted, use_reentrant=False, preserve_rng_state=False)
        for states, wanted in zip(torch.split(hidden, chunk_size), torch.split(targets, chunk_size), strict=True)
    ]
    logprobs, entropy, kept = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy), torch.cat(kept)


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
