"""Data that processes hand to each other is frozen, and refuses keys that it does not know."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

import infra
import rlcore
import tasks

# Files of other versions of the project may hold keys that these do not know.
READ_FROM_OTHER_VERSIONS = {"DatasetReport", "PromptStats", "JobError"}


def _subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for subclass in model.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


@pytest.fixture(scope="module")
def models() -> list[type[BaseModel]]:
    for package in (rlcore, tasks, infra):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    ours = ("rlcore.", "tasks.", "infra.")
    return sorted((model for model in set(_subclasses(BaseModel)) if model.__module__.startswith(ours)), key=str)


def test_every_model_is_frozen(models: list[type[BaseModel]]) -> None:
    assert len(models) > 50
    assert [model.__name__ for model in models if not model.model_config.get("frozen")] == []


def test_every_model_refuses_unknown_keys(models: list[type[BaseModel]]) -> None:
    lenient = {model.__name__ for model in models if model.model_config.get("extra") != "forbid"}
    assert lenient == READ_FROM_OTHER_VERSIONS
