"""Weeks of runs and evaluations in a minute, with fake jobs: clean between them keeps a quota, and everything that the
registry and the leaderboard name still loads. RLFLOW_TEST_WEEKS=30 is the month of daily runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from prefect.artifacts import Artifact

from flows.clean import clean
from flows.evaluate_latest import evaluate_latest
from flows.train_grpo import train_grpo
from infra.settings import Settings
from infra.store.disk import usage_of
from tasks.clean.act import ARTIFACT
from tests.clean_folder import Folder, delete_versions_without_an_alias, everything_named_loads

SMALL = ["segment.steps=2", "data.template=math"]
WEEKS = int(os.environ.get("RLFLOW_TEST_WEEKS", "4"))
FILLER = 2**20  # of each checkpoint, because those of fake jobs are small


def pad(data_dir: Path) -> None:
    """Give each checkpoint the size of a model, in a file that its manifest does not name."""
    for path in data_dir.glob("runs/*/checkpoints/step-*"):
        if not (path / "filler").exists():
            (path / "filler").write_bytes(os.urandom(FILLER))


def test_weeks_of_runs_stay_below_a_quota(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, sizes, named = Folder(Settings()), [], []
    monkeypatch.setenv("FAKE_RIGHT", json.dumps({"4": 8}))
    monkeypatch.setenv("RLFLOW_CLEAN_FREE_SHARE", "0")
    before: list[int] = []
    quota = 0.0
    for week in range(WEEKS):
        train_grpo("grpo-geo3k-tiny", steps=4, overrides=[*SMALL, f"seed={week}"], run_id=f"week-{week}")
        if week == 0:
            evaluate_latest(benchmarks=["tiny-geometry"])
        pad(data_dir)
        delete_versions_without_an_alias(folder.settings)
        folder.age(7)
        before.append(usage_of(data_dir).bytes)
        quota = quota or (before[0] + 3 * FILLER) / 2**30  # less than the checkpoints of the weeks to come
        monkeypatch.setenv("RLFLOW_MAX_GIB", str(quota))
        clean(older_than=1)
        monkeypatch.delenv("RLFLOW_MAX_GIB")  # the next run is small, but preflight counts a real tiny model
        sizes.append(usage_of(data_dir).bytes)
        named.append(everything_named_loads(folder.settings))
    assert max(before) > quota * 2**30, "the quota was never reached"
    assert max(sizes) <= quota * 2**30, (before, sizes)
    assert min(named) > 0
    table = Artifact.get(ARTIFACT)
    assert table is not None
    assert {row["what"] for row in json.loads(str(table.data))} >= {"stays"}
    # without a quota everything old that nothing names goes
    clean(older_than=1)
    assert usage_of(data_dir).bytes < sizes[-1]
    assert everything_named_loads(folder.settings) == named[-1]
    assert all((data_dir / "runs" / f"week-{week}" / "journal.jsonl").exists() for week in range(WEEKS))
