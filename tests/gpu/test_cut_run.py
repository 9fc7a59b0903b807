"""A run that is cut and continued in bf16, on one GPU, on four, and from four to two.

How far the continued run is from the whole one; exact where it is deterministic and has as many GPUs as before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.integration.tiny_run import ON_A_GPU, experiment, journal, run, tokens_after

pytestmark = pytest.mark.gpu
_EXACT = {"resources.deterministic": True}
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
    found |= {"same_groups": [a == b for a, b in tokens], "groups": [[a.split()[:2], b.split()[:2]] for a, b in tokens]}
    found |= {name: [a[name] for a, _ in pairs] for name in ("loss/ratio_max", COMPARED[-1])}
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    assert [a.split()[:2] for a, _ in tokens] == [b.split()[:2] for _, b in tokens]  # step and problem
    for metrics, _ in pairs:
        assert metrics["loss/ratio_max"] == pytest.approx(1.0, abs=0.02)
        assert metrics["rollout/abs_delta_logprob_mean"] < 0.02  # bf16, random weights, temperature 0.8
    if deterministic:
        assert all(a == b for a, b in tokens)
        assert same_weights
    assert max(apart["reward/mean"]) < 0.1


@pytest.mark.timeout(900)
def test_a_deterministic_run_cut_on_four_gpus(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    """On four GPUs it goes on bit for bit; on two it meets the same problems and stays near."""
    four, two = (experiment(**ON_A_GPU | _EXACT | {"resources.workers": gpus}) for gpus in (4, 2))
    whole = run(tmp_path / "whole", tiny_model, dataset, four, until=4, cut=2)
    cut = tmp_path / "whole" / "cut"
    same = run(tmp_path / "same", tiny_model, dataset, four, until=4, resume=cut)
    fewer = run(tmp_path / "fewer", tiny_model, dataset, two, until=4, resume=cut)
    rest = journal(tmp_path / "whole")[2:]
    pairs = [(a.metrics, b.metrics) for a, b in zip(rest, journal(tmp_path / "fewer"), strict=True)]
    apart = {name: [abs(a[name] - b[name]) for a, b in pairs] for name in COMPARED}
    sys.stdout.write(f"\n{json.dumps({'four to two, apart': apart})}\n")
    assert same["tokens"] == tokens_after(2, whole)
    assert same["weights"] == whole["weights"]
    assert [line.split()[:2] for line in fewer["tokens"]] == [line.split()[:2] for line in tokens_after(2, whole)]
    assert max(apart["reward/mean"]) < 0.1
    assert all(metrics["loss/ratio_max"] == pytest.approx(1.0, abs=0.02) for _, metrics in pairs)
