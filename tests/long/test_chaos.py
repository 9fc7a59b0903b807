"""The short form of ``make chaos``: two ranks, six kills of random victims at random moments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1500)
def test_killed_runs_end_as_if_nobody_had_killed_them(tmp_path: Path) -> None:
    """Another seed each time; the output, with the seed, is shown on failure."""
    command = [sys.executable, "-m", "tests.chaos", "--short", "--out", str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    logs = "".join(f"\n{path}:\n{path.read_text()[-3000:]}" for path in tmp_path.glob("killed-short/*.log"))
    assert answer.returncode == 0, answer.stderr[-6000:] + answer.stdout + logs
    report = json.loads(answer.stdout.splitlines()[-1])
    once = {
        "flow run: start",
        "flow run: metric upload",
        "grading process: any",
        "trainer: resume",
    }
    assert {victim: times for victim, times in report["by_victim"].items() if victim in once} == dict.fromkeys(once, 1)
    assert report["kills"] == report["recovered"] == 6
    assert report["weights_equal"]
    assert report["metrics_equal"]
    assert report["retyped"] == 2
    nothing = ("missed", "dropped_faults", "missing_steps", "duplicate_steps", "orphans")
    assert not any(report[name] for name in nothing), report
