"""Evaluate a policy on the validation problems, cached by the policy's and the dataset's content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from prefect import task
from prefect.context import TaskRunContext

from infra.logs import get_logger
from infra.settings import Settings
from infra.tracking import Tracker
from rlcore.artifacts import CheckpointRef, DatasetRef, EvalReport, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.config.reward import UserReward
from rlcore.job import EvaluateSpec
from tasks.caching import cache_key, present
from tasks.jobs import new_result_path, run_job, worth_retrying

_CODE = ("rlcore/evaluation", "rlcore/rollout", "rlcore/rewards", "rlcore/models", "rlcore/data")
_CONFIG = {"seed", "evaluation", "rollout", "reward", "data", "resources", "model"}


def _content(
    experiment: ExperimentConfig, policy: CheckpointRef | ModelRef, base: ModelRef, dataset: DatasetRef
) -> str:
    which = policy.manifest_sha256 if isinstance(policy, CheckpointRef) else policy.digest
    config = experiment.model_dump(mode="json", include=_CONFIG)
    reward = experiment.reward
    own = hashlib.sha256(reward.file.read_bytes()).hexdigest() if isinstance(reward, UserReward) else None
    return json.dumps([which, base.digest, dataset.digest, config, own], sort_keys=True)


def _key(_: TaskRunContext, parameters: dict[str, Any]) -> str:
    names = ("experiment", "policy", "base", "dataset")
    return cache_key("evaluate", _content(*(parameters[name] for name in names)), *_CODE)


@task(
    name="evaluate-policy",
    cache_key_fn=_key,
    persist_result=True,
    result_serializer="json",
    retries=1,
    retry_delay_seconds=10,
    retry_condition_fn=worth_retrying,
    timeout_seconds=12 * 3600,
)
def evaluate(
    experiment: ExperimentConfig, policy: CheckpointRef | ModelRef, base: ModelRef, dataset: DatasetRef
) -> EvalReport:
    """pass@1 and mean reward with intervals; every completion in a table."""
    settings = Settings()
    key = cache_key("evaluation", _content(experiment, policy, base, dataset), *_CODE)
    spec = EvaluateSpec(
        result=new_result_path(settings, "evaluate"),
        experiment=experiment,
        policy=policy,
        base=base,
        dataset=dataset,
        out_dir=settings.evaluations_dir / key,
    )
    get_logger().info("eval: %s", policy.path)
    return run_job("rlcore.evaluation", spec, EvalReport, settings, quiet=True)


def evaluate_and_log(
    experiment: ExperimentConfig,
    policy: CheckpointRef | ModelRef,
    base: ModelRef,
    dataset: DatasetRef,
    tracker: Tracker,
) -> EvalReport:
    """Evaluate, and put the numbers into the run at the policy's step; a repeat adds nothing."""
    report = present(evaluate, lambda item: Path(item.table), experiment, policy, base, dataset)
    tracker.log_metrics(
        {
            "eval/accuracy": report.accuracy,
            "eval/accuracy_low": report.accuracy_low,
            "eval/accuracy_high": report.accuracy_high,
            "eval/reward": report.reward,
            "eval/reward_low": report.reward_low,
            "eval/reward_high": report.reward_high,
            "eval/truncated": report.truncated,
            "eval/ungraded": report.ungraded,
        },
        step=report.step,
        timestamp_ms=int(Path(report.table).stat().st_mtime * 1000),
    )
    tracker.log_file(Path(report.table), f"eval/step-{report.step:06d}")
    get_logger().info(
        "eval: step %d: accuracy %.3f [%.3f, %.3f], reward %.3f, %d problems x %d",
        report.step,
        report.accuracy,
        report.accuracy_low,
        report.accuracy_high,
        report.reward,
        report.num_problems,
        report.samples_per_problem,
    )
    return report
