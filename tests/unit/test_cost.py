"""GPU-seconds, tokens and utilisation of a journal worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.config import build_experiment
from rlcore.segment.journal import StepRecord
from tasks.report.cost import run_cost

CONFIG = build_experiment(
    {"name": "toy", "rollout": {"group_size": 2}, "training": {"problems_per_batch": 6}},
    ["resources.workers=3", "resources.rollout_workers=1"],
)
BATCH = {
    "time/step": 10.0, "time/generate": 4.0, "time/update": 5.0, "time/generate_beside": 3.0,
    "time/checkpoint_blocked": 2.0, "time/checkpoint_written": 7.0, "perf/update_mfu": 0.4, "perf/update_tokens": 100.0,
    "rollout/completion_tokens_mean": 8.0, "rollout/groups_generated": 6.0,
}  # fmt: skip


def test_a_run_worked_out_by_hand(tmp_path: Path) -> None:
    records = [
        StepRecord(1, 10_000, {"loss/total": 0.0}),  # the first update of a batch has no times
        StepRecord(2, 10_000, BATCH),
        StepRecord(4, 40_000, {**BATCH, "perf/update_mfu": 0.2}),
    ]
    (tmp_path / "journal.cut-1.jsonl").write_text(StepRecord(6, 50_000, BATCH).line())
    found = run_cost(tmp_path, CONFIG, records, ())
    assert found.devices == 4
    assert found.gpu_seconds == {
        "generate": 32.0, "update": 40.0, "checkpoint_blocked": 16.0, "other": 8.0,  # seconds of two batches * 4
    }  # fmt: skip
    assert found.redone_gpu_seconds == 40.0
    assert found.gpu_hours == pytest.approx((96 + 40) / 3600)
    assert found.generated_tokens == 2 * 8 * 6 * 2
    assert found.trained_tokens == 200
    assert found.in_step_share == pytest.approx(20 / 40)  # ten seconds before the first record, thirty between
    assert found.update_utilisation == pytest.approx(0.3)
    assert found.step_utilisation == pytest.approx((0.4 * 5 + 0.2 * 5) * 3 / (20 * 4))
    assert found.metrics()["cost/gpu_seconds/update"] == 40.0


def test_a_device_of_unknown_peak_has_no_utilisation(tmp_path: Path) -> None:
    values = {name: value for name, value in BATCH.items() if name != "perf/update_mfu"}
    found = run_cost(tmp_path, CONFIG, [StepRecord(2, 10_000, values)], ())
    assert found.update_utilisation is None
    assert "cost/step_utilisation" not in found.metrics()
    assert ("model FLOPs utilisation", "peak of this device unknown") in found.rows()
