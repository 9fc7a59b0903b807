"""The real loop on the tiny policy: promises 2, 3 and 4 step by step, and workers that compute each row together."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.segment.journal import StepRecord
from tests.integration.tiny_run import experiment, journal, run


def test_steps_are_on_policy_and_change_it(plain: list[StepRecord]) -> None:
    """That a cut changes nothing is shown below with everything that has a memory, and by tests of what is rarer."""
    steps = plain
    assert [record.step for record in steps] == [1, 2, 3, 4]
    for record in steps:
        metrics = record.metrics
        assert metrics["loss/ratio_max"] == 1.0  # on-policy, with the old log-probs from a pass of their own
        assert metrics["loss/clip_fraction"] == 0.0
        assert metrics["rollout/abs_delta_logprob_mean"] < 1e-4  # vLLM and FSDP2 agree, weights of this very step
        assert metrics["rollout/abs_delta_logprob_max"] < 1e-3
        assert metrics["optim/grad_norm"] > 0
    assert steps[0].metrics["loss/kl_ref"] < 1e-9
    assert steps[3].metrics["loss/kl_ref"] > 1e-6
    assert steps[3].metrics["reward/mean"] != steps[0].metrics["reward/mean"]


def test_workers_that_share_rows_and_rest_train_as_workers_that_do_not(
    plain: list[StepRecord], tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    """Rows of twice the tokens; the same completions at first, and the same numbers but for float noise."""
    config = experiment(**{"training.sequence_parallel": 2, "training.offload": True})
    run(tmp_path / "shared", tiny_model, dataset, config, until=2)
    shared = journal(tmp_path / "shared")
    assert len(shared) == 2
    for name in ("loss/policy", "loss/kl_ref", "loss/entropy", "optim/grad_norm", "reward/mean"):
        assert shared[0].metrics[name] == pytest.approx(plain[0].metrics[name], rel=1e-4, abs=1e-6), name
    for record in shared:
        assert record.metrics["loss/ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert record.metrics["rollout/abs_delta_logprob_max"] < 1e-4
