"""Log-probs of the trained tokens: the hidden state of token t - 1 predicts token t.

Letters: T tokens, B sequences, N trained tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOGIT_BYTES = 2 << 30  # of float32 logits at a time; their gradient takes half as much in addition


@cache
def fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """``function`` compiled into few kernels on CUDA; on other devices ``function`` itself.

    Args:
        function: takes tensors and constants; may write into its arguments. It is compiled for any number of rows and
            for fixed other dimensions.
    """
    if device_type != "cuda":
        return function
    compiled = torch.compile(function)

    def with_any_rows(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.dim():
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        return compiled(*arguments)

    return with_any_rows


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
def truncation_logprobs(logits: Tensor, targets: Tensor, *, top_p: float, top_k: int) -> Tensor:
    """[N] log of the probability mass that top-k, then top-p keep. A sampler's log-prob is too high by this much.

    The truncation is vLLM's. Top-k keeps every token that ties with the k-th. The rest is renormalised, and top-p keeps
    a token if the more probable ones have less than ``top_p`` in total. The target always counts as kept, because
    rounding may exclude it here and not in the sampler.

    Args:
        logits: [N, V] float, after temperature.
        targets: [N] int64.
        top_p: 1 keeps all tokens.
        top_k: 0 keeps all tokens.
    """
    probs = _at_least_float32(logits).softmax(-1)
    target = probs.gather(-1, targets[:, None])
    count = min(top_k, probs.shape[-1]) if top_k else probs.shape[-1]
    ranked = probs.topk(count, dim=-1).values  # [N, count], descending
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


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    cap: float | None = None,
    banned: Tensor | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    with_entropy: bool = True,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``logprobs_and_entropy`` of hidden @ weight.T / temperature, without the [N, V] logits in memory.

    With a ``cap`` the logits are cap * tanh(hidden @ weight.T / cap) / temperature (arXiv:2408.00118, section 2).

    The forward pass saves the hidden states and each row's log-sum-exp. The backward pass computes the logits of each
    chunk again, and from them the gradient, (softmax - onehot) times a scale. Logits are float32 whatever the dtype of
    the product, and so is the sum of the weight's gradient over the chunks. No communication between ranks.

    Args:
        hidden: [N, H], the hidden states that predict the targets.
        weight: [V, H], of the LM head.
        targets: [N] int64.
        temperature: of the sampler.
        cap: of the model's logits, before the temperature.
        banned: [n] int64, tokens with probability 0.
        top_p, top_k: of the sampler. They change ``truncation_logprobs``, not the log-probs.
        with_entropy: costs a pass over the logits.
        chunk_size: rows of logits at a time; None: as many as ``LOGIT_BYTES`` hold.

    Returns:
        logprobs [N], differentiable; entropy [N] and ``truncation_logprobs`` [N], detached. The entropy is 0 if it was
        not asked for, ``truncation_logprobs`` is 0 without top-p and top-k.
    """
    rows = chunk_size or max(1, LOGIT_BYTES // (4 * weight.shape[0]))
    cut = (top_p, top_k) if top_p < 1 or top_k else None
    result: tuple[Tensor, Tensor, Tensor] = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, banned, _Scaling(temperature, cap), rows, with_entropy, cut
    )
    return result


class _Scaling(NamedTuple):
    """From the model's logits to those of the sampler."""

    temperature: float
    cap: float | None

    @property
    def largest(self) -> float | None:
        """The cap of the sampler's logits."""
        return None if self.cap is None else self.cap / self.temperature


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        banned: Tensor | None,
        scaling: _Scaling,
        rows_at_a_time: int,
        with_entropy: bool,
        cut: tuple[float, int] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs, lse, entropy, kept = (hidden.new_zeros(len(hidden), dtype=dtype) for _ in range(4))
        statistics = fused(_statistics, hidden.device.type)
        for rows in _slices(len(hidden), rows_at_a_time):
            logits = _logits(hidden[rows], weight, banned, scaling)
            logprobs[rows], lse[rows], of_rows = statistics(logits, targets[rows], with_entropy)
            if with_entropy:
                entropy[rows] = of_rows
            if cut is not None:
                kept[rows] = truncation_logprobs(logits, targets[rows], top_p=cut[0], top_k=cut[1])
        ctx.save_for_backward(hidden, weight, targets, lse, banned)
        ctx.scaling, ctx.rows_at_a_time = scaling, rows_at_a_time
        ctx.mark_non_differentiable(entropy, kept)
        return logprobs, entropy, kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, banned = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        gradient = fused(_logit_gradient, hidden.device.type)
        scale = grad / ctx.scaling.temperature
        for rows in _slices(len(hidden), ctx.rows_at_a_time):
            logits = _logits(hidden[rows], weight, banned, ctx.scaling)
            of_logits = gradient(logits, targets[rows], lse[rows], scale[rows], hidden.dtype, ctx.scaling.largest)
            if of_hidden is not None:
                torch.mm(of_logits, weight, out=of_hidden[rows])
            if of_weight is not None:
                _add_product(of_weight, of_logits.t(), hidden[rows])
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        return of_hidden, of_weight, None, None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, banned: Tensor | None, scaling: _Scaling) -> Tensor:
    """[n, V] float32 (float64 stays float64)."""
    logits = _product(hidden, weight.t())
    if scaling.cap is not None:
        fused(_cap, hidden.device.type)(logits, scaling.cap)
    if scaling.temperature != 1:
        logits.div_(scaling.temperature)
    if banned is not None and len(banned):
        logits.index_fill_(-1, banned, float("-inf"))
    return logits


def _cap(logits: Tensor, cap: float) -> None:
    """In place."""
    logits.div_(cap).tanh_().mul_(cap)


def _statistics(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """For each row: log-prob of the target, log-sum-exp, entropy."""
    lse = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - lse
    if not with_entropy:
        return logprobs, lse, None
    every = (logits - lse[:, None]).clamp_min(torch.finfo(logits.dtype).min)  # 0 * -inf is not 0
    return logprobs, lse, -(every.exp() * every).sum(-1)


def _logit_gradient(
    logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, dtype: torch.dtype, largest: float | None
) -> Tensor:
    """[n, V] (onehot - softmax) * scale, in ``dtype``. With a cap ``largest`` of the logits, times its slope."""
    probs = (logits - lse[:, None]).exp()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    gradient = torch.where(is_target, 1 - probs, -probs) * scale[:, None]
    if largest is not None:
        gradient = gradient * (1 - (logits / largest).clamp(-1, 1).square())  # 1 - tanh^2; a banned logit is -inf
    return gradient.to(dtype)


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 or float64; on CUDA without rounding to the inputs' dtype."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    return _at_least_float32(a @ b)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's dtype."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(a @ b)


def _at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()
