"""The GRPO loop. Start reading here.

    problems -> sample G completions each -> score -> advantage within the group -> one or more clipped policy
    gradient steps -> the sampler takes the new weights

Whatever runs behind a protocol (Ray, FSDP2, vLLM, grading processes) is wired in ``rlcore/assemble.py``; the
arithmetic is in ``rlcore/algorithms``; stopping, checkpoints and segments are in ``rlcore/segment/run.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlcore.config import ExperimentConfig
from rlcore.data.stream import ProblemStream
from rlcore.distributed.group import WorkerGroup, with_logprobs
from rlcore.errors import DivergedError
from rlcore.ports import Grader, MetricSink
from rlcore.rollout.collect import sample_requests, to_group, to_sample
from rlcore.training.clock import Clock
from rlcore.training.metrics import rollout_metrics, update_metrics
from rlcore.training.schedule import learning_rate
from rlcore.training.step import attach_advantages
from rlcore.types import Problem, RolloutGroup, TrainingSample


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands; with the sharded weights and optimizer it is all that a resume needs."""

    step: int = 0  # optimizer steps taken; also the version of the weights
    problems_seen: int = 0  # of the stream, trained on
    nonfinite_in_a_row: int = 0


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A wired experiment."""

    config: ExperimentConfig
    problems: Sequence[Problem]
    workers: WorkerGroup  # policy and sampler
    grader: Grader
    sink: MetricSink
    on_batch: Callable[[int, Sequence[RolloutGroup]], None]  # keeps sample completions for people to read


def train(run: TrainingRun, state: TrainState, *, until_step: int, should_stop: Callable[[], bool]) -> TrainState:
    """Train from ``state`` to ``until_step`` optimizer steps, or to the end of the batch in which
    ``should_stop`` turns true. The sampler must hold the weights of ``state.step``.

    Raises:
        DivergedError: non-finite gradients in more consecutive steps than the config allows.
    """
    config, workers = run.config, run.workers
    updates = config.training.updates_per_batch
    stream = ProblemStream.at(
        {"num_problems": len(run.problems), "seed": config.data.shuffle_seed, "position": state.problems_seen}
    )

    while state.step < until_step and not should_stop():
        clock = Clock()
        problems = [run.problems[i] for i in stream.take(config.training.problems_per_step)]
        requests = sample_requests(problems, config.rollout.group_size, seed=config.seed, batch=state.step)

        with clock("generate"):
            sampled = workers.generate(requests)
        every = [
            (problem, group, i)
            for problem, group in zip(problems, sampled, strict=True)
            for i in range(len(group.completions))
        ]
        grading = run.grader.submit([p for p, _, _ in every], [g.completions[i] for _, g, i in every])

        samples = [to_sample(problem, group, i) for problem, group, i in every]
        old = reference = None
        with clock("old_logprobs"):
            if updates > 1 or config.algorithm.recompute_old_logprobs:
                # per update, so that each update repeats the very microbatches and its ratio starts at exactly 1
                old = [values for part in split(samples, updates) for values in workers.logprobs(part)]
        with clock("ref_logprobs"):
            if config.algorithm.kl.coefficient > 0:
                reference = workers.reference_logprobs(samples)
        samples = with_logprobs(samples, old, reference)

        with clock("reward"):  # what grading takes beyond the log-probs that it ran beside
            scores = iter(grading.result())
        groups = [to_group(p, g, [next(scores) for _ in g.completions]) for p, g in zip(problems, sampled, strict=True)]
        samples = attach_advantages(samples, groups, normalize_by_std=config.algorithm.normalize_by_std)

        metrics: list[dict[str, float]] = []
        for part in split(samples, updates):
            rate = learning_rate(state.step + 1, config.training)
            with clock("update"):
                result = workers.update(part, rate)
            streak = state.nonfinite_in_a_row + 1 if result.skipped else 0
            state = replace(state, step=state.step + 1, nonfinite_in_a_row=streak)
            metrics.append(update_metrics(result, config.algorithm) | {"optim/learning_rate": rate})
            if streak > config.training.max_nonfinite_steps:
                raise DivergedError(
                    f"the gradient was not finite in {streak} steps in a row, the last one step {state.step}. "
                    "Lower training.learning_rate or look at reward/ and loss/ of the steps before."
                )

        with clock("weight_sync"):
            workers.sync_weights(state.step)
        state = replace(state, problems_seen=state.problems_seen + len(problems))

        metrics[-1] |= rollout_metrics(groups, clock.seconds, workers.peak_memory_bytes())
        run.on_batch(state.step, groups)
        for step, values in enumerate(metrics, start=state.step - updates + 1):
            run.sink.step(step, values)
    return state


def split(samples: Sequence[TrainingSample], parts: int) -> list[Sequence[TrainingSample]]:
    """Equal parts in order; whole groups, because ``parts`` divides the problems of a batch."""
    size = len(samples) // parts
    return [samples[start : start + size] for start in range(0, len(samples), size)]
