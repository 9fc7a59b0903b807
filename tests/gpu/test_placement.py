"""Two GPUs: each trains and samples; or one of each, weights by NCCL, one step off policy; or one engine on both."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.config import ExperimentConfig
from tests.integration.tiny_run import experiment, journal, run

pytestmark = pytest.mark.gpu
SETTINGS = {
    "resources.device": "cuda",
    "rollout.gpu_memory_utilization": 0.2,
    "rollout.enforce_eager": True,
    "algorithm.correction.name": "truncate",
    "training.compile_blocks": "off",
    "training.learning_rate": 1e-5,
}


@pytest.mark.timeout(500)
def test_two_gpus_colocated(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    steps = metrics_of(experiment(**SETTINGS, **{"resources.workers": 2}), tiny_model, dataset, tmp_path / "run")
    assert [metrics["rollout/policy_age_max"] for metrics in steps] == [0] * 4


@pytest.mark.timeout(500)
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_two_gpus_disaggregated(max_staleness: int, tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    apart = {"resources.workers": 1, "resources.rollout_workers": 1, "training.max_staleness": max_staleness}
    steps = metrics_of(experiment(**SETTINGS, **apart), tiny_model, dataset, tmp_path / "run")
    assert [metrics["rollout/policy_age_max"] for metrics in steps] == [0, *[max_staleness] * 3]


@pytest.mark.timeout(500)
@pytest.mark.parametrize("eager", [True, False])
def test_two_gpus_hold_one_engine(eager: bool, tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    """Every sync proves what each of them took; the log-probs are those of the trainer."""
    both = {"resources.workers": 2, "rollout.tensor_parallel": 2, "rollout.enforce_eager": eager}
    metrics_of(experiment(**{**SETTINGS, **both}), tiny_model, dataset, tmp_path / "run")


def metrics_of(config: ExperimentConfig, model: Path, dataset: Path, folder: Path) -> list[dict[str, float]]:
    """Of four steps, in which the sampler agreed with the trainer and the policy moved."""
    run(folder, model, dataset, config, until=4)
    steps = [record.metrics for record in journal(folder)]
    assert all(metrics["rollout/abs_delta_logprob_mean"] < 0.02 for metrics in steps)  # bf16, random weights
    assert all(metrics["optim/grad_norm"] > 0 for metrics in steps)
    return steps
