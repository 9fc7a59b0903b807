"""Health rules over the journal. The trainer acts on them; the segment task reports them. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore.adjustments import Adjustments
from rlcore.config import HealthRule
from rlcore.errors import ConfigError, RollbackError
from rlcore.segment.journal import StepRecord, wall_clock_ms

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Breach:
    """A rule that this step broke and the previous step did not."""

    rule: HealthRule
    step: int
    values: tuple[tuple[int, float], ...]  # the metric's last (step, value), this step's included
    best: float | None  # the best mean before, for below_best_by

    def __str__(self) -> str:
        last = ", ".join(f"{value:.4g}" for _, value in self.values)
        best = "" if self.best is None else f" (best: {self.best:.4g})"
        return f"step {self.step}: {self.rule}{best}; its last values are {last}"


def breaches(rules: Sequence[HealthRule], records: Sequence[StepRecord], *, after_step: int) -> list[Breach]:
    """The steps at which rules began to be broken, in order.

    Args:
        after_step: ignore steps up to this one.
    """
    seen = [record for record in records if record.step > after_step]
    found = [breach for rule in rules for breach in _breaches_of(rule, seen)]
    return sorted(found, key=lambda breach: breach.step)


def _breaches_of(rule: HealthRule, records: Sequence[StepRecord]) -> list[Breach]:
    points = [(record.step, record.metrics[rule.metric]) for record in records if rule.metric in record.metrics]
    found: list[Breach] = []
    broken_before = False
    best: float | None = None
    for end in range(rule.for_steps, len(points) + 1):
        window = [value for _, value in points[end - rule.for_steps : end]]
        mean = sum(window) / len(window)
        broken = _broken(rule, window, mean, best)
        if broken and not broken_before:
            shown = points[max(0, end - max(rule.for_steps, _SHOWN)) : end]
            known_best = best if rule.below_best_by is not None else None
            found.append(Breach(rule, points[end - 1][0], tuple(shown), known_best))
        broken_before = broken
        if math.isfinite(mean):
            best = mean if best is None else max(best, mean)
    return found


def _broken(rule: HealthRule, window: Sequence[float], mean: float, best: float | None) -> bool:
    if rule.above is not None:
        return all(not value <= rule.above for value in window)  # "not <=": nan counts
    if rule.below is not None:
        return all(not value >= rule.below for value in window)
    assert rule.below_best_by is not None  # HealthRule has exactly one of the three
    return not math.isfinite(mean) or (best is not None and mean < best - rule.below_best_by)


def require_known_metrics(rules: Sequence[HealthRule], records: Sequence[StepRecord]) -> None:
    """
    Raises:
        ConfigError: a rule's metric is in none of ``records`` (at least one rollout batch), although the batch had
            graded completions or tokens to measure it on.
    """
    known = {name for record in records for name in record.metrics}
    # a step has no means over graded completions, or over tokens with an advantage, if there are none
    not_yet: tuple[str, ...] = ()
    if "reward/ungraded" in known and "reward/mean" not in known:
        not_yet += ("reward/",)
    if "loss/total" in known and "loss/entropy" not in known:
        not_yet += ("loss/", "rollout/")
    for rule in rules:
        if rule.metric not in known and not rule.metric.startswith(not_yet):
            raise ConfigError(
                f"a health rule looks at {rule.metric!r}, which no step has logged. Take one of: "
                f"{', '.join(sorted(known))}."
            )


class HealthWatch:
    """Checks the rules of one trainer and keeps the first breach that asks for more than a warning. ``records``: the
    journal so far."""

    def __init__(self, rules: Sequence[HealthRule], records: Sequence[StepRecord], adjustments: Adjustments) -> None:
        self._rules = rules
        self._adjustments = adjustments
        self._records = list(records)
        self._breach: Breach | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._records.append(StepRecord(step, wall_clock_ms(), metrics))

    def broken(self) -> bool:
        """Whether training has to stop. Call it between rollout batches.

        Raises:
            ConfigError: a rule's metric does not exist.
        """
        if self._rules and self._records:
            require_known_metrics(self._rules, self._records)
            acting = [rule for rule in self._rules if rule.action != "warn"]
            # includes breaches before this start: acting on a breach moves healthy_from past it
            self._breach = next(iter(breaches(acting, self._records, after_step=self._adjustments.healthy_from)), None)
        return self._breach is not None

    def pause_or_raise(self) -> str | None:
        """The reason to commit and stop, or None to go on.

        Raises:
            RollbackError: stop without committing.
        """
        if not self.broken() or self._breach is None:
            return None
        rule, rollbacks = self._breach.rule, self._adjustments.rollbacks
        if rule.action == "rollback" and rollbacks < rule.max_rollbacks:
            raise RollbackError(str(self._breach))
        after = f". The run has gone back {rollbacks} times already" if rule.action == "rollback" else ""
        return f"{self._breach}{after}"
