"""A run's folder as the driver sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.settings import Settings
from rlcore.segment.spec import segment_path
from tasks.experiments import load_experiment
from tasks.runs import open_run


def test_a_damaged_segment_manifest_counts_as_none_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    run = open_run(load_experiment("grpo-geo3k-tiny"), "run", Settings())
    path = segment_path(run.run_dir, 0)
    path.parent.mkdir()
    assert run.manifest(0) is None
    path.write_text('{"run_id": ')
    assert run.manifest(0) is None
    assert f"{path} is damaged and does not count" in caplog.text
