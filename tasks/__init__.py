"""Prefect tasks: one side effect each, wiring and retries, no arithmetic. No torch, vLLM or Ray here."""

from infra import environment
from infra.settings import Settings

environment.apply(Settings())  # before anything below imports Prefect or MLflow
