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
# botocore adds checksums in a form (aws-chunked) that many servers refuse over TLS: Swift 2.30, older Ceph and MinIO.
# Our own copies are checked by SHA-256 anyway.
CHECKSUMS: Mapping[str, str] = {
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}
# An MLflow that is away must not hold up the driver for longer than a trainer waits for its sign of life; MLflow's own
# seven retries of 120 s would. Who waits for it asks again.
PATIENCE: Mapping[str, str] = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}

_LOGINS = (
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_KEY",
    "PREFECT_SERVER_API_AUTH_STRING",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)


def apply(settings: Settings) -> None:
    """Prepare this process, before Prefect and MLflow are imported. What the user has set stays as it is."""
    settings.prefect_home.mkdir(parents=True, exist_ok=True)
    for name, value in {
        **QUIET,
        **CHECKSUMS,
        **PATIENCE,
        **_prefect(settings),
        "MLFLOW_LOGGING_LEVEL": "WARNING",
    }.items():
        os.environ.setdefault(name, value)


def for_children(settings: Settings) -> dict[str, str]:
    """The environment of a server, a worker, a flow: all but the databases' passwords, which servers alone need."""
    variables = {**QUIET, **CHECKSUMS, **_results(settings), **os.environ}
    for name in ("RLFLOW_PREFECT_DATABASE", "RLFLOW_MLFLOW_DATABASE", "MLFLOW_TRACKING_URI"):
        variables.pop(name, None)
    # Some environments forbid bytecode; without it a trainer imports for 15 s instead of 6.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    variables.pop("RAY_ADDRESS", None)  # of somebody else's cluster: ours is a setting
    if settings.ray_address:
        variables["RAY_ADDRESS"] = settings.ray_address
    return variables


def for_jobs(settings: Settings) -> dict[str, str]:
    """``for_children`` without the logins of Prefect and MLflow: trainers, jobs and trackers never call these."""
    return {name: value for name, value in for_children(settings).items() if name not in _LOGINS}


def of_databases(settings: Settings) -> dict[str, str]:
    """What ``for_children`` leaves out, for whoever starts servers or is without them."""
    found = {
        "RLFLOW_PREFECT_DATABASE": settings.prefect_database.get_secret_value(),
        "RLFLOW_MLFLOW_DATABASE": settings.mlflow_database.get_secret_value(),
    }
    return {name: value for name, value in found.items() if value}


def _results(settings: Settings) -> dict[str, str]:
    """Where the task results lie that caches find again: Prefect's default is in the home of the user, whatever
    PREFECT_HOME says, and not on storage that several hosts share."""
    return {"PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(settings.prefect_home / "storage")}


def _prefect(settings: Settings) -> dict[str, str]:
    if "prefect" in sys.modules:
        return {}  # a Prefect worker started this process and has settings of its own
    return {
        **_results(settings),
        "PREFECT_HOME": str(settings.prefect_home),
        "PREFECT_LOGGING_EXTRA_LOGGERS": "rlflow",
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        # The console shows rlflow's own lines; Prefect's stay readable on its page.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_CLI_COLORS": "false",
        "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    }
