"""Successive halving: where points are compared, and which of them go on. Jamieson and Talwalkar 2016,
arXiv:1502.07943, algorithm 1, with 1 / keep for its factor and rungs that end with a segment."""

from __future__ import annotations

import math
from collections.abc import Mapping


def rung_steps(total: int, unit: int, rungs: int, keep: float) -> tuple[int, ...]:
    """Optimizer steps at the end of each rung: ``total * keep ** (rungs - 1 - r)``, rounded up to whole segments of
    ``unit`` steps; the last is ``total``.

    Raises:
        ValueError: two rungs would end at the same step.
    """
    shares = [keep ** (rungs - 1 - rung) for rung in range(rungs - 1)]
    steps = (*(min(total, unit * _ceil(total * share / unit)) for share in shares), total)
    if any(later <= earlier for earlier, later in zip(steps, steps[1:], strict=False)):
        raise ValueError(
            f"{rungs} rungs of {total} steps, in segments of {unit}, would end at {list(steps)}: each needs a segment "
            "end of its own. Lower rungs, lower segment.steps, or raise training.steps."
        )
    return steps


def survivors(scores: Mapping[str, float], base: str, keep: float) -> list[str]:
    """Points that train on: the base, and of the others the ``keep`` best, rounded up.

    Args:
        scores: in the plan's order; the base's own is not looked at. Of equal points the earlier one is better.
    """
    others = [name for name in scores if name != base]
    best = sorted(others, key=lambda name: -scores[name])[: _ceil(keep * len(others))]  # sorted() is stable
    return [name for name in scores if name == base or name in best]


def most_steps(rungs: tuple[int, ...], points: int, seeds: int, keep: float) -> int:
    """Optimizer steps of the whole ablation where no point fails; the base is one of ``points``."""
    total, before, alive = 0, 0, points
    for steps in rungs:
        total += alive * seeds * (steps - before)
        before, alive = steps, 1 + _ceil(keep * (alive - 1))
    return total


def _ceil(value: float) -> int:
    return math.ceil(round(value, 9))  # 0.2 * 15 is 3.0000000000000004
