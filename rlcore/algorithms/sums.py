"""What the microbatches of an optimizer step add up to, by name. Merge microbatches, then ranks, before dividing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

_Values = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class StepSums:
    """[] float64 tensors, detached. ``StepSums()`` is the sum over nothing.

    ``means`` and ``maxima`` are named as the metrics that they become, and cover the tokens that ``of`` counts.
    """

    totals: _Values = field(default_factory=dict)
    means: _Values = field(default_factory=dict)  # sums so far; the metric is the sum over the number of tokens
    maxima: _Values = field(default_factory=dict)  # 0 over no tokens

    @classmethod
    def of(cls, counted: Tensor, *, totals: _Values, means: _Values, maxima: _Values) -> StepSums:
        """
        Args:
            counted: [N] bool, the tokens that ``means`` and ``maxima`` cover.
            totals: tensors of any shape, summed whole.
            means, maxima: [N] each.
        """

        def only_counted(value: Tensor) -> Tensor:
            return torch.where(counted, value.detach(), 0)

        def largest(value: Tensor) -> Tensor:
            return torch.cat([value, value.new_zeros(1)]).max()

        return cls(
            {name: value.detach().sum().double() for name, value in totals.items()},
            {name: only_counted(value).sum().double() for name, value in means.items()},
            {name: largest(only_counted(value)).double() for name, value in maxima.items()},
        )

    def merge(self, other: StepSums) -> StepSums:
        """The sums of both parts together. A name that one part lacks is taken from the other."""
        return StepSums(
            _merged(self.totals, other.totals, torch.add),
            _merged(self.means, other.means, torch.add),
            _merged(self.maxima, other.maxima, torch.maximum),
        )

    def zeros(self) -> StepSums:
        """The same names, each with 0."""
        return StepSums(*({name: torch.zeros_like(value) for name, value in part.items()} for part in self._parts()))

    def all_reduce(self) -> StepSums:
        """The merge over all ranks, on CPU: one collective for everything. Every rank holds the same names."""
        row = torch.stack([value for part in self._parts() for value in part.values()])
        rows = row[None]
        if dist.is_initialized() and dist.get_world_size() > 1:
            rows = row.new_empty(dist.get_world_size(), len(row))
            dist.all_gather_into_tensor(rows.flatten(), row)
        total = StepSums()
        for values in rows.cpu():
            left = iter(values.unbind())
            total = total.merge(StepSums(*({name: next(left) for name in part} for part in self._parts())))
        return total

    def _parts(self) -> tuple[_Values, _Values, _Values]:
        return self.totals, self.means, self.maxima


def _merged(one: _Values, other: _Values, merge: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    return {**one, **{name: merge(one[name], value) if name in one else value for name, value in other.items()}}
