"""A command whose parent was killed, and with it the server that its flow reports to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from infra.servers import free_port
from tasks.foreground import EXIT_INTERRUPTED

ORPHAN = """
import subprocess, sys
from tasks import foreground

foreground._PATIENCE_SECONDS = 0.5
ended = subprocess.Popen(["true"])  # nobody waits for it, so that it stays in the list of children
at_work = subprocess.Popen(["sh", "-c", f"sleep 2; touch {sys.argv[1]}"])
foreground._end_without_server(sys.argv[2], parent=0)
"""


def test_it_ends_once_what_it_has_started_has_ended(tmp_path: Path) -> None:
    committed = tmp_path / "committed"
    command = [sys.executable, "-c", ORPHAN, str(committed), f"http://127.0.0.1:{free_port()}/api"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == EXIT_INTERRUPTED, answer.stderr
    assert "no Prefect server is left at" in answer.stderr
    assert committed.exists()
