"""Prefect tasks: one side effect each, wiring and retries, no arithmetic. No torch, vLLM or Ray here."""

from infra import environment
from infra.settings import Settings
from infra.stack.services import log_in

# before anything below imports Prefect or MLflow
environment.apply(Settings())
log_in(Settings())
