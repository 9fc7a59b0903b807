"""The plan of an ablation: from a grid or a list of overrides to experiments, and which of them train on after each
rung. No torch, no numpy."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from rlcore.config import ExperimentConfig, build_experiment, with_new_names
from rlcore.config.experiment import AblationConfig
from rlcore.errors import ConfigError

BASE = "base"
OWN_KEYS = ("name", "seed", "data.shuffle_seed")
"""The ablation sets these keys itself, so points may not override them."""

Build = Callable[[Sequence[str]], ExperimentConfig]


def _of_any_version(experiment: ExperimentConfig | dict[str, Any]) -> ExperimentConfig | dict[str, Any]:
    return with_new_names(experiment) if isinstance(experiment, dict) else experiment


class Point(BaseModel):
    """One experiment of the comparison, before a seed is set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # base, p01, p02, ...
    label: str  # for people: the differences from the base
    overrides: tuple[str, ...]
    experiment: Annotated[ExperimentConfig, BeforeValidator(_of_any_version)]

    def experiment_of(self, seed: int, steps: int | None = None) -> ExperimentConfig:
        """The experiment with ``seed``, which also shuffles the problems, and ``steps`` steps (None: unchanged)."""
        own = [f"seed={seed}", f"data.shuffle_seed={seed}"]
        if steps is not None:
            own.append(f"training.steps={steps}")
        return build_experiment(self.experiment.model_dump(mode="json"), own)


@dataclass(frozen=True, slots=True)
class Job:
    """One run, up to one rung."""

    point: Point
    seed: int
    steps: int


class AblationPlan(BaseModel):
    """The request for an ablation and the points made from it. Written once, and read by every retry."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ablation_id: str
    experiment: str
    overrides: tuple[str, ...]
    settings: AblationConfig
    points: tuple[Point, ...]  # the base first

    @property
    def request(self) -> tuple[str, tuple[str, ...], AblationConfig]:
        """The request of the user."""
        return self.experiment, self.overrides, self.settings

    def steps(self, point: Point, rung: int) -> int:
        """Optimizer steps that ``point`` has taken at the end of a rung."""
        before, unit = self.settings.trunk_step, point.experiment.segment.steps
        steps = point.experiment.training.steps - before
        return before + rung_steps(steps, unit, self.settings.rungs, self.settings.keep)[rung]

    def point(self, name: str) -> Point:
        """
        Raises:
            ConfigError: there is no such point.
        """
        for item in self.points:
            if item.name == name:
                return item
        names = ", ".join(item.name for item in self.points)
        raise ConfigError(f"ablation {self.ablation_id} has no point {name!r}. Found: {names}.")

    def run_id(self, point: Point, seed: int) -> str:
        return f"{self.ablation_id}-{point.name}-s{seed}"

    def jobs(self, names: Sequence[str], rung: int) -> list[Job]:
        """Jobs seed by seed, so that an ablation that stops early has compared all points on the first seeds."""
        chosen = [point for point in self.points if point.name in names]
        return [Job(point, seed, self.steps(point, rung)) for seed in self.settings.seeds for point in chosen]


def make_plan(
    ablation_id: str, experiment: str, overrides: Sequence[str], settings: AblationConfig, build: Build
) -> AblationPlan:
    """Make and check all points of an ablation before anything starts. Points that equal the base or an earlier point
    are left out.

    Args:
        build: makes an experiment from overrides of the experiment named ``experiment``.

    Raises:
        ConfigError: a point is no valid experiment or overrides a key of ``OWN_KEYS``, all points equal the base, or
            the rungs do not fit the steps and segments.
    """
    asked = [*grid_points(settings.grid), *settings.points]
    labels = labels_of(asked)
    _require_not_own([*overrides, *itertools.chain.from_iterable(asked)])
    points = [Point(name=BASE, label=BASE, overrides=(), experiment=build(overrides))]
    known = {points[0].experiment.digest()}
    for given, label in zip(asked, labels, strict=True):
        try:
            found = build([*overrides, *given])
        except ConfigError as error:
            raise ConfigError(f"the point {label}: {error}") from None
        if found.digest() not in known:
            known.add(found.digest())
            points.append(Point(name=f"p{len(points):02d}", label=label, overrides=tuple(given), experiment=found))
    if len(points) == 1:
        raise ConfigError(
            f"every point of the ablation equals the base, {experiment}: {', '.join(labels)}. Give other values."
        )
    plan = AblationPlan(
        ablation_id=ablation_id,
        experiment=experiment,
        overrides=tuple(overrides),
        settings=settings,
        points=tuple(points),
    )
    _require_steps_after_the_trunk(plan)
    _require_rungs_that_fit(plan)
    return plan


def grid_points(grid: Sequence[str]) -> list[tuple[str, ...]]:
    """All combinations of ``key=[value, ...]`` axes as overrides; the last axis varies fastest. No axis: no point.

    Raises:
        ConfigError: an axis is not a key with a non-empty JSON list, or comes twice.
    """
    axes: dict[str, list[str]] = {}
    for axis in grid:
        key, equals, text = axis.partition("=")
        values = _json_list(text) if equals and key.strip() else None
        if not values:
            raise ConfigError(
                f"the grid's {axis!r} is not key=[value, ...] with values in JSON. Write for example "
                'training.learning_rate=[1e-4, 3e-4] or algorithm.loss.name=["ppo_clip", "gspo"].'
            )
        if key.strip() in axes:
            raise ConfigError(f"the grid has {key.strip()} twice. Put all its values into one list.")
        axes[key.strip()] = [f"{key.strip()}={json.dumps(value)}" for value in values]
    return list(itertools.product(*axes.values())) if axes else []


def _json_list(text: str) -> list[object] | None:
    try:
        values = json.loads(text)
    except json.JSONDecodeError:
        return None
    return values if isinstance(values, list) else None


def labels_of(points: Sequence[Sequence[str]]) -> list[str]:
    """Labels for people: the last part of each key (before a final ``name``), or the whole key if two look alike."""
    keys = {override.partition("=")[0].strip() for point in points for override in point}
    short = {key: _short(key) for key in keys}
    taken = list(short.values())
    shown = {key: name if taken.count(name) == 1 else key for key, name in short.items()}
    return [", ".join(_label(override, shown) for override in point) for point in points]


def _short(key: str) -> str:
    parts = key.split(".")
    return parts[-2] if parts[-1] == "name" and len(parts) > 1 else parts[-1]


def _label(override: str, shown: dict[str, str]) -> str:
    key, _, value = override.partition("=")
    return f"{shown[key.strip()]}={value.strip().strip(chr(34))}"


def _require_not_own(overrides: Sequence[str]) -> None:
    keys = {override.partition("=")[0].strip() for override in overrides}
    if found := sorted(keys & set(OWN_KEYS)):
        raise ConfigError(
            f"an ablation sets {', '.join(OWN_KEYS)} itself, found an override of {', '.join(found)}. Name the seeds "
            "of the ablation instead."
        )


def _require_steps_after_the_trunk(plan: AblationPlan) -> None:
    for point in plan.points:
        steps = point.experiment.training.steps
        if steps <= plan.settings.trunk_step:
            raise ConfigError(
                f"the point {point.label} has training.steps={steps}, and the points start from {plan.settings.trunk}. "
                "Raise training.steps, or fork from an earlier step."
            )


def _require_rungs_that_fit(plan: AblationPlan) -> None:
    if plan.settings.rungs == 1:
        return
    try:
        found = {tuple(plan.steps(point, rung) for rung in range(plan.settings.rungs)) for point in plan.points}
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if len(found) > 1:
        raise ConfigError(
            f"the points are to be compared {plan.settings.rungs} times, and they differ in training.steps or "
            f"segment.steps, so in where that would be: {sorted(found)}. Set rungs to 1, or leave these two keys alone."
        )


def rung_steps(total: int, unit: int, rungs: int, keep: float) -> tuple[int, ...]:
    """Optimizer steps at the end of each rung of successive halving: ``total * keep ** (rungs - 1 - r)``, rounded up to
    whole segments of ``unit`` steps; the last is ``total``. Jamieson and Talwalkar 2016, arXiv:1502.07943, algorithm 1,
    with ``1 / keep`` for its factor.

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
    """Points that continue to train: the base, and the best share ``keep`` of the others, rounded up.

    Args:
        scores: in the plan's order, which breaks ties. The base's score is ignored.
    """
    others = [name for name in scores if name != base]
    best = sorted(others, key=lambda name: -scores[name])[: _ceil(keep * len(others))]  # sorted() is stable
    return [name for name in scores if name == base or name in best]


def most_steps(rungs: tuple[int, ...], points: int, seeds: int, keep: float) -> int:
    """Optimizer steps of the whole ablation if no point fails. ``points`` includes the base."""
    total, before, alive = 0, 0, points
    for steps in rungs:
        total += alive * seeds * (steps - before)
        before, alive = steps, 1 + _ceil(keep * (alive - 1))
    return total


def _ceil(value: float) -> int:
    return math.ceil(round(value, 9))  # 0.2 * 15 is 3.0000000000000004
