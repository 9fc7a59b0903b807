"""Prefect tasks: one side effect each, wiring and retries, no arithmetic. No torch, vLLM or Ray here."""

from infra import environment
from infra.settings import Settings
from infra.stack import connect

# before anything below imports Prefect or MLflow
environment.apply(Settings())
connect.log_in(Settings())
