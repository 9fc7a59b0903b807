"""A run that is cut and continued, on a GPU in bf16: how far it is from the whole one; exact when deterministic."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.integration.tiny_run import ON_A_GPU, experiment, journal, run

pytestmark = pytest.mark.gpu
COMPARED = ("reward/mean", "loss/policy", "loss/kl_ref", "optim/grad_norm", "rollout/abs_delta_logprob_mean")


@pytest.mark.timeout(500)
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_cut_run_on_a_gpu(deterministic: bool, tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    config = experiment(**ON_A_GPU, **{"resources.deterministic": deterministic})
    whole = run(tmp_path / "whole", tiny_model, dataset, config, until=4)
    first = run(tmp_path / "first", tiny_model, dataset, config, until=2)
    second = run(tmp_path / "second", tiny_model, dataset, config, until=4, resume=tmp_path / "first" / "checkpoint")
    cut = [*journal(tmp_path / "first"), *journal(tmp_path / "second")]
    pairs = [(a.metrics, b.metrics) for a, b in zip(journal(tmp_path / "whole"), cut, strict=True)]
    apart = {name: [abs(a[name] - b[name]) for a, b in pairs] for name in COMPARED}
    tokens = list(zip(whole["tokens"], first["tokens"] + second["tokens"], strict=True))
    same_weights = second["weights"] == whole["weights"]
    found = {"deterministic": deterministic, "same_weights": same_weights, "apart": apart}
    found |= {"same_groups": [a == b for a, b in tokens], "last_step": pairs[-1][0]}
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    assert [a.split()[:2] for a, _ in tokens] == [b.split()[:2] for _, b in tokens]  # step and problem
    for metrics, _ in pairs:
        assert metrics["loss/ratio_max"] == pytest.approx(1.0, abs=0.02)
        assert metrics["rollout/abs_delta_logprob_mean"] < 0.02  # bf16, random weights, temperature 0.8
    if deterministic:
        assert all(a == b for a, b in tokens)
        assert same_weights
    assert max(apart["reward/mean"]) < 0.1
