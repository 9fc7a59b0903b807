"""The environment of a terminal that a user has just opened."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_OURS = ("PREFECT_", "RLFLOW_", "MLFLOW_")


def new_shell(variables: Mapping[str, str] | None = None, /, **more: str) -> dict[str, str]:
    """Without what the tests' own process has set for itself, as soon as it imported Prefect or MLflow, or another test
    has: a command that inherited it would keep its state in somebody else's folder."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**found, **(variables or {}), **more}


def installed(folder: Path) -> Path:
    """What pip writes for pyproject.toml's entry points, before anything that is installed already."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    record = folder / "site" / f"rlflow-{project['version']}.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rlflow\nVersion: {project['version']}\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (record / "entry_points.txt").write_text("\n".join(groups))
    return record.parent
