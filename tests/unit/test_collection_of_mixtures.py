"""Rollout batches of a mixture: sources by weight, epochs of each, dynamic sampling, and other weights after a save."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.errors import CheckpointError
from rlcore.process import Clock
from rlcore.training.run import TrainingRun, TrainState
from tests.unit.toy_run import PROBLEMS, WRONG, collect, config, ids, surplus, wired

# p0 to p3 are of "few", the other twenty of "many"
MIXED_PROBLEMS = [
    replace(problem, source_name="few" if place < 4 else "many") for place, problem in enumerate(PROBLEMS)
]


def run_of(weights: dict[str, float], rewards: dict[str, list[float]] | None = None, **parts: object) -> TrainingRun:
    mixture = {name: {"source": f"{name}@train", "weight": weight} for name, weight in weights.items()}
    data = {"mixture": mixture, **parts.pop("data", {})}
    return replace(wired(config(data=data, **parts), rewards), problems=MIXED_PROBLEMS)


def steps(run: TrainingRun, state: TrainState, count: int) -> tuple[list[list[tuple[str, int]]], TrainState]:
    """The problems and epochs of the next batches."""
    found = []
    for _ in range(count):
        batch, state = collect(run, state, Clock())
        found.append([(group.problem.source_name, group.epoch) for group in batch.groups])
        state = replace(state, step=state.step + 1)
        run.workers.version = state.step
    return found, state


def test_sources_have_their_weights_and_epochs_of_their_own():
    batches, state = steps(run_of({"few": 1, "many": 1}), TrainState(), 4)
    assert [Counter(name for name, _ in batch) for batch in batches] == [{"few": 2, "many": 2}] * 4
    # four problems of "few": two batches are an epoch; of "many" 8 of 20 are taken
    assert [{epoch for name, epoch in batch if name == "few"} for batch in batches] == [{0}, {0}, {1}, {1}]
    assert {epoch for batch in batches for name, epoch in batch if name == "many"} == {0}
    assert state.rollouts.mixture is not None
    assert {name: at.taken for name, at in state.rollouts.mixture.sources.items()} == {"few": 8, "many": 8}
    assert state.rollouts.problems_seen == 16


def test_pass_rates_carry_the_epoch_of_the_source():
    _, state = steps(run_of({"few": 1, "many": 1}, data={"curriculum": {}}), TrainState(), 3)
    epochs = {MIXED_PROBLEMS[index].source_name: set() for index in range(24)}
    for index, measured in state.rollouts.pass_rates.by_index.items():
        epochs[MIXED_PROBLEMS[index].source_name].add(measured.epoch)
    assert epochs == {"few": {0, 1}, "many": {0}}


def test_a_saved_state_goes_on_the_same_and_with_other_weights_from_there(tmp_path: Path):
    dynamic = {"kl": {"coefficient": 0.0}, "dynamic_sampling": {"max_rounds": 5, "surplus_staleness": 2}}
    wrong = dict.fromkeys(("p0", "p1", "p2", "p3"), WRONG)
    run = run_of({"few": 1, "many": 3}, wrong, algorithm=dynamic)
    _, state = steps(run, TrainState(), 2)
    assert surplus(state)
    state.save(tmp_path)
    scalars = json.loads(json.dumps(state.scalars()))
    loaded = TrainState.load(tmp_path, scalars, MIXED_PROBLEMS, mask_truncated=False)
    assert loaded.scalars() == state.scalars()
    one, after = steps(run, state, 3)
    other, restored = steps(run, loaded, 3)
    assert one == other
    assert after.scalars() == restored.scalars()

    fork = run_of({"few": 1, "many": 1}, wrong)
    batches, forked = steps(fork, replace(loaded, rollouts=replace(loaded.rollouts, groups=())), 2)
    assert [Counter(name for name, _ in batch) for batch in batches] == [{"few": 2, "many": 2}] * 2
    before, now = loaded.rollouts.mixture, forked.rollouts.mixture
    assert before is not None
    assert now is not None
    assert {name: now.sources[name].taken - before.sources[name].taken for name in ("few", "many")} == {
        "few": 4,
        "many": 4,
    }
    with pytest.raises(CheckpointError, match="the dataset has a single source"):
        TrainState.load(tmp_path, scalars, PROBLEMS, mask_truncated=False)


def test_the_first_batch_is_the_same_whatever_the_order_of_the_names():
    first, _ = collect(run_of({"few": 1, "many": 2}), TrainState(), Clock())
    second, _ = collect(run_of({"many": 2, "few": 1}), TrainState(), Clock())
    assert ids(first.groups) == ids(second.groups)
