"""A Ray cluster of several nodes, each with a network, a file system and processes of its own, started as
docs/howto/cluster.md says; one node dies in the middle of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlcore.segment.journal import read_journal
from tests.long import hosts
from tests.long.cluster_run import DISTURBED, STEPS, UNDISTURBED


def test_nodes_that_do_not_fit_or_are_cut_off_are_named(tmp_path: Path) -> None:
    answer = hosts.inside(tmp_path, "tests.long.cluster_failures")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-6000:]
    errors = json.loads((tmp_path / "errors.json").read_text())
    assert "rlcore.errors.ConfigError: the Ray cluster at 10.77.0.1:6379 requires a token" in errors["token"]
    assert errors["folder"].startswith("ConfigError: the node 10.77.0.")
    assert "does not see the files in /mnt/local/dataset" in errors["folder"]
    assert errors["room"].startswith("WorkerLostError: Ray has had no room for 3 worker(s)")
    assert "10.77.0.2 (1 CPU)" in errors["room"]
    # which of the two ranks Ray put there is its own choice
    assert re.match(r"WorkerLostError: rank [01] \(pid \d+ on 10\.77\.0\.3\) is gone", errors["silence"])


@pytest.mark.timeout(2400)  # three trainers start, one of them on a new node
def test_a_run_over_two_nodes_outlives_one_of_them(tmp_path: Path) -> None:
    answer = hosts.inside(tmp_path, "tests.long.cluster_run")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-6000:]
    happened = json.loads((tmp_path / "happened.json").read_text())
    runs = tmp_path / "data" / "runs"

    (failure,) = [json.loads(line) for line in (runs / DISTURBED / "failures.jsonl").read_text().splitlines()]
    assert failure["failure"] == "worker or node death"
    assert f"on {happened['victim']}) is gone" in failure["error"]

    for run in (DISTURBED, UNDISTURBED):
        assert [record.step for record in read_journal(runs / run / "journal.jsonl")] == list(range(1, STEPS + 1))
    rewards = [record.metrics["reward/mean"] for record in read_journal(runs / UNDISTURBED / "journal.jsonl")]
    assert len(set(rewards)) > 1  # there was something to learn from
    assert happened["weights"][DISTURBED] == happened["weights"][UNDISTURBED]
