"""Step metrics from sums: denominators and the alarm of promise 4."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlcore.algorithms.flops import Work
from rlcore.config import build_experiment
from rlcore.segment.adjustments import Adjustments
from rlcore.segment.checkpointing import CheckpointSeconds
from rlcore.segment.health import HealthWatch
from rlcore.segment.journal import MetricJournal, read_journal
from rlcore.segment.run import TrainerSink
from rlcore.training.metrics import mismatch_alarm, performance_metrics, update_metrics
from tests.unit.toy_run import result


def test_token_means_divide_by_the_steps_tokens() -> None:
    metrics = update_metrics(result(0.05), 0.1, alarm_above=0.01)
    assert metrics["loss/total"] == pytest.approx(0.5 + 0.1 * 2.0)
    assert metrics["loss/kl_coefficient"] == 0.1
    assert metrics["loss/entropy"] == pytest.approx(3.0)
    assert metrics["loss/clip_fraction"] == pytest.approx(0.3)
    assert metrics["rollout/abs_delta_logprob_mean"] == pytest.approx(0.005)


def test_performance_counts_computed_tokens_and_knows_only_chips_of_the_table() -> None:
    work = Work(forward_flops=1e15, backward_flops=2e15, tokens=600, prompt_tokens=100, shared_tokens=700)
    metrics = performance_metrics(work, 2.0, 4, "NVIDIA H200")
    assert metrics["perf/update_tokens_per_second"] == 300
    assert metrics["perf/update_prompt_tokens_shared"] == 700
    assert metrics["perf/update_mfu"] == pytest.approx(3e15 / (2.0 * 4 * 989e12))
    assert "perf/update_mfu" not in performance_metrics(work, 2.0, 4, "cpu")


@pytest.mark.parametrize(
    ("device", "overrides", "limit"),
    [
        ("cpu", [], 0.001),
        ("cuda", [], 0.05),
        ("cpu", ["model.compute_dtype=bfloat16"], 0.05),
        ("cuda", ["model.compute_dtype=float32"], 0.05),  # the sampler still computes in bfloat16
        ("cuda", ["model.compute_dtype=float32", "rollout.dtype=float16"], 0.01),
        ("cuda", ["model.compute_dtype=float32", "rollout.dtype=float32"], 0.01),
        ("cuda", ["rollout.mismatch_alarm=0.02"], 0.02),
    ],
)
def test_the_alarm_knows_device_and_dtype(device: str, overrides: list[str], limit: float) -> None:
    assert mismatch_alarm(build_experiment({"name": "x"}, overrides), device) == limit


@pytest.mark.parametrize("normal", [0.0124, 0.0251])
def test_what_bfloat16_gives_on_a_gpu_raises_no_alarm_and_a_fault_does(normal: float) -> None:
    on_gpu, on_cpu = (mismatch_alarm(build_experiment({"name": "x"}), device) for device in ("cuda", "cpu"))
    alarms = [
        update_metrics(result(10 * delta), 0.0, alarm_above=limit)["rollout/mismatch_alarm"]
        for delta, limit in ((normal, on_gpu), (0.1, on_gpu), (1e-5, on_cpu), (normal, on_cpu))
    ]
    assert alarms == [0, 1, 0, 1]


def test_the_limit_is_no_science() -> None:
    plain, own = (build_experiment({"name": "x"}, words) for words in ([], ["rollout.mismatch_alarm=0.1"]))
    assert plain.science_digest() == own.science_digest()


def test_a_mismatch_raises_the_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seconds = CheckpointSeconds(blocked=0.25, written=4.0)
    sink = TrainerSink(MetricJournal(tmp_path / "journal.jsonl"), seconds, HealthWatch((), (), Adjustments()))
    with caplog.at_level(logging.WARNING):
        sink.step(1, update_metrics(result(0.05), 0.0, alarm_above=0.01))
        assert not caplog.records
        sink.step(2, update_metrics(result(0.2), 0.0, alarm_above=0.01))
    assert "step 2: sampler and trainer differ by 0.0200 nats" in caplog.text
    first, second = read_journal(tmp_path / "journal.jsonl")
    assert (first.metrics["rollout/mismatch_alarm"], second.metrics["rollout/mismatch_alarm"]) == (0.0, 1.0)
    names = ("time/checkpoint_blocked", "time/checkpoint_written")
    assert [[record.metrics[name] for name in names] for record in (first, second)] == [[0.25, 4.0], [0.0, 0.0]]
