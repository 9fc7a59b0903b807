"""The short form of ``make chaos``: two ranks, two kills, and nothing may be lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(1500)
def test_killed_runs_end_as_if_nobody_had_killed_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.chaos", "--kills", "2", "--no-faults", "--training-only", "--workers", "2"]
    answer = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    logs = "".join(path.read_text()[-3000:] for path in tmp_path.glob("*/command.log"))
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:] + logs
    report = json.loads(answer.stdout.splitlines()[-1])
    assert {key: report[key] for key in report if key != "wall_seconds"} == {
        "kills": 2,
        "recovered": 2,
        "weights_equal": True,
        "missing_steps": 0,
        "duplicate_steps": 0,
        "orphans": 0,
    }
