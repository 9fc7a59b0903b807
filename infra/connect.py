"""Let a notebook or script of yours talk to the local stack. Before Prefect and MLflow are imported."""

from __future__ import annotations

import os

from infra import environment
from infra.provenance import ROOT
from infra.services import read_state
from infra.settings import Settings


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
    return settings
