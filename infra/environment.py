"""Environment variables of the processes that rlflow starts: no telemetry, all state in the data folder."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping

from infra.files import make_private
from infra.settings import Settings

QUIET: Mapping[str, str] = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
# botocore's default checksums (aws-chunked) are refused over TLS by many servers: Swift 2.30, older Ceph and MinIO.
# rlflow checks copies by SHA-256 anyway.
CHECKSUMS: Mapping[str, str] = {
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}
# An MLflow outage must not block the driver longer than a trainer waits for its heartbeat. MLflow's default, seven
# retries of 120 s, would. Callers that need MLflow retry themselves.
PATIENCE: Mapping[str, str] = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING": "false",  # rlflow's own thread writes traces; MLflow's would outlive the flow
}

_COMPILED = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
_LOGINS = (
    "PREFECT_API_AUTH_STRING",
    "PREFECT_API_KEY",
    "PREFECT_SERVER_API_AUTH_STRING",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)


def apply(settings: Settings) -> None:
    """Set this process's variables, before Prefect and MLflow are imported. Values set by the user stay."""
    make_private(settings.data_dir)
    settings.prefect_home.mkdir(parents=True, exist_ok=True)
    variables = {**QUIET, **CHECKSUMS, **PATIENCE, "MLFLOW_LOGGING_LEVEL": "WARNING"}
    if "prefect" not in sys.modules:  # otherwise a Prefect worker started this process with its own settings
        variables |= {
            "PREFECT_HOME": str(settings.prefect_home),
            "PREFECT_LOGGING_EXTRA_LOGGERS": "rlflow",
            "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
            # The console shows rlflow's log lines only; Prefect's are on its page.
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
            "PREFECT_CLI_COLORS": "false",
            "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
        }
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def for_children(settings: Settings) -> dict[str, str]:
    """The environment of a server, worker or flow, without the database passwords, which only servers need."""
    variables = {**QUIET, **CHECKSUMS, **os.environ}
    for name in ("RLFLOW_PREFECT_DATABASE", "RLFLOW_MLFLOW_DATABASE", "MLFLOW_TRACKING_URI"):
        variables.pop(name, None)
    # Without bytecode a trainer imports for 15 s instead of 6 s.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    variables.pop("RAY_ADDRESS", None)  # may name another cluster: rlflow's is a setting
    if settings.ray_address:
        variables["RAY_ADDRESS"] = settings.ray_address
    return variables


def for_jobs(settings: Settings) -> dict[str, str]:
    """``for_children`` without the logins of Prefect and MLflow, which trainers, jobs and trackers never call.

    Code that torch, Triton and vLLM compile for a GPU is kept in the data folder, so that a later start can use it. A
    local Ray gets a token of its own: its ports are open to every user of this machine, and Ray's own token is in
    ``~/.ray/auth_token``, which others can read wherever they can enter the home.
    """
    compiled = {name: str(settings.data_dir / "compiled" / folder) for name, folder in _COMPILED.items()}
    variables = {name: value for name, value in {**compiled, **for_children(settings)}.items() if name not in _LOGINS}
    variables["RLFLOW_SHARE_GPUS"] = str(int(settings.share_gpus))
    if not settings.ray_address:
        variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return variables


def of_databases(settings: Settings) -> dict[str, str]:
    """The database passwords that ``for_children`` leaves out, for processes that start servers."""
    found = {
        "RLFLOW_PREFECT_DATABASE": settings.prefect_database.get_secret_value(),
        "RLFLOW_MLFLOW_DATABASE": settings.mlflow_database.get_secret_value(),
    }
    return {name: value for name, value in found.items() if value}
