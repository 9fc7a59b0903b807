"""A wrong value is answered with its key, the value, and all that is allowed."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module

import pytest
from pydantic import BaseModel, BeforeValidator

import rlcore.config
from rlcore.config import build_experiment
from rlcore.config.describe import describe_entry, describe_type
from rlcore.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("training.steps=abc", "training.steps: found 'abc'. Allowed: whole number, >= 1."),
        ("evaluation.problems=all", "evaluation.problems: found 'all'. Allowed: whole number or null, >= 1."),
        (
            "evaluation.every_steps=0",
            "evaluation.every_steps: found 0. Allowed: whole number >= 1 or segment or null.",
        ),
        ("rollout.dtype=fp4", "rollout.dtype: found 'fp4'. Allowed: auto / float32 / bfloat16 / float16."),
        (
            'data.chat_template_arguments={"think": [1]}',
            "data.chat_template_arguments.think: found [1]. Allowed: true / false or whole number or number or text.",
        ),
        (
            'data.mixture={"sums": {"source": "sums@train", "weight": Infinity}}',
            "data.mixture.sums.weight: found inf. Allowed: number, > 0, finite.",
        ),
        (
            'data.mixture={"reward": {"source": "sums@train", "weight": 0}}',
            "data.mixture.reward.weight: found 0. Allowed: number, > 0, finite.",
        ),
        ("data.mixture=5", "data.mixture: found 5. Allowed: mapping."),
        ("health=5", "health: found 5. Allowed: list of groups of settings."),
        (
            "algorithm.loss.name=reinforce",
            "algorithm.loss.name: found 'reinforce'. Allowed: ppo_clip, gspo, gspo_token, cispo, sapo, vespo.",
        ),
        ('reward={"processes": 2, "name": null}', "reward.name: found None. Allowed: math, "),
        (
            "model.lora=64",
            "model.lora: found 64, where a group of settings belongs. Its keys: alpha, rank, vision_tower.",
        ),
        (
            "algorithm.correction=token",
            "algorithm.correction: found 'token', where a group of settings belongs. "
            "Its keys: level, max_weight, min_weight, name.",
        ),
        ("reward.name=user", "reward.file is missing. Allowed: path."),
        ("reward.name=model", "reward.model is missing. Its keys: "),
    ],
)
def test_a_wrong_value_is_answered_with_what_is_allowed(override: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_experiment({"name": "toy"}, [override])
    assert str(caught.value).startswith(f"the experiment has 1 error(s):\n- {answer}")


def test_all_errors_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_experiment({"name": "toy"}, ["training.steps=0", "seed=x", "segment.step=3"])
    heading, *errors = str(caught.value).splitlines()
    assert heading == "the experiment has 3 error(s):"
    assert [error.split(":")[0] for error in errors] == ["- seed", "- training.steps", "- segment.step"]


def _models(model: type[BaseModel] = BaseModel) -> Iterator[type[BaseModel]]:
    for inner in model.__subclasses__():
        yield inner
        yield from _models(inner)


def test_every_setting_can_be_described() -> None:
    """An error in these words would hide the error of the experiment."""
    for module in pkgutil.iter_modules(rlcore.config.__path__, "rlcore.config."):
        import_module(module.name)
    settings = [
        (f"{model.__name__}.{name}", field)
        for model in _models()
        if model.__module__.startswith("rlcore.config.")
        for name, field in model.model_fields.items()
    ]
    assert len(settings) > 150
    for name, field in settings:
        limits = [item for item in field.metadata if not isinstance(item, BeforeValidator)]
        assert len(describe_type(field).split(", ")) == 1 + len(limits), f"{name} has a limit without words"
        assert "typing" not in describe_type(field) + describe_entry(field), name
