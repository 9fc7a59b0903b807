"""How per-token losses become one number: loss = sum over tokens of weight * token loss.

The weights hold the denominators of the whole optimizer step, over all microbatches and ranks, so the losses
of any split of the step add up to the loss of the undivided batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Denominators of one optimizer step, over all microbatches and ranks.

    Sequences with advantage 0 (no signal, not graded) count like any other: a step's scale must not depend on
    how many groups had signal.

    Raises:
        ValueError: a total below 1.
    """

    tokens: int  # trained
    sequences: int

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.sequences < 1:
            raise ValueError(
                f"the step has {self.tokens} trained tokens in {self.sequences} sequences: nothing to "
                "train on. Both must be at least 1; skip this step."
            )


def token_weights(
    sequence_index: Tensor,
    lengths: Tensor,
    *,
    mode: Aggregation,
    totals: StepTotals,
    max_completion_tokens: int,
) -> Tensor:
    """The weight of each token's loss: [N] float64.

    Args:
        sequence_index: [N] int64 in 0..B-1.
        lengths: [B] int64, trained tokens of each whole sequence.
        mode: with D tokens in S sequences in the whole step, L trained tokens in the token's sequence:
            ``token_mean`` 1 / D (DAPO, arXiv:2503.14476, section 3.3);
            ``sequence_mean_token_mean`` 1 / (S * L) (GRPO, arXiv:2402.03300, eq. 3);
            ``sequence_mean_token_sum`` 1 / S;
            ``constant`` 1 / (S * max_completion_tokens) (Dr.GRPO, arXiv:2503.20783, section 3).
        max_completion_tokens: the sampling budget; used by ``constant`` alone.
    """
    denominators = torch.ones_like(sequence_index, dtype=torch.float64)
    match mode:
        case "token_mean":
            denominators *= totals.tokens
        case "sequence_mean_token_mean":
            denominators *= totals.sequences * lengths[sequence_index]
        case "sequence_mean_token_sum":
            denominators *= totals.sequences
        case "constant":
            denominators *= totals.sequences * max_completion_tokens
    return denominators.reciprocal()
