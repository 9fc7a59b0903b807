"""Step metrics from sums: denominators and the alarm of promise 4."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.adjustments import Adjustments
from rlcore.algorithms.objective import StepSums, UpdateResult
from rlcore.config import AlgorithmConfig, build_experiment
from rlcore.data.mixture import MixturePosition, SourcePosition
from rlcore.flops import Work
from rlcore.jobs.segment import TrainerSink
from rlcore.rollout.advantages import StepAdvantages
from rlcore.rollout.collect import Counts, RolloutBatch
from rlcore.rollout.groups import Group
from rlcore.rollout.state import RolloutState
from rlcore.segment.health import HealthWatch
from rlcore.segment.journal import CheckpointSeconds, MetricJournal, read_journal
from rlcore.training.metrics import (
    collection_metrics,
    mismatch_alarm,
    performance_metrics,
    rollout_metrics,
    update_metrics,
)
from rlcore.types import Completion, Problem, Score, TrainingSample
from tests.unit.toy_run import result


def test_token_means_divide_by_the_steps_tokens() -> None:
    metrics = update_metrics(result(0.05), 0.1, alarm_above=0.01)
    assert metrics["loss/total"] == pytest.approx(0.5 + 0.1 * 2.0)
    assert metrics["loss/kl_coefficient"] == 0.1
    assert metrics["loss/entropy"] == pytest.approx(3.0)
    assert metrics["loss/clip_fraction"] == pytest.approx(0.3)
    assert metrics["rollout/abs_delta_logprob_mean"] == pytest.approx(0.005)


def exact(**sums: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()}


def test_every_metric_of_an_update_by_name_and_number() -> None:
    totals = exact(
        tokens=10, computed=20, policy_loss=0.5, kl_loss=2, kl_ref=5, importance_ratio=10, importance_ratio_squared=12.5
    )  # 100 / 12.5 = 8 effective tokens
    means = {
        "loss/kl_old": 0.25, "loss/entropy": 30, "loss/clip_fraction": 3, "loss/clip_fraction_low": 1,
        "loss/clip_fraction_high": 2, "loss/ratio_mean": 11, "rollout/abs_delta_logprob_mean": 0.05,
        "rollout/kl_sampler_trainer": 0.5, "rollout/importance_weight_mean": 9, "rollout/importance_masked": 1,
    }  # fmt: skip
    maxima = {"loss/ratio_max": 1.5, "rollout/abs_delta_logprob_max": 0.02}
    sums = StepSums(totals, exact(**means), exact(**maxima))
    of_the_step = {
        "loss/total": 0.5 + 0.1 * 2, "loss/policy": 0.5, "loss/kl_coefficient": 0.1, "loss/kl_ref": 5 / 20,
        "optim/grad_norm": 1.5, "optim/skipped": 1.0,
    }  # fmt: skip
    over_tokens = {
        "loss/kl_old": 0.025, "loss/entropy": 3.0, "loss/clip_fraction": 0.3, "loss/clip_fraction_low": 0.1,
        "loss/clip_fraction_high": 0.2, "loss/ratio_mean": 1.1, "loss/ratio_max": 1.5,
        "rollout/abs_delta_logprob_mean": 0.005, "rollout/abs_delta_logprob_max": 0.02,
        "rollout/effective_sample_size": 0.8, "rollout/kl_sampler_trainer": 0.05,
        "rollout/importance_weight_mean": 0.9, "rollout/importance_masked": 0.1,
    }  # fmt: skip
    result = UpdateResult(sums, grad_norm=1.5, skipped=True)
    raised = update_metrics(result, 0.1, alarm_above=0.004)
    assert raised == pytest.approx({**of_the_step, **over_tokens, "rollout/mismatch_alarm": 1.0})
    assert update_metrics(result, 0.1, alarm_above=0.006)["rollout/mismatch_alarm"] == 0
    assert update_metrics(result, 0.1, alarm_above=0.004, stale=True)["rollout/mismatch_alarm"] == 0
    none = StepSums({**totals, **exact(tokens=0, computed=0)}, exact(**dict.fromkeys(means, 0)), sums.zeros().maxima)
    bare = update_metrics(UpdateResult(none, grad_norm=1.5, skipped=True), 0.1, alarm_above=0.004)
    assert bare == pytest.approx({**of_the_step, "loss/kl_ref": 5.0, "rollout/mismatch_alarm": 0.0})


def group(prompt: int, *rollouts: tuple[int, float, bool, str]) -> Group:
    """Tokens of the prompt; tokens, reward, whether it was graded, and why it ended, of each completion."""
    completions, scores, samples = [], [], []
    for tokens, reward, graded, ended in rollouts:
        completions.append(Completion.one_turn(np.ones(tokens, np.int32), np.zeros(tokens, np.float32), "", ended, 0))
        scores.append(Score(reward, {"accuracy": reward / 2, "format": 1.0}, graded=graded))
        mask = np.arange(prompt + tokens) >= prompt
        samples.append(TrainingSample(mask.astype(np.int32), mask, np.zeros(len(mask), np.float32), (), 0))
    problem, prompt_ids = Problem("p", "?", (), "1", "t"), np.ones(prompt, np.int32)
    return Group(0, problem, "0", 0, prompt_ids, tuple(completions), tuple(scores), samples=tuple(samples))


RIGHT = group(4, (2, 2.0, True, "stop"), (6, 2.0, True, "length"))
WRONG = group(2, (1, 0.0, True, "stop"), (1, 0.0, True, "stop"))
MIXED = group(1, (3, 2.0, True, "stop"), (5, 0.0, True, "stop"))
SILENT = group(1, (4, 9.0, False, "length"), (2, 2.0, True, "stop"))


def test_every_metric_of_a_rollout_batch_by_name_and_number() -> None:
    seconds = {"step": 4.0, "generate": 2.0, "generate_beside": 3.0}
    found = rollout_metrics([RIGHT, WRONG, MIXED, SILENT], AlgorithmConfig(), 30, seconds, 3 * 2**29)
    # rewards of the seven graded ones: 2 2 0 0 2 0 2, of mean 8 / 7 and mean square 16 / 7
    assert found == pytest.approx(
        {
            "time/step": 4.0, "time/generate": 2.0, "time/generate_beside": 3.0,
            "system/peak_memory_gib": 1.5,
            "system/tokens_per_second": (2 * (4 + 2 + 1 + 1) + 24) / 4,
            "system/generated_tokens_per_second": 30 / 5,
            "reward/ungraded": 1 / 8, "reward/mean": 8 / 7, "reward/std": (16 / 7 - (8 / 7) ** 2) ** 0.5,
            "reward/accuracy": 4 / 7, "reward/format": 1.0,
            "rollout/all_right": 1 / 4, "rollout/all_wrong": 1 / 4, "rollout/zero_signal": 3 / 4,
            "rollout/truncated": 2 / 8, "rollout/completion_tokens_mean": 24 / 8, "rollout/completion_tokens_max": 6,
            "rollout/prompt_tokens_mean": 2.0,
        }
    )  # fmt: skip
    nothing = rollout_metrics([], AlgorithmConfig(), 0, {"step": 4.0}, 2**30)
    assert nothing == {"time/step": 4.0, "system/peak_memory_gib": 1.0}
    apart = rollout_metrics([MIXED], AlgorithmConfig(), 30, {"step": 4.0, "generate_beside": 3.0}, 0)
    assert apart["system/generated_tokens_per_second"] == 10


def test_every_metric_of_what_was_kept_by_name_and_number() -> None:
    counts = Counts(rounds=2, tokens=99, continued=3, dropped_stale=4)
    surplus, sampling = dataclasses.replace(RIGHT, surplus=True), dataclasses.replace(RIGHT, samples=())
    rollouts = RolloutState(problems_seen=7, groups=(RIGHT, *[surplus] * 6, *[sampling] * 9))
    batch = RolloutBatch([RIGHT, SILENT], [RIGHT, WRONG, SILENT], counts, rollouts, age_max=5, filled=1, from_buffer=8)
    advantages = StepAdvantages([], signal=[True, False, False, False], kl_penalty=None)
    expected = {
        "reward/trained_mean": 2.0, "rollout/trained_zero_signal": 0.75, "rollout/groups_generated": 3,
        "rollout/groups_trained": 2, "rollout/groups_filled": 1, "rollout/groups_from_buffer": 8,
        "rollout/groups_buffered": 6, "rollout/groups_in_flight": 9, "rollout/groups_dropped_stale": 4,
        "rollout/rounds": 2, "rollout/completions_continued": 3, "rollout/policy_age_max": 5,
        "rollout/problems_seen": 7,
    }  # fmt: skip
    assert collection_metrics(batch, advantages) == expected
    with_kl = dataclasses.replace(advantages, kl_penalty=0.25)
    assert collection_metrics(batch, with_kl) == {**expected, "reward/kl_penalty": 0.25}


def of_source(name: str, item: Group) -> Group:
    return dataclasses.replace(item, problem=dataclasses.replace(item.problem, source_name=name))


def test_each_source_of_a_mixture_has_its_own_numbers() -> None:
    a, b = [of_source("a", item) for item in (RIGHT, MIXED, WRONG)], [of_source("b", SILENT)]
    found = rollout_metrics([a[0], b[0], *a[1:]], AlgorithmConfig(), 30, {"step": 4.0, "generate": 2.0}, 0)
    # a: rewards 2 2 2 0 0 0, accuracies half of them, and two of three groups without signal; b: one graded, 2
    assert {key: value for key, value in found.items() if key.startswith("source/")} == pytest.approx(
        {
            "source/a/reward_mean": 1.0, "source/a/accuracy": 0.5, "source/a/ungraded": 0.0,
            "source/a/zero_signal": 2 / 3,
            "source/b/reward_mean": 2.0, "source/b/accuracy": 1.0, "source/b/ungraded": 0.5,
            "source/b/zero_signal": 1.0,
        }
    )  # fmt: skip
    whole = rollout_metrics([RIGHT, SILENT, MIXED, WRONG], AlgorithmConfig(), 30, {"step": 4.0, "generate": 2.0}, 0)
    assert {key: value for key, value in found.items() if not key.startswith("source/")} == whole


def test_shares_are_of_what_was_trained_and_epochs_of_what_was_taken() -> None:
    position = MixturePosition({"a": 1, "b": 1}, {"a": SourcePosition(4, taken=6), "b": SourcePosition(10, taken=5)})
    trained = [of_source(name, MIXED) for name in "aaab"]
    batch = RolloutBatch(trained, trained, Counts(), RolloutState(problems_seen=11, mixture=position))
    found = collection_metrics(batch, StepAdvantages([], signal=[True] * 4, kl_penalty=None))
    assert {key: value for key, value in found.items() if key.startswith("source/")} == {
        "source/a/share": 0.75, "source/a/epochs": 1.5, "source/b/share": 0.25, "source/b/epochs": 0.5,
    }  # fmt: skip


def test_performance_counts_computed_tokens_and_knows_only_chips_of_the_table() -> None:
    work = Work(forward_flops=1e15, backward_flops=2e15, tokens=600, prompt_tokens=100, shared_tokens=700)
    metrics = performance_metrics(work, 2.0, 4, "NVIDIA H200")
    assert metrics["perf/update_tokens_per_second"] == 300
    assert metrics["perf/update_prompt_tokens_shared"] == 700
    assert metrics["perf/update_mfu"] == pytest.approx(3e15 / (2.0 * 4 * 989e12))
    assert metrics["perf/update_tokens"] == 600
    assert metrics["perf/update_prompt_tokens"] == 100
    assert metrics["perf/update_tflops_per_second"] == 1500
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


def test_the_limit_does_not_affect_results() -> None:
    plain, own = (build_experiment({"name": "x"}, words) for words in ([], ["rollout.mismatch_alarm=0.1"]))
    assert plain.results_digest() == own.results_digest()


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
