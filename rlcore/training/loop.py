"""The GRPO loop. Start reading here.

    problems -> sample G completions each -> score -> advantages -> one or more policy gradient steps -> the sampler
    takes the new weights

``rlcore/training/assemble.py`` connects Ray, FSDP2, vLLM and the grading processes; ``rlcore/algorithms`` has the
arithmetic; ``rlcore/jobs/segment.py`` has stopping, checkpoints and segments.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlcore.algorithms.divergence import next_coefficient
from rlcore.config import TrainingConfig
from rlcore.config.algorithm import KlConfig
from rlcore.errors import DivergedError, PreemptedError
from rlcore.flops import NOTHING
from rlcore.process import Clock
from rlcore.rollout.advantages import attach_advantages
from rlcore.rollout.collect import collect, with_prefetched
from rlcore.rollout.schedule import mini_batches
from rlcore.training.metrics import (
    collection_metrics,
    mismatch_alarm,
    performance_metrics,
    rollout_metrics,
    update_metrics,
)
from rlcore.training.run import TrainingRun, TrainState

logger = logging.getLogger(__name__)


def train(run: TrainingRun, state: TrainState, *, until_step: int, should_stop: Callable[[], bool]) -> TrainState:
    """Train until optimizer step ``until_step``, or to the end of the rollout batch in which ``should_stop`` becomes
    true. The sampler must have the weights of ``state.step``. A batch whose collection ends with PreemptedError is
    dropped: the next trainer collects it again.

    ``rlcore/rollout/schedule.py`` decides when groups are sampled and trained: dynamic sampling, prefetching and
    partial rollouts.

    Raises:
        DivergedError: more non-finite gradients in a row than the config allows.
        StarvedError: dynamic sampling found too few groups with signal, and the config ends the run in that case.
        UngradedError: a larger share of a rollout batch than the config allows could not be graded.
        PreemptedError: while a prefetched batch was graded. The steps since the last checkpoint are lost, because
            they cannot be repeated without that batch.
    """
    config, workers = run.config, run.workers
    training, kl = config.training, config.algorithm.kl
    alarm_above = mismatch_alarm(config, "cpu" if workers.device_name == "cpu" else "cuda")

    while state.step < until_step and not should_stop():
        clock = Clock()
        kl_coefficient = kl.coefficient if state.kl_coefficient is None else state.kl_coefficient
        try:
            batch = collect(run, state.rollouts, state.step, clock)
        except PreemptedError:
            logger.info("the batch after step %d is left to the next trainer: this one has to stop", state.step)
            return state
        state = replace(state, rollouts=batch.rollouts)
        advantages = attach_advantages(batch.groups, config.algorithm, kl_coefficient=kl_coefficient)

        metrics: list[dict[str, float]] = []
        work = NOTHING
        last_step = state.step + training.steps_per_batch
        for part in mini_batches(advantages.samples, training.mini_batches) * training.ppo_epochs:
            rate = learning_rate(state.step + 1, training) * run.adjustments.learning_rate_factor(state.step + 1)
            with clock("update"):
                result = workers.update(part, rate, kl_coefficient)
            work += workers.work(part)
            streak = state.nonfinite_in_a_row + 1 if result.skipped else 0
            state = replace(state, step=state.step + 1, nonfinite_in_a_row=streak)
            values = update_metrics(result, kl_coefficient, alarm_above=alarm_above, stale=batch.stale)
            metrics.append(values | {"optim/learning_rate": rate})
            if streak > training.max_nonfinite_steps:
                break
        diverged = state.nonfinite_in_a_row > training.max_nonfinite_steps
        if not diverged:
            kls = [m["loss/kl_ref"] for m in metrics] if advantages.kl_penalty is None else [advantages.kl_penalty]
            state = replace(state, kl_coefficient=adapted(kl, kl_coefficient, kls, len(advantages.samples)))
            batch = with_prefetched(batch, clock)
            state = replace(state, rollouts=batch.rollouts)
            with clock("weight_sync"):
                waking = workers.sync_weights(state.step)
            clock.move(waking, "weight_sync", "wake")

        sampled, peak = batch.counts.tokens, workers.peak_memory_bytes()
        metrics[-1] |= rollout_metrics(batch.generated, config.algorithm, sampled, clock.seconds, peak)
        metrics[-1] |= performance_metrics(work, clock.seconds["update"], workers.size, workers.device_name)
        metrics[-1] |= collection_metrics(batch, advantages)
        metrics[-1] |= run.grader.take_metrics()
        run.on_batch(last_step, batch.generated, batch.groups)
        for step, values in enumerate(metrics, start=state.step - len(metrics) + 1):
            run.sink.step(step, values)
        if diverged:  # raised after the journal has the steps that explain it
            raise DivergedError(
                f"the gradient was not finite in {state.nonfinite_in_a_row} steps in a row, the last one step "
                f"{state.step}. Lower training.learning_rate, or look at reward/ and loss/ of the previous steps."
            )
        if config.evaluation.is_due(last_step - training.steps_per_batch, state.step):
            run.validate(state.step)
    return state


def adapted(kl: KlConfig, coefficient: float, kls: Sequence[float], completions: int) -> float:
    """The KL coefficient of the next batch.

    Args:
        kls: mean KL per token of each step of the batch. The last finite one counts; without one the coefficient stays,
            because a single NaN would make it NaN in all later steps.
    """
    finite = [value for value in kls if math.isfinite(value)]
    if kl.adaptive is None or not finite:
        return coefficient
    return next_coefficient(
        coefficient, finite[-1], target=kl.adaptive.target, horizon=kl.adaptive.horizon, completions=completions
    )


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Learning rate of optimizer step ``step``, counted from 1: linear warm-up, then constant. Never 0."""
    if step < 1:
        raise ValueError(f"optimizer steps count from 1, got {step}")
    return config.learning_rate * min(1.0, step / config.warmup_steps) if config.warmup_steps else config.learning_rate
