"""Points, rungs and who goes on: worked out by hand."""

from __future__ import annotations

from functools import partial

import pytest
from pydantic import ValidationError

from rlcore.ablation.plan import AblationPlan, grid_points, labels_of, make_plan, most_steps, rung_steps, survivors
from rlcore.ablation.results import Band, band_over
from rlcore.config import AblationConfig
from rlcore.errors import ConfigError
from tasks.experiments import load_experiment

TINY = "grpo-geo3k-tiny"


def plan_of(*overrides: str, **settings: object) -> AblationPlan:
    """Of an experiment of 200 steps in segments of 40."""
    own = ["training.steps=200", "segment.steps=40", *overrides]
    return make_plan("study", TINY, own, AblationConfig(**settings), partial(load_experiment, TINY))  # type: ignore[arg-type]


def test_a_grid_is_every_combination_the_last_axis_fastest() -> None:
    points = grid_points(["training.learning_rate=[1e-4, 3e-4]", 'algorithm.loss.name=["gspo"]', "seed=[[1], null]"])
    assert points == [
        ("training.learning_rate=0.0001", 'algorithm.loss.name="gspo"', "seed=[1]"),
        ("training.learning_rate=0.0001", 'algorithm.loss.name="gspo"', "seed=null"),
        ("training.learning_rate=0.0003", 'algorithm.loss.name="gspo"', "seed=[1]"),
        ("training.learning_rate=0.0003", 'algorithm.loss.name="gspo"', "seed=null"),
    ]
    assert grid_points([]) == []


@pytest.mark.parametrize("axis", ["training.steps", "training.steps=4", "training.steps=[]", "=[1]", "a=[x]"])
def test_an_axis_that_is_no_list_is_refused_with_an_example(axis: str) -> None:
    with pytest.raises(ConfigError, match=r"is not key=\[value, \.\.\.\].*training\.learning_rate=\[1e-4"):
        grid_points([axis])


def test_an_axis_comes_once() -> None:
    with pytest.raises(ConfigError, match=r"training\.steps twice"):
        grid_points(["training.steps=[1]", "training.steps=[2]"])


def test_labels_are_short_and_whole_where_two_would_look_alike() -> None:
    points = [['algorithm.loss.name="gspo"', "training.learning_rate=0.1"], ["model.tiny.seed=1", "evaluation.seed=2"]]
    assert labels_of(points) == ["loss=gspo, learning_rate=0.1", "model.tiny.seed=1, evaluation.seed=2"]


def test_the_base_comes_first_and_a_point_that_equals_it_or_another_is_left_out() -> None:
    plan = plan_of(
        "algorithm.kl.coefficient=0.1",
        grid=["training.learning_rate=[1e-4, 3e-4]"],  # the base has 3e-4
        points=[["training.learning_rate=0.0001"], ["algorithm.kl.coefficient=0"]],
    )
    assert [(point.name, point.label) for point in plan.points] == [
        ("base", "base"), ("p01", "learning_rate=0.0001"), ("p02", "coefficient=0"),
    ]  # fmt: skip
    assert [point.experiment.algorithm.kl.coefficient for point in plan.points] == [0.1, 0.1, 0]


def test_every_point_runs_the_same_seeds_over_the_same_order() -> None:
    plan = plan_of(grid=["training.learning_rate=[1e-4]"], seeds=[3, 5])
    jobs = plan.jobs(["base", "p01"], rung=0)
    assert [(job.point.name, job.seed, job.steps) for job in jobs] == [
        ("base", 3, 200), ("p01", 3, 200), ("base", 5, 200), ("p01", 5, 200),
    ]  # fmt: skip
    found = [job.point.experiment_of(job.seed, 40) for job in jobs]
    assert [(item.seed, item.data.shuffle_seed, item.training.steps) for item in found] == [
        (3, 3, 40), (3, 3, 40), (5, 5, 40), (5, 5, 40),
    ]  # fmt: skip
    assert plan.run_id(plan.point("p01"), 5) == "study-p01-s5"
    with pytest.raises(ConfigError, match=r"no point 'p02'. Found: base, p01"):
        plan.point("p02")


def test_a_plan_reads_back_as_it_was_written() -> None:
    plan = plan_of(points=[["reward.format_weight=0.2"]], rungs=2)
    assert AblationPlan.model_validate_json(plan.model_dump_json()) == plan


def test_what_makes_no_ablation_is_refused() -> None:
    with pytest.raises(ValidationError, match="neither a grid nor points"):
        AblationConfig()
    with pytest.raises(ValidationError, match="each of them once"):
        AblationConfig(grid=("a=[1]",), seeds=(1, 1))
    with pytest.raises(ConfigError, match="every point of the ablation equals the base"):
        plan_of(grid=["training.learning_rate=[3e-4]"])
    with pytest.raises(ConfigError, match=r"sets name, seed, data\.shuffle_seed itself, found an override of seed"):
        plan_of(points=[["seed=3"]])
    with pytest.raises(ConfigError, match=r"(?s)the point step=3: .*training\.step: unknown key"):
        plan_of(points=[["training.step=3"]])


def test_rungs_must_fit_steps_and_segments_of_all_points() -> None:
    with pytest.raises(ConfigError, match=r"would end at \[40, 40, 80, 200\]"):
        plan_of(points=[["training.learning_rate=1"]], rungs=4, keep=0.35)
    with pytest.raises(ConfigError, match=r"differ in training\.steps or segment\.steps.*\(80, 160\), \(120, 200\)"):
        plan_of(points=[["training.steps=160"]], rungs=2)
    assert plan_of(points=[["training.steps=160"]]).jobs(["p01"], 0)[0].steps == 160


def test_rungs_are_shares_of_the_whole_rounded_up_to_segments() -> None:
    assert rung_steps(200, 40, 1, 0.5) == (200,)
    assert rung_steps(200, 40, 3, 0.5) == (80, 120, 200)  # 50 -> 2 segments, 100 -> 3
    assert rung_steps(8, 2, 3, 0.5) == (2, 4, 8)
    assert rung_steps(90, 10, 3, 1 / 3) == (10, 30, 90)
    assert rung_steps(5, 2, 2, 0.5) == (4, 5)  # 2.5 -> 2 segments; the last need not be whole
    with pytest.raises(ValueError, match=r"3 rungs of 4 steps, in segments of 2, would end at \[2, 2, 4\]"):
        rung_steps(4, 2, 3, 0.5)


def test_the_base_and_the_better_half_of_the_others_go_on() -> None:
    scores = {"base": -1.0, "p01": 0.1, "p02": 0.3, "p03": 0.2}
    assert survivors(scores, "base", 0.5) == ["base", "p02", "p03"]  # 1.5 of the three others is two
    assert survivors(scores, "base", 1 / 3) == ["base", "p02"]
    assert survivors({"base": 0.0, "p01": 0.2, "p02": 0.2}, "base", 0.5) == ["base", "p01"]
    assert survivors({name: 0.0 for name in ("base", *"abcdefghijklmno")}, "base", 0.2) == ["base", "a", "b", "c"]
    assert survivors({"base": 0.0}, "base", 0.5) == ["base"]


def test_how_many_steps_an_ablation_takes() -> None:
    # 5 points x 2 seeds x 2 steps, then 3 x 2 x 2, then 2 x 2 x 4
    assert most_steps((2, 4, 8), points=5, seeds=2, keep=0.5) == 20 + 12 + 16
    assert most_steps((200,), points=3, seeds=3, keep=0.5) == 1800


def test_a_band_is_over_the_steps_of_all_seeds() -> None:
    assert band_over([{1: 0.0, 2: 1.0, 3: 5.0}, {2: 3.0, 1: 1.0}]) == Band(
        steps=(1, 2), mean=(0.5, 2.0), low=(0.0, 1.0), high=(1.0, 3.0)
    )
    assert band_over([{1: 0.0, 2: 1.0, 3: 5.0}], smooth_over=2).mean == (0.0, 0.5, 3.0)
    assert band_over([]) == Band((), (), (), ())
