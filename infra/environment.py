"""Environment variables of every process that rlflow starts: quiet, no telemetry, all state in one folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from infra.settings import Settings

QUIET: Mapping[str, str] = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
# An MLflow that is away must not hold up the driver for longer than a trainer waits for its sign of life; MLflow's own
# seven retries of 120 s would. Who waits for it asks again.
PATIENCE: Mapping[str, str] = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


def apply(settings: Settings) -> None:
    """Prepare this process, before Prefect and MLflow are imported. What the user has set stays as it is."""
    settings.prefect_home.mkdir(parents=True, exist_ok=True)
    for name, value in {**QUIET, **PATIENCE, **_prefect(settings), "MLFLOW_LOGGING_LEVEL": "WARNING"}.items():
        os.environ.setdefault(name, value)


def for_children(settings: Settings) -> dict[str, str]:
    """The environment of a trainer or a job."""
    variables = {**QUIET, **os.environ}
    # Some environments forbid bytecode; without it a trainer imports for 15 s instead of 6.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    if settings.ray_address:
        variables["RAY_ADDRESS"] = settings.ray_address
    return variables


def _prefect(settings: Settings) -> dict[str, str]:
    if "prefect" in sys.modules:
        return {}  # a Prefect worker started this process and has settings of its own
    return {
        "PREFECT_HOME": str(settings.prefect_home),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "rlflow",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        # The console shows rlflow's own lines; Prefect's stay readable on its page.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_CLI_COLORS": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    }
