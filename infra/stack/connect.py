"""Let a process talk to the local stack. Before Prefect and MLflow are imported."""

from __future__ import annotations

import os

from infra import environment
from infra.provenance import ROOT
from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.services import read_state


def use_stack() -> Settings:
    """Point this process at the stack over the data folder (``data`` of the repository unless RLFLOW_DATA_DIR is set);
    servers that PREFECT_API_URL and RLFLOW_MLFLOW_URI name count over it."""
    os.environ.setdefault("RLFLOW_DATA_DIR", str(ROOT / "data"))
    state = read_state(Settings())
    if state is not None:
        os.environ.setdefault("PREFECT_API_URL", f"{state.prefect}/api")
        os.environ.setdefault("RLFLOW_MLFLOW_URI", state.mlflow)
    settings = Settings()
    environment.apply(settings)
    log_in(settings)
    return settings


def log_in(settings: Settings) -> None:
    """Set the login of the stack's servers, if they are the ones that this process is to talk to. What the user has
    set stays."""
    state = read_state(settings)
    if state is None:
        return
    login = login_of(settings)
    to_prefect = os.environ.get("PREFECT_API_URL") == f"{state.prefect}/api"
    to_mlflow = settings.mlflow_uri == state.mlflow
    for name, value in {
        **(login.for_prefect() if to_prefect else {}),
        **(login.for_mlflow() if to_mlflow else {}),
    }.items():
        os.environ.setdefault(name, value)
