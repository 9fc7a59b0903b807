"""The table of an ablation, from the accuracy of every seed on every problem. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore.ablation.plan import BASE
from rlcore.ablation.results import Row, Status
from rlcore.evaluation.intervals import BySeed, adjusted, compare_seeds, estimate, mean_difference


@dataclass(frozen=True, slots=True)
class PointNumbers:
    """The data of one point. ``accuracy`` has its evaluations by step; the table shows the last one."""

    name: str
    label: str
    status: Status
    accuracy: Mapping[int, BySeed]
    gpu_hours: float


def make_rows(points: Sequence[PointNumbers]) -> list[Row]:
    """Rows in the order of ``points``. p is adjusted over all compared points.

    Raises:
        ValueError: evaluations of one point have no problem in common.
    """
    base = next(item for item in points if item.name == BASE)
    rows = [_row(item, base) for item in points]
    compared = [row.p for row in rows if row.p is not None]
    ps = iter(adjusted(compared))
    return [row if row.p is None else row.model_copy(update={"p_adjusted": next(ps)}) for row in rows]


def _row(item: PointNumbers, base: PointNumbers) -> Row:
    steps = max(item.accuracy, default=None)
    found = estimate(item.accuracy[steps]) if steps is not None else None
    against = base.accuracy.get(steps) if steps is not None and item is not base else None
    common = against is not None and steps is not None and against.keys() & item.accuracy[steps].keys()
    compared = compare_seeds(against, item.accuracy[steps]) if against is not None and steps and common else None
    return Row(
        point=item.name,
        label=item.label,
        status=item.status,
        steps=steps,
        seeds=found.num_seeds if found else 0,
        problems=found.num_problems if found else 0,
        accuracy=found.mean if found else None,
        accuracy_low=found.low if found else None,
        accuracy_high=found.high if found else None,
        difference=compared.paired.difference if compared else None,
        difference_low=compared.paired.low if compared else None,
        difference_high=compared.paired.high if compared else None,
        p=compared.p if compared else None,
        p_adjusted=None,
        gpu_hours=item.gpu_hours,
    )


def differences_at(points: Mapping[str, BySeed]) -> dict[str, float]:
    """Mean difference to the base over common seeds, which decides at the end of a rung. Points without a common seed
    are left out."""
    base = points[BASE]
    found = {}
    for name, accuracy in points.items():
        if accuracy.keys() & base.keys():
            found[name] = mean_difference(base, accuracy)
    return found
