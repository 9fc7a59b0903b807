"""The environment of a terminal that a user has just opened, and what a command has left running."""

from __future__ import annotations

import os
from collections.abc import Mapping

import psutil

from infra import processes

_OURS = ("PREFECT_", "RLFLOW_", "MLFLOW_")


def new_shell(variables: Mapping[str, str] | None = None, /, **more: str) -> dict[str, str]:
    """Without what the tests' own process has set for itself, as soon as it imported Prefect or MLflow, or another test
    has: a command that inherited it would keep its state in somebody else's folder."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**found, **(variables or {}), **more}


def left_of(mark: str) -> list[str]:
    """Processes that carry the mark, and Ray's, which write over it but work in the marked folder."""
    folder = str(processes.temporary_folder(mark))
    commands = [" ".join(item.info["cmdline"] or []) for item in psutil.process_iter(["cmdline"])]
    return [*map(str, processes.marked(mark)), *(command for command in commands if folder in command)]
