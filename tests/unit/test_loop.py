"""The real loop around a worker group whose updates are written down: steps that fail, and what is kept of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from rlcore.algorithms.flops import NOTHING, Work
from rlcore.config import ExperimentConfig
from rlcore.errors import DivergedError
from rlcore.segment.journal import MetricJournal, read_journal
from rlcore.training.loop import TrainingRun, train
from rlcore.training.state import TrainState
from rlcore.training.step import StepSums, UpdateResult
from rlcore.types import RolloutGroup, TrainingSample
from tests.unit import test_collection as toy

KL = {"kl": {"coefficient": 0.1, "adaptive": {"target": 0.1, "horizon": 100}}}


class Trainers(toy.Workers):
    """Each update has the next KL of ``kls`` per token; one that is not finite is skipped."""

    size = 1
    device_name = "cpu"

    def __init__(self, kls: Sequence[float]) -> None:
        super().__init__()
        self.kls = list(kls)
        self.coefficients: list[float] = []
        self.rates: list[float] = []

    def update(self, samples: Sequence[TrainingSample], learning_rate: float, kl_coefficient: float) -> UpdateResult:
        kl = self.kls.pop(0)
        self.coefficients.append(kl_coefficient)
        self.rates.append(learning_rate)
        tokens = torch.tensor(float(sum(s.num_trained for s in samples)))
        sums = dataclasses.replace(StepSums.zero(torch.device("cpu")), tokens=tokens, kl_ref=kl * tokens)
        return UpdateResult(sums, grad_norm=kl, skipped=not math.isfinite(kl))

    def work(self, samples: Sequence[TrainingSample]) -> Work:
        return NOTHING

    def sync_weights(self, version: int) -> None:
        self.version = version

    def peak_memory_bytes(self) -> int:
        return 0


def wired(config: ExperimentConfig, kls: Sequence[float], journal: Path) -> TrainingRun:
    run = toy.wired(config)
    return dataclasses.replace(run, workers=Trainers(kls), sink=MetricJournal(journal))


def never() -> bool:
    return False


def metrics_of(journal: Path) -> list[Mapping[str, float]]:
    return [record.metrics for record in read_journal(journal)]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_skipped_step_leaves_the_adaptive_kl_coefficient_where_it_was(tmp_path: Path, broken: float):
    run = wired(toy.config(algorithm=KL), [0.1, broken, 0.2, 0.1], tmp_path / "journal.jsonl")
    state = train(run, TrainState(), until_step=4, should_stop=never)
    # 8 completions per batch over a horizon of 100; a KL of twice the target counts as 20% too high
    raised = 0.1 * (1 + 0.2 * 8 / 100)
    assert run.workers.coefficients == pytest.approx([0.1, 0.1, 0.1, raised])
    assert state.kl_coefficient == pytest.approx(raised)
    assert [m["optim/skipped"] for m in metrics_of(tmp_path / "journal.jsonl")] == [0, 1, 0, 0]


def test_with_two_updates_the_last_finite_one_moves_the_coefficient(tmp_path: Path):
    settings = toy.config(algorithm=KL, training={"problems_per_step": 4, "steps": 8, "updates_per_batch": 2})
    run = wired(settings, [0.2, math.nan], tmp_path / "journal.jsonl")
    state = train(run, TrainState(), until_step=2, should_stop=never)
    assert state.kl_coefficient == pytest.approx(0.1 * (1 + 0.2 * 8 / 100))


@pytest.mark.parametrize("updates", [1, 2])
def test_a_diverged_run_ends_with_its_last_steps_in_the_journal(tmp_path: Path, updates: int):
    batches: list[tuple[int, int]] = []

    def on_batch(step: int, generated: Sequence[RolloutGroup], trained: Sequence[RolloutGroup]) -> None:
        batches.append((step, len(trained)))

    training = {"problems_per_step": 4, "steps": 8, "max_nonfinite_steps": 2, "updates_per_batch": updates}
    run = wired(toy.config(training=training), [0.1, *[math.nan] * 3], tmp_path / "journal.jsonl")
    run = dataclasses.replace(run, on_batch=on_batch)
    with pytest.raises(DivergedError, match="not finite in 3 steps in a row, the last one step 4"):
        train(run, TrainState(), until_step=8, should_stop=never)
    journaled = metrics_of(tmp_path / "journal.jsonl")
    assert [m["optim/skipped"] for m in journaled] == [0, 1, 1, 1]
    assert journaled[-1]["reward/mean"] == 0.5
    assert batches[-1] == (4, 4)
    assert run.workers.version == 4 - updates  # weights of a diverged step reach no sampler


def test_as_many_skipped_steps_as_allowed_are_survived_and_a_good_one_starts_the_count_anew(tmp_path: Path):
    settings = toy.config(training={"problems_per_step": 4, "steps": 8, "max_nonfinite_steps": 2})
    kls = [math.nan, math.nan, 0.1, math.nan, math.nan]
    run = wired(settings, kls, tmp_path / "journal.jsonl")
    state = train(run, TrainState(), until_step=5, should_stop=never)
    assert (state.step, state.nonfinite_in_a_row) == (5, 2)


def test_a_diverging_batch_that_is_cut_short_journals_the_steps_it_took(tmp_path: Path):
    training = {"problems_per_step": 4, "steps": 8, "max_nonfinite_steps": 1, "updates_per_batch": 4}
    run = wired(toy.config(training=training), [0.1, math.nan, math.nan], tmp_path / "journal.jsonl")
    with pytest.raises(DivergedError, match="the last one step 3"):
        train(run, TrainState(), until_step=8, should_stop=never)
    assert [r.step for r in read_journal(tmp_path / "journal.jsonl")] == [1, 2, 3]
