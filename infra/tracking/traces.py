"""Rollouts as traces of MLflow: what the policy was asked, its completion and its reward, on the run's page.

A trace is written when it is finished, so nothing is measured here. MLflow is asked first which ones it has, so that a
repeated call, such as after a resume, writes none twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlflow
from mlflow import MlflowClient

TAG = "rlflow.rollout"
_RUN = "mlflow.sourceRun"  # the key by which MLflow finds the traces of a run
_KIND = "CHAT_MODEL"  # MLflow shows its inputs as a conversation, with images
_MOST = 500  # traces of one run that MLflow is asked for at once
_NANO = 10**6


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion."""

    key: str  # unique in its run, and the same at every call
    name: str  # for people
    question: str
    images: tuple[str, ...]  # data URLs, before the text
    completion: str
    at_ms: int
    facts: Mapping[str, str | int | float | bool]  # reward, step and others


def log_traces(client: MlflowClient, experiment_id: str, mlflow_run_id: str, rollouts: Sequence[Rollout]) -> int:
    """Write the rollouts that MLflow lacks as traces of its run. Returns their number."""
    known = _known(client, experiment_id, mlflow_run_id) if rollouts else set()
    fresh = [rollout for rollout in rollouts if rollout.key not in known]
    for rollout in fresh:
        span = mlflow.start_span_no_context(
            rollout.name,
            span_type=_KIND,
            inputs={"messages": [{"role": "user", "content": _content(rollout)}]},
            tags={TAG: rollout.key, **{name: str(value) for name, value in rollout.facts.items()}},
            metadata={_RUN: mlflow_run_id},
            experiment_id=experiment_id,
            start_time_ns=rollout.at_ms * _NANO,
        )
        span.set_attributes(dict(rollout.facts))
        span.set_outputs({"choices": [{"message": {"role": "assistant", "content": rollout.completion}}]})
        span.end(end_time_ns=rollout.at_ms * _NANO)
    return len(fresh)


def _content(rollout: Rollout) -> str | list[dict[str, object]]:
    if not rollout.images:
        return rollout.question
    images: list[dict[str, object]] = [{"type": "image_url", "image_url": {"url": url}} for url in rollout.images]
    return [*images, {"type": "text", "text": rollout.question}]


def _known(client: MlflowClient, experiment_id: str, mlflow_run_id: str) -> set[str]:
    keys: set[str] = set()
    token: str | None = None
    while True:
        page = client.search_traces(
            locations=[experiment_id], run_id=mlflow_run_id, include_spans=False, max_results=_MOST, page_token=token
        )
        keys |= {trace.info.tags.get(TAG, "") for trace in page}
        token = page.token
        if not token:
            return keys
