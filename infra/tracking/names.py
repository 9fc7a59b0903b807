"""Names of EasyR1 and verl for metrics, in addition to rlflow's: RLFLOW_METRIC_NAMES.

docs/from-easyr1-and-verl.md has the same table with what differs; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from infra.settings import MetricNames

_BOTH = {
    "critic/score/mean": "reward/mean",
    "critic/rewards/mean": "reward/mean",
    "actor/pg_loss": "loss/policy",
    "actor/ppo_kl": "loss/kl_old",
    "actor/kl_loss": "loss/kl_ref",
    "actor/kl_coef": "loss/kl_coefficient",
    "actor/grad_norm": "optim/grad_norm",
    "actor/lr": "optim/learning_rate",
    "response_length/mean": "rollout/completion_tokens_mean",
    "response_length/max": "rollout/completion_tokens_max",
    "response_length/clip_ratio": "rollout/truncated",
    "prompt_length/mean": "rollout/prompt_tokens_mean",
    "timing_s/step": "time/step",
    "timing_s/gen": "time/generate",
    "timing_s/reward": "time/reward",
    "timing_s/ref": "time/ref_logprobs",
    "timing_s/update_actor": "time/update",
    "timing_s/save_checkpoint": "time/checkpoint_blocked",
}
THEIRS: Mapping[MetricNames, Mapping[str, str]] = {
    "easyr1": _BOTH
    | {
        "actor/entropy_loss": "loss/entropy",
        "actor/pg_clipfrac_higher": "loss/clip_fraction",
        "timing_s/old": "time/old_logprobs",
        "val/reward_score": "eval/reward",
        "val/accuracy_reward": "eval/accuracy",
    },
    "verl": _BOTH
    | {
        "actor/entropy": "loss/entropy",
        "actor/pg_clipfrac": "loss/clip_fraction",
        "timing_s/old_log_prob": "time/old_logprobs",
    },
}
"""Their name to ours. Only quantities of the same meaning and unit; names of theirs that rlflow has itself are none."""


class _Record(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def timestamp_ms(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class RenamedStep:
    """A step with metrics under more names."""

    step: int
    timestamp_ms: int
    metrics: Mapping[str, float]


def with_names(records: Iterable[_Record], names: Iterable[MetricNames]) -> list[RenamedStep]:
    """The steps, with their metrics under these names as well."""
    theirs = [pair for name in names for pair in THEIRS[name].items()]
    return [
        RenamedStep(
            record.step,
            record.timestamp_ms,
            {**record.metrics, **{name: record.metrics[own] for name, own in theirs if own in record.metrics}},
        )
        for record in records
    ]
