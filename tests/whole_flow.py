"""The training flow in the foreground, as a user starts it, with a reward that random weights can earn."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Random weights are never right. The share of vowels differs within a group, so every group has a gradient.
_VOWELS = """\
def reward(text, problem, num_tokens, finish_reason):
    letters = [c for c in text.lower() if c.isascii() and c.isalpha()]
    return sum(c in "aeiou" for c in letters) / max(1, len(letters))
"""


def run_flow(experiment: str, settings: Mapping[str, object], folder: Path) -> dict[str, Any]:
    """Run ``rlflow train`` to its end and return its last line. Each line is printed with the seconds so far.

    Args:
        settings: by dotted name, over the experiment's own.
        folder: gets the reward's file and the data folder.
    """
    reward = folder / "vowels.py"
    reward.write_text(_VOWELS)
    values = {"reward.name": "user", "reward.file": reward, "health": "[]", **settings}
    options = [text for name, value in values.items() for text in ("--set", f"{name}={value}")]
    began = time.monotonic()
    flow = subprocess.Popen(
        [sys.executable, "-m", "tasks.cli", "train", experiment, "--run-id", "whole", *options],
        env=os.environ | {"RLFLOW_DATA_DIR": str(folder / "data"), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert flow.stdout is not None
    lines = []
    for line in flow.stdout:
        sys.stdout.write(f"{time.monotonic() - began:7.1f} {line}")
        sys.stdout.flush()
        lines.append(line.strip())
    sys.stdout.write(_seconds_by_task(folder / "data"))
    assert flow.wait() == 0, "\n".join(lines[-40:])
    result: dict[str, Any] = json.loads([line for line in lines if line][-1])
    return result


def _seconds_by_task(data_dir: Path) -> str:
    """A line per task, from Prefect's own record of the flow."""
    query = """select name, state_name, (julianday(end_time) - julianday(start_time)) * 86400 from task_run
               where end_time is not null order by start_time"""
    rows: list[tuple[str, str, float]] = []
    for database in data_dir.rglob("prefect*.db"):
        with sqlite3.connect(database) as connection:
            rows += connection.execute(query).fetchall()
    return "".join(f"{name:40} {state:12} {seconds:7.1f} s\n" for name, state, seconds in rows)
