"""One rollout batch: draw problems, sample, score, and get the log-probs that the update will need.

With dynamic sampling, rounds of this until the step is full of groups with signal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlcore.config import ExperimentConfig
from rlcore.config.algorithm import DynamicSamplingConfig, RemaxAdvantage
from rlcore.data.curriculum import next_problems
from rlcore.data.stream import ProblemStream
from rlcore.errors import StarvedError
from rlcore.ports import SampledGroup, SampleRequest
from rlcore.rollout.collect import sample_requests, to_group, to_sample
from rlcore.training.advantages import ScoredGroup
from rlcore.training.clock import Clock
from rlcore.training.state import TrainState
from rlcore.training.ungraded import require_graded
from rlcore.types import Problem, RolloutGroup, Score, TrainingSample

if TYPE_CHECKING:
    from rlcore.training.loop import TrainingRun


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """What a step trains on, and what became of everything that was sampled for it."""

    groups: list[ScoredGroup]  # of the step
    generated: list[RolloutGroup]  # in this step, kept or not; never empty
    rounds: int
    filled: int  # groups without signal that take the place of groups with it
    from_buffer: int
    dropped_stale: int  # groups that waited in the buffer for too long
    age_max: int  # optimizer steps between the policy that sampled a group and the one that trains on it


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """One round, sampled; the scores may still be on their way."""

    epoch: int  # of the stream, when the round was drawn
    indices: list[int]
    problems: list[Problem]
    sampled: list[SampledGroup]
    baselines: list[SampledGroup]  # one greedy completion each; empty where no estimator wants them
    scores: Future[list[Score]]


def collect(run: TrainingRun, state: TrainState, clock: Clock) -> tuple[Collected, TrainState]:
    """The groups of the next step, and the state with its problems, pass rates and buffer moved on.

    Raises:
        StarvedError: dynamic sampling found too few groups with signal, and the config says to end the run then.
        UngradedError: more of a round than the config allows could not be graded.
    """
    dynamic = run.config.algorithm.dynamic_sampling
    stream = ProblemStream.at(
        {"num_problems": len(run.problems), "seed": run.config.data.shuffle_seed, "position": state.problems_seen}
    )
    if dynamic is not None:
        return _until_full(run, state, stream, dynamic, clock)
    draw, state = _sample(run, state, stream, "", clock)
    samples = with_policy_logprobs(run, _samples(draw, run.config), clock)  # beside the grading
    groups = _graded(run, draw, samples, clock)
    state = _with_pass_rates(state, draw, groups, run)
    return Collected(groups, [g.group for g in groups], 1, 0, 0, 0, 0), state


def _until_full(
    run: TrainingRun, state: TrainState, stream: ProblemStream, dynamic: DynamicSamplingConfig, clock: Clock
) -> tuple[Collected, TrainState]:
    wanted = run.config.training.problems_per_step
    ages = [state.step - group.samples[0].policy_version for group in state.buffer]
    waiting = [group for group, age in zip(state.buffer, ages, strict=True) if age <= dynamic.max_staleness]
    found: list[ScoredGroup] = []
    without_signal: list[ScoredGroup] = []
    rounds = 0
    while len(waiting) + len(found) < wanted and rounds < dynamic.max_rounds:
        draw, state = _sample(run, state, stream, f"+{rounds}" if rounds else "", clock)
        groups = _graded(run, draw, _samples(draw, run.config), clock)
        state = _with_pass_rates(state, draw, groups, run)
        for group in groups:
            (found if group.has_signal(run.config.algorithm) else without_signal).append(group)
        rounds += 1
    generated = [g.group for g in (*found, *without_signal)]
    missing = max(0, wanted - len(waiting) - len(found))
    if missing and dynamic.if_short == "fail":
        raise StarvedError(
            f"step {state.step + 1}: {len(generated)} groups in {rounds} rounds gave {len(found)} with signal, and "
            f"{wanted - len(waiting)} were needed. Raise algorithm.dynamic_sampling.max_rounds, take easier or harder "
            "problems, or set algorithm.dynamic_sampling.if_short to fill."
        )
    room = wanted - len(waiting)  # at least 1: what is left of a round is always less than a step
    step = _completed(run, [*found[:room], *without_signal[:missing]], clock)
    surplus = _completed(run, found[room:], clock, whole=True) if dynamic.max_staleness > 0 else []
    collected = Collected(
        groups=[*waiting, *step],
        generated=generated,
        rounds=rounds,
        filled=missing,
        from_buffer=len(waiting),
        dropped_stale=len(state.buffer) - len(waiting),
        age_max=max((age for age in ages if age <= dynamic.max_staleness), default=0),
    )
    return collected, replace(state, buffer=tuple(surplus))


def _sample(
    run: TrainingRun, state: TrainState, stream: ProblemStream, round_: str, clock: Clock
) -> tuple[_Draw, TrainState]:
    """Draw, sample and start grading one round."""
    config = run.config
    count, curriculum = config.training.problems_per_step, config.data.curriculum
    indices = stream.take(count) if curriculum is None else next_problems(stream, count, state.pass_rates, curriculum)
    epoch = state.problems_seen // len(run.problems)
    problems = [run.problems[i] for i in indices]
    batch = f"{state.step}{round_}"
    seed = run.adjustments.seed(state.step + 1, config.seed)
    requests = sample_requests(problems, config.rollout.group_size, seed=seed, batch=batch)
    if isinstance(config.algorithm.advantage, RemaxAdvantage):
        requests += [SampleRequest(problem, 1, 0, greedy=True) for problem in problems]
    with clock("generate"):
        sampled = run.workers.generate(requests)
    every = [(request.problem, c) for request, group in zip(requests, sampled, strict=True) for c in group.completions]
    scores = run.grader.submit([p for p, _ in every], [c for _, c in every])
    draw = _Draw(epoch, indices, problems, sampled[: len(problems)], sampled[len(problems) :], scores)
    return draw, replace(state, problems_seen=stream.taken)


def _samples(draw: _Draw, config: ExperimentConfig) -> list[TrainingSample]:
    mask_truncated = config.algorithm.mask_truncated
    return [
        to_sample(problem, group.prompt_token_ids, completion, mask_truncated=mask_truncated)
        for problem, group in zip(draw.problems, draw.sampled, strict=True)
        for completion in group.completions
    ]


def _graded(run: TrainingRun, draw: _Draw, samples: Sequence[TrainingSample], clock: Clock) -> list[ScoredGroup]:
    with clock("reward"):  # what grading takes beyond what it ran beside
        found = draw.scores.result()
    require_graded(found, run.config.reward.max_ungraded_share, run.grader)
    scores = iter(found)
    rest = iter(samples)
    scored = [
        (
            to_group(problem, group, [next(scores) for _ in group.completions]),
            tuple(next(rest) for _ in group.completions),
        )
        for problem, group in zip(draw.problems, draw.sampled, strict=True)
    ]
    baselines = [next(scores) for _ in draw.baselines] or [None] * len(scored)
    return [ScoredGroup(group, own, base) for (group, own), base in zip(scored, baselines, strict=True)]


def with_policy_logprobs(
    run: TrainingRun, samples: list[TrainingSample], clock: Clock, *, whole: bool = False
) -> list[TrainingSample]:
    """Samples with old and reference log-probs, where the config needs them.

    Args:
        whole: the samples are not those of one step, to be split into its updates.
    """
    config = run.config
    if not samples:
        return samples
    with clock("old_logprobs"):
        if needs_old_logprobs(config):
            # per update, so that each update repeats the very microbatches and its ratio starts at exactly 1
            parts = [samples] if whole else split(samples, config.training.updates_per_batch)
            old = [scored for part in parts for scored in run.workers.logprobs(part)]
            samples = [
                replace(s, old_logprobs=o.logprobs, log_kept=o.log_kept) for s, o in zip(samples, old, strict=True)
            ]
    with clock("ref_logprobs"):
        if config.algorithm.kl.coefficient > 0:
            reference = run.workers.reference_logprobs(samples)
            samples = [replace(s, ref_logprobs=r.logprobs) for s, r in zip(samples, reference, strict=True)]
    return samples


def needs_old_logprobs(config: ExperimentConfig) -> bool:
    """Whether the policy that updates may be another than the one that sampled, or its log-probs are wanted first."""
    algorithm = config.algorithm
    keeps_surplus = algorithm.dynamic_sampling is not None and algorithm.dynamic_sampling.max_staleness > 0
    kl_in_reward = algorithm.kl.place == "reward" and algorithm.kl.coefficient > 0
    several = config.training.steps_per_batch > 1
    return several or keeps_surplus or kl_in_reward or algorithm.recompute_old_logprobs


def _completed(
    run: TrainingRun, groups: Sequence[ScoredGroup], clock: Clock, *, whole: bool = False
) -> list[ScoredGroup]:
    """Groups with the log-probs of ``with_policy_logprobs``."""
    updates = run.config.training.updates_per_batch
    flat = [sample for group in groups for sample in group.samples]
    rest = iter(with_policy_logprobs(run, flat, clock, whole=whole or len(groups) % updates != 0))
    return [replace(group, samples=tuple(next(rest) for _ in group.samples)) for group in groups]


def _with_pass_rates(state: TrainState, draw: _Draw, groups: Iterable[ScoredGroup], run: TrainingRun) -> TrainState:
    if run.config.data.curriculum is None:
        return state
    found: dict[int, float] = {}
    for index, scored in zip(draw.indices, groups, strict=True):
        graded = [r.score for r in scored.group.rollouts if r.score.graded]
        if graded:
            found[index] = sum(score.parts.get("accuracy", score.reward) >= 1 for score in graded) / len(graded)
    return replace(state, pass_rates=state.pass_rates.updated(found, draw.epoch))


def split(samples: Sequence[TrainingSample], parts: int) -> list[Sequence[TrainingSample]]:
    """Equal parts in order; whole groups, because ``parts`` divides the problems of a batch."""
    size = len(samples) // parts
    return [samples[start : start + size] for start in range(0, len(samples), size)]
