"""Data that processes hand to each other is frozen, and refuses keys that it does not know."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Files of other versions of the project may hold keys that these do not know.
READ_FROM_OTHER_VERSIONS = {"rlcore.data.table.DatasetReport", "rlcore.data.table.PromptStats", "rlcore.specs.JobError"}
# In a process of its own, because importing every module changes what later tests find.
PROGRAM = """
import importlib, json, pkgutil, sys
from pydantic import BaseModel
import infra, rlcore, tasks

def subclasses(model):
    for subclass in model.__subclasses__():
        yield subclass
        yield from subclasses(subclass)

for package in (rlcore, tasks, infra):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
ours = {model for model in subclasses(BaseModel) if model.__module__.split(".")[0] in ("rlcore", "tasks", "infra")}
configs = {f"{model.__module__}.{model.__name__}": model.model_config for model in ours}
rules = {name: {"frozen": config.get("frozen"), "extra": config.get("extra")} for name, config in configs.items()}
sys.stdout.write("\\n" + json.dumps(rules))
"""


@pytest.fixture(scope="module")
def models() -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rules: dict[str, dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    assert len(rules) > 50
    return rules


def test_every_model_is_frozen(models: dict[str, dict[str, Any]]) -> None:
    assert [name for name, rule in models.items() if not rule["frozen"]] == []


def test_every_model_refuses_unknown_keys(models: dict[str, dict[str, Any]]) -> None:
    assert {name for name, rule in models.items() if rule["extra"] != "forbid"} == READ_FROM_OTHER_VERSIONS
