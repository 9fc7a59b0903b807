"""The real loop with a worker group of known updates: failing steps, and what is logged about them."""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from rlcore.adjustments import Adjustments
from rlcore.config import ExperimentConfig, HealthRule
from rlcore.errors import DivergedError, RollbackError
from rlcore.jobs.segment import TrainerSink
from rlcore.process import Clock, in_background
from rlcore.rollout.groups import Group
from rlcore.segment.health import HealthWatch
from rlcore.segment.journal import CheckpointSeconds, MetricJournal, read_journal
from rlcore.training.loop import learning_rate, train
from rlcore.training.run import TrainingRun, TrainState
from rlcore.types import Completion, Problem, Score
from tests.unit import toy_run as toy
from tests.unit.toy_run import collect, metrics_of, never, with_updates

KL = {"kl": {"coefficient": 0.1, "adaptive": {"target": 0.1, "horizon": 100}}}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_skipped_step_leaves_the_adaptive_kl_coefficient_where_it_was(tmp_path: Path, broken: float):
    run = with_updates(toy.config(algorithm=KL), [0.1, broken, 0.2, 0.1], tmp_path / "journal.jsonl")
    state = train(run, TrainState(), until_step=4, should_stop=never)
    # 8 completions per batch over a horizon of 100; a KL of twice the target counts as 20% too high
    raised = 0.1 * (1 + 0.2 * 8 / 100)
    assert run.workers.coefficients == pytest.approx([0.1, 0.1, 0.1, raised])
    assert state.kl_coefficient == pytest.approx(raised)
    assert [m["optim/skipped"] for m in metrics_of(tmp_path / "journal.jsonl")] == [0, 1, 0, 0]


def test_with_two_updates_the_last_finite_one_moves_the_coefficient(tmp_path: Path):
    settings = toy.config(algorithm=KL, training={"problems_per_batch": 4, "steps": 8, "mini_batches": 2})
    run = with_updates(settings, [0.2, math.nan], tmp_path / "journal.jsonl")
    state = train(run, TrainState(), until_step=2, should_stop=never)
    assert state.kl_coefficient == pytest.approx(0.1 * (1 + 0.2 * 8 / 100))


@pytest.mark.parametrize("updates", [1, 2])
def test_a_diverged_run_ends_with_its_last_steps_in_the_journal(tmp_path: Path, updates: int):
    batches: list[tuple[int, int]] = []

    def on_batch(step: int, generated: Sequence[Group], trained: Sequence[Group]) -> None:
        batches.append((step, len(trained)))

    training = {"problems_per_batch": 4, "steps": 8, "max_nonfinite_steps": 2, "mini_batches": updates}
    run = with_updates(toy.config(training=training), [0.1, *[math.nan] * 3], tmp_path / "journal.jsonl")
    run = dataclasses.replace(run, on_batch=on_batch)
    with pytest.raises(DivergedError, match="not finite in 3 steps in a row, the last one step 4"):
        train(run, TrainState(), until_step=8, should_stop=never)
    journaled = metrics_of(tmp_path / "journal.jsonl")
    assert [m["optim/skipped"] for m in journaled] == [0, 1, 1, 1]
    assert journaled[-1]["reward/mean"] == 0.5
    assert batches[-1] == (4, 4)
    assert run.workers.version == 4 - updates  # weights of a diverged step reach no sampler


def test_as_many_skipped_steps_as_allowed_are_survived_and_a_good_one_starts_the_count_anew(tmp_path: Path):
    settings = toy.config(training={"problems_per_batch": 4, "steps": 8, "max_nonfinite_steps": 2})
    kls = [math.nan, math.nan, 0.1, math.nan, math.nan]
    run = with_updates(settings, kls, tmp_path / "journal.jsonl")
    state = train(run, TrainState(), until_step=5, should_stop=never)
    assert (state.step, state.nonfinite_in_a_row) == (5, 2)


def test_a_diverging_batch_that_is_cut_short_journals_the_steps_it_took(tmp_path: Path):
    training = {"problems_per_batch": 4, "steps": 8, "max_nonfinite_steps": 1, "mini_batches": 4}
    run = with_updates(toy.config(training=training), [0.1, math.nan, math.nan], tmp_path / "journal.jsonl")
    with pytest.raises(DivergedError, match="the last one step 3"):
        train(run, TrainState(), until_step=8, should_stop=never)
    assert [r.step for r in read_journal(tmp_path / "journal.jsonl")] == [1, 2, 3]


class Silent(toy.Grader):
    """Gives no verdict on some completions, by their text."""

    def __init__(self, rewards: dict[str, list[float]], ungraded: Callable[[str], bool]) -> None:
        super().__init__(rewards)
        self._ungraded = ungraded

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        scores = super().submit(problems, completions).result()
        future: Future[list[Score]] = Future()
        future.set_result(
            [
                Score(0.0, {}, graded=False) if self._ungraded(completion.text) else score
                for score, completion in zip(scores, completions, strict=True)
            ]
        )
        return future


ANY_SHARE = {"name": "math", "max_ungraded_share": 1.0}


def test_ungraded_completions_enter_no_mean_and_no_deviation(tmp_path: Path):
    run = with_updates(toy.config(reward=ANY_SHARE), [0.1], tmp_path / "journal.jsonl")
    rewards = {problem.problem_id: [0.25, 0.75] for problem in toy.PROBLEMS}
    silent = toy.order(2)
    grader = Silent(rewards, lambda text: text in (f"{silent[0]}/0", f"{silent[1]}/0"))
    train(dataclasses.replace(run, grader=grader), TrainState(), until_step=1, should_stop=never)
    (found,) = metrics_of(tmp_path / "journal.jsonl")
    graded = [0.75, 0.75, 0.25, 0.75, 0.25, 0.75]  # as zeros the other two would make this 0.4375
    assert found["reward/mean"] == found["reward/trained_mean"] == pytest.approx(sum(graded) / 6)
    assert found["reward/std"] == pytest.approx(statistics.pstdev(graded))
    assert found["reward/accuracy"] == found["reward/mean"]
    assert found["reward/ungraded"] == 0.25


def test_without_graded_completions_there_is_no_mean(tmp_path: Path):
    rule = HealthRule.model_validate({"metric": "reward/mean", "below": 0.1, "for_steps": 1, "action": "pause"})
    run = with_updates(toy.config(reward=ANY_SHARE), [0.1], tmp_path / "journal.jsonl")
    run = dataclasses.replace(run, grader=Silent({}, lambda text: True))
    train(run, TrainState(), until_step=1, should_stop=never)
    (record,) = read_journal(tmp_path / "journal.jsonl")
    assert {name for name in record.metrics if name.startswith("reward/")} == {"reward/ungraded"}
    assert record.metrics["reward/ungraded"] == record.metrics["rollout/zero_signal"] == 1
    assert not HealthWatch([rule], [record], Adjustments()).broken()  # nor is its name unknown


def dynamic(size: int, **more: object) -> ExperimentConfig:
    algorithm = {"kl": {"coefficient": 0.0}, "dynamic_sampling": {"max_rounds": 3, "surplus_staleness": 2}}
    return toy.config(algorithm=algorithm, training={"problems_per_batch": size, "steps": 8, **more})


def test_a_buffer_that_holds_more_than_a_step_is_trained_on_before_anything_is_sampled(tmp_path: Path):
    """As that of a run which is continued with a smaller batch."""
    stream = toy.order(16)
    before = toy.wired(dynamic(8), {stream[0]: toy.WRONG})
    _, state = collect(before, TrainState(), Clock())
    assert len(toy.surplus(state)) == 7
    waiting = toy.ids(toy.surplus(state))

    trained: list[list[str]] = []

    def on_batch(step: int, generated: Sequence[Group], groups: Sequence[Group]) -> None:
        trained.append([group.problem.problem_id for group in groups])

    run = with_updates(dynamic(2, mini_batches=2), [0.1] * 4, tmp_path / "journal.jsonl")
    run = dataclasses.replace(run, on_batch=on_batch)
    state = train(run, dataclasses.replace(state, step=0), until_step=4, should_stop=never)
    assert trained == [waiting[:2], waiting[2:4]]
    assert toy.ids(toy.surplus(state)) == waiting[4:]
    assert run.workers.requests == []
    ends = metrics_of(tmp_path / "journal.jsonl")[1::2]
    assert [(m["rollout/rounds"], m["rollout/groups_from_buffer"], m["rollout/groups_generated"]) for m in ends] == [
        (0, 2, 0),
        (0, 2, 0),
    ]


def test_remax_without_a_graded_baseline_has_no_signal_in_sampling_and_in_metrics(tmp_path: Path):
    """The rewards of the first group differ, and still every advantage is 0; those of the second are equal, and differ
    from the baseline of 0.5."""
    stream = toy.order(6)
    settings = toy.config(
        reward=ANY_SHARE,
        algorithm={
            "advantage": {"name": "remax"},
            "kl": {"coefficient": 0.0},
            "dynamic_sampling": {"max_rounds": 3, "surplus_staleness": 0},
        },
    )
    run = with_updates(settings, [0.1], tmp_path / "journal.jsonl")
    grader = Silent({stream[1]: toy.RIGHT}, lambda text: text == f"{stream[0]}/greedy")
    batches: list[list[str]] = []

    def on_batch(step: int, generated: Sequence[Group], groups: Sequence[Group]) -> None:
        batches.append([group.problem.problem_id for group in groups])

    run = dataclasses.replace(run, grader=grader, on_batch=on_batch)
    train(run, TrainState(), until_step=1, should_stop=never)
    assert batches == [stream[1:5]]
    (found,) = metrics_of(tmp_path / "journal.jsonl")
    assert (found["rollout/rounds"], found["rollout/zero_signal"], found["rollout/trained_zero_signal"]) == (
        2,
        1 / 8,
        0,
    )


@pytest.mark.parametrize("updates", [1, 2])
def test_old_log_probs_of_a_batch_with_surplus_use_the_microbatches_of_its_updates(tmp_path: Path, updates: int):
    """Each pass is over all samples of an update, those of the buffer too, whose values stay: the plan of microbatches
    depends on the samples alone, so it is the update's, and the ratio is exactly 1."""
    stream = toy.order(16)
    run = with_updates(dynamic(4, mini_batches=updates), [0.1] * 2 * updates, tmp_path / "journal.jsonl")
    run = dataclasses.replace(run, grader=toy.Grader({stream[0]: toy.WRONG, stream[1]: toy.WRONG}))
    train(run, TrainState(), until_step=2 * updates, should_stop=never)
    whole = 4 * 2 // updates
    # step 1: four fresh groups, and two that will wait; step 2: these two and two fresh ones, and two that will wait
    first, second = [whole] * updates + [4], [whole] + [4]
    assert run.workers.scored == first + second
    assert all(s.old_logprobs is not None for samples in run.workers.updated for s in samples)


def test_warm_up_is_linear_from_the_first_step_and_then_constant(tmp_path: Path):
    training = {"problems_per_batch": 4, "steps": 8, "learning_rate": 0.01, "warmup_steps": 4}
    run = with_updates(toy.config(training=training), [0.1] * 6, tmp_path / "journal.jsonl")
    state = train(run, TrainState(), until_step=3, should_stop=never)
    train(run, state, until_step=6, should_stop=never)
    assert run.workers.rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    assert [m["optim/learning_rate"] for m in metrics_of(tmp_path / "journal.jsonl")] == run.workers.rates


@pytest.mark.parametrize(("warmup", "rates"), [(0, [0.5, 0.5, 0.5]), (1, [0.5, 0.5, 0.5]), (2, [0.25, 0.5, 0.5])])
def test_the_rate_counts_steps_from_one(warmup: int, rates: list[float]) -> None:
    training = toy.config(training={"learning_rate": 0.5, "warmup_steps": warmup}).training
    assert [learning_rate(step, training) for step in (1, 2, 3)] == rates
    with pytest.raises(ValueError, match="count from 1, got 0"):
        learning_rate(0, training)


def test_seconds_of_a_phase_add_up_and_may_be_counted_as_another_s() -> None:
    clock = Clock()
    clock.note("update", 2.0)
    clock.note("update", 0.5)
    clock.move(0.25, "update", "wake")
    clock.move(0.25, "update", "wake")
    with clock("reward"):
        pass
    seconds = clock.seconds
    assert (seconds["update"], seconds["wake"]) == (2.0, 0.5)
    assert set(seconds) == {"update", "wake", "reward", "step"}
    assert 0 <= seconds["reward"] <= seconds["step"] < 1000


def test_what_fails_in_the_background_is_raised_where_it_is_waited_for() -> None:
    threads: list[threading.Thread] = []

    def work(error: BaseException | None) -> str:
        threads.append(threading.current_thread())
        if error is not None:
            raise error
        return "done"

    assert in_background(lambda: work(None)).result(timeout=60) == "done"
    for error in (DivergedError("d"), KeyboardInterrupt()):
        assert in_background(lambda error=error: work(error)).exception(timeout=60) is error
    assert all(thread.daemon and thread is not threading.main_thread() for thread in threads)


def test_a_run_that_is_rolled_back_goes_on_with_a_lower_rate_and_other_completions(tmp_path: Path):
    """The trainer's loop, sink and health rules, and what its driver changes before the next start."""
    rule = HealthRule(metric="loss/kl_ref", above=0.5, action="rollback", learning_rate_factor=0.25)
    settings = toy.config(training={"problems_per_batch": 4, "steps": 5, "learning_rate": 0.01})

    def run_with(adjustments: Adjustments, kls: list[float]) -> tuple[TrainingRun, HealthWatch]:
        journal = MetricJournal(tmp_path / "journal.jsonl")
        health = HealthWatch([rule], read_journal(tmp_path / "journal.jsonl"), adjustments)
        run = with_updates(settings, kls, tmp_path / "journal.jsonl")
        sink = TrainerSink(journal, CheckpointSeconds(), health)
        return dataclasses.replace(run, adjustments=adjustments, sink=sink), health

    run, health = run_with(Adjustments(), [0.1, 0.1, 0.9])
    committed = train(run, TrainState(), until_step=2, should_stop=health.broken)
    assert train(run, committed, until_step=5, should_stop=health.broken).step == 3
    with pytest.raises(RollbackError, match=r"step 3: loss/kl_ref above 0\.5"):
        health.pause_or_raise()
    assert run.workers.rates == pytest.approx([0.01] * 3)

    MetricJournal(tmp_path / "journal.jsonl").cut(2)
    changed = Adjustments().rolled_back(2, settings, factor=rule.learning_rate_factor, rule=str(rule))
    again, health = run_with(changed, [0.1] * 3)
    assert train(again, committed, until_step=5, should_stop=health.broken).step == 5
    assert health.pause_or_raise() is None
    assert again.workers.rates == pytest.approx([0.0025] * 3)
    rates = [metrics["optim/learning_rate"] for metrics in metrics_of(tmp_path / "journal.jsonl")]
    assert rates == pytest.approx([0.01, 0.01, 0.0025, 0.0025, 0.0025])
    before, after = run.workers.requests[8:12], again.workers.requests[:4]
    assert [r.problem for r in before] == [r.problem for r in after]
    assert not {r.seed for r in before} & {r.seed for r in after}
