"""Health rules: a pure function over the journal, what the trainer does by it, and what people are told."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlcore.adjustments import Adjustments
from rlcore.config import ExperimentConfig, HealthRule
from rlcore.errors import ConfigError, RollbackError
from rlcore.segment.health import Breach, HealthWatch, breaches, require_known_metrics
from rlcore.segment.journal import StepRecord
from tasks.driver.health import HealthWarnings, page
from tasks.run import Run


def records(*values: float | None, metric: str = "m") -> list[StepRecord]:
    """Steps from 1 on; None: a step without the metric."""
    return [
        StepRecord(step, 0, {"other": 0.0} if value is None else {metric: value, "other": 0.0})
        for step, value in enumerate(values, start=1)
    ]


def steps(rule: HealthRule, found: list[StepRecord], after_step: int = 0) -> list[int]:
    return [breach.step for breach in breaches([rule], found, after_step=after_step)]


def test_a_bound_must_be_passed_for_as_many_steps_in_a_row() -> None:
    rule = HealthRule(metric="m", above=1.0, for_steps=3)
    assert steps(rule, records(2, 2, 1, 2, 2, 2, 2, 2)) == [6]  # once, where it begins
    assert steps(rule, records(2, 2, 2, 0, 2, 2, 2)) == [3, 7]
    assert steps(rule, records(2, 2, 1, 2, 2)) == []
    below = HealthRule(metric="m", below=0.5)
    assert steps(below, records(0.5, 0.4, 0.6)) == [2]


def test_no_number_is_beyond_every_bound_and_a_missing_one_is_left_out() -> None:
    assert steps(HealthRule(metric="m", above=1.0), records(0.0, math.nan)) == [2]
    assert steps(HealthRule(metric="m", below=-1.0), records(0.0, math.nan)) == [2]
    assert steps(HealthRule(metric="m", above=1.0, for_steps=2), records(2, None, 2)) == [3]


def test_a_collapse_is_against_the_best_mean_so_far() -> None:
    rule = HealthRule(metric="m", below_best_by=0.3, for_steps=2)
    found = records(0.1, 0.3, 0.8, 0.6, 0.7, 0.3, 0.3)  # means: 0.2, 0.55, 0.7, 0.65, 0.5, 0.3
    (breach,) = breaches([rule], found, after_step=0)
    assert (breach.step, breach.best) == (7, pytest.approx(0.7))
    assert str(breach).startswith("step 7: m, mean of 2 steps, more than 0.3 below its best (best: 0.7); its last")
    assert steps(rule, records(-0.9, -0.8, -0.2, -0.2, -0.9, -0.9)) == [5]  # rewards may be below 0


def test_steps_up_to_a_resume_do_not_count() -> None:
    rule = HealthRule(metric="m", above=1.0, for_steps=3)
    assert steps(rule, records(2, 2, 2, 2, 2, 2), after_step=4) == []
    assert steps(rule, records(2, 2, 2, 2, 2, 2), after_step=3) == [6]


def watch(action: str, adjustments: Adjustments = Adjustments(), before: int = 0) -> HealthWatch:  # noqa: B008
    rule = HealthRule(metric="m", above=1.0, for_steps=2, action=action, max_rollbacks=1)
    return HealthWatch([rule], records(*[2.0] * before), adjustments)


def test_the_trainer_stops_for_a_pause_and_not_for_a_warning() -> None:
    pausing = watch("pause")
    assert not pausing.broken()
    pausing.step(1, {"m": 2.0})
    assert not pausing.broken()
    pausing.step(2, {"m": 2.0})
    assert pausing.broken()
    assert "step 2: m above 1 for 2 steps" in (pausing.pause_or_raise() or "")
    warning = watch("warn", before=3)
    assert not warning.broken()
    assert warning.pause_or_raise() is None


def test_a_trainer_that_was_killed_over_a_breach_stops_for_it_again_until_it_is_dealt_with() -> None:
    assert watch("pause", before=2).broken()
    assert not watch("pause", Adjustments(healthy_from=2), before=2).broken()


def test_a_rollback_too_many_is_a_pause() -> None:
    with pytest.raises(RollbackError, match="step 2"):
        watch("rollback", before=2).pause_or_raise()
    assert "gone back 1 times already" in (watch("rollback", Adjustments(rollbacks=1), before=2).pause_or_raise() or "")


def test_a_rule_on_a_metric_that_does_not_exist_is_refused_after_the_first_batch() -> None:
    typo = HealthWatch([HealthRule(metric="loss/kl", above=1)], [], Adjustments())
    assert not typo.broken()
    typo.step(1, {"loss/kl_ref": 0.0})
    with pytest.raises(ConfigError, match=r"'loss/kl', which no step has logged. Take one of: loss/kl_ref"):
        typo.broken()


class Announced:
    def __init__(self) -> None:
        self.breaches: list[Breach] = []

    def __call__(self, run: Run, breach: Breach, consequence: str) -> None:
        self.breaches.append(breach)


def test_a_warning_is_logged_once_even_by_the_next_driver(tmp_path: Path) -> None:
    experiment = ExperimentConfig(name="toy", health=(HealthRule(metric="m", above=1.0),))
    run, announced = Run(run_id="r", run_dir=tmp_path, experiment=experiment), Announced()
    warnings = HealthWarnings(run, Adjustments(), announced)
    warnings.tell(records(0, 2))
    warnings.tell(records(0, 2, 2))
    warnings.tell(records(0, 2, 2, 0, 2))
    HealthWarnings(run, Adjustments(), announced).tell(records(0, 2, 2, 0, 2))
    assert [breach.step for breach in announced.breaches] == [2, 5]
    HealthWarnings(run, Adjustments(rollbacks=1), announced).tell(records(0, 2))
    assert [breach.step for breach in announced.breaches] == [2, 5, 2]


def test_the_page_says_why(tmp_path: Path) -> None:
    (breach,) = breaches([HealthRule(metric="m", above=1.0)], records(0.25, 2), after_step=0)
    run = Run(run_id="r", run_dir=tmp_path, experiment=ExperimentConfig(name="toy"))
    text = page(run, breach, "Training goes on.")
    assert "**m above 1 for 1 step**" in text
    assert "| 1 | 0.25 |\n| 2 | 2 |" in text


def test_only_means_over_nothing_may_be_missing() -> None:
    def refused(metric: str, *logged: str) -> bool:
        rule = HealthRule.model_validate({"metric": metric, "above": 1.0})
        try:
            require_known_metrics([rule], [StepRecord(1, 0, dict.fromkeys(logged, 0.0))])
        except ConfigError:
            return True
        return False

    whole = ("reward/ungraded", "reward/mean", "loss/total", "loss/entropy")
    assert not refused("reward/mean", *whole)
    names = ("reward/x", "loss/x", "rollout/x", "optim/x")
    assert [refused(name, *whole) for name in names] == [True, True, True, True]
    ungraded = tuple(name for name in whole if name != "reward/mean")
    assert [refused(name, *ungraded) for name in names] == [False, True, True, True]
    without_advantage = tuple(name for name in whole if name != "loss/entropy")
    assert [refused(name, *without_advantage) for name in names] == [True, False, False, True]
