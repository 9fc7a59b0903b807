"""``rollout.exact`` on one GPU: ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(300)
@pytest.mark.parametrize("exact", ["true", "false"])
def test_the_trainer_has_the_samplers_bits(exact: str, tmp_path: Path) -> None:
    """Over whole steps of a small model, with weights that change and are sent to the engine."""
    command = [sys.executable, "-m", "tests.bench.step", "--tiny", "--kind", "text", "--regimes", "fixed"]
    command += ["--warmup", "0", "--counted", "3", "--folder", str(tmp_path), "--out", str(tmp_path / "out.json")]
    command += ["--set", f"rollout.exact={exact}", "training.learning_rate=0.001", "training.compile_blocks=off"]
    subprocess.run(command, check=True, cwd=ROOT)
    steps = json.loads((tmp_path / "out.json").read_text())["steps"]
    assert len(steps) == 3
    assert all(step["grad_norm"] > 0 for step in steps)
    apart = [step["abs_delta_logprob_max"] for step in steps]
    assert apart == [0.0] * 3 if exact == "true" else min(apart) > 0
