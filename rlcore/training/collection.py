"""One rollout batch: draw problems, sample, score, and get the log-probs that the update will need.

With dynamic sampling, rounds of this until the step is full of groups with signal; with partial rollouts
(``partial.py``), rounds of so many tokens until it is full of groups that are whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlcore.config import ExperimentConfig
from rlcore.config.algorithm import DynamicSamplingConfig, RemaxAdvantage
from rlcore.errors import StarvedError
from rlcore.ports import SampledGroup, SampleRequest
from rlcore.process import in_background
from rlcore.rollout.collect import sample_requests, to_group, to_sample
from rlcore.training.advantages import ScoredGroup
from rlcore.training.clock import Clock
from rlcore.training.drawing import draw_problems, require_graded, with_pass_rates
from rlcore.training.partial import partial_batch
from rlcore.training.run import Collected, Drawn, Following
from rlcore.training.state import TrainState
from rlcore.types import Problem, Score, TrainingSample

if TYPE_CHECKING:
    from rlcore.training.run import TrainingRun


@dataclass(frozen=True, slots=True, eq=False)
class _Grading:
    """Completions that ended together, and their scores; these may still be on their way."""

    places: list[int]  # of each completion's group: in the problems, then in the baselines
    scores: Future[list[Score]]


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """One round, sampled."""

    epoch: int  # of the stream, when the round was drawn
    indices: list[int]
    problems: list[Problem]
    sampled: list[SampledGroup]
    baselines: list[SampledGroup]  # one greedy completion each; empty where no estimator wants them
    gradings: list[_Grading]

    @property
    def drawn(self) -> Drawn:
        groups = (*self.sampled, *self.baselines)
        return Drawn(rounds=1, tokens=sum(len(c.token_ids) for group in groups for c in group.completions))


def collect(run: TrainingRun, state: TrainState, clock: Clock) -> tuple[Collected, TrainState]:
    """The groups of the next step, and the state with its problems, pass rates and buffer moved on.

    Raises:
        StarvedError: dynamic sampling found too few groups with signal, and the config says to end the run then.
        UngradedError: more of a round than the config allows could not be graded.
    """
    state, dropped = _what_fits(run.config, state)
    collected, state = _collected(run, state, clock)
    return replace(collected, drawn=collected.drawn + Drawn(dropped_stale=dropped)), state


def _what_fits(config: ExperimentConfig, state: TrainState) -> tuple[TrainState, int]:
    """The state without groups that a run which is continued with another staleness has no use for; how many."""
    ahead = state.ahead if config.one_ahead else ()
    in_flight = () if config.rollout.partial is None else state.in_flight
    dropped = len(state.ahead) - len(ahead) + len(state.in_flight) - len(in_flight)
    return replace(state, ahead=ahead, in_flight=in_flight), dropped


def _collected(run: TrainingRun, state: TrainState, clock: Clock) -> tuple[Collected, TrainState]:
    dynamic, partial = run.config.algorithm.dynamic_sampling, run.config.rollout.partial
    if dynamic is not None:
        return _until_full(run, state, dynamic, clock)
    if run.config.one_ahead:
        return _one_ahead(run, state, clock)
    if partial is not None:
        groups, state, drawn = partial_batch(run, state, state.step, partial, clock)
        _end_sampling(run, clock)
        return _perhaps_stale(run, state, groups, drawn, clock), state
    draw, state = _sample(run, state, state.step, "", clock)
    _end_sampling(run, clock)
    samples = with_policy_logprobs(run, _samples(draw, run.config), clock)  # beside the grading
    groups = _graded(run, draw, samples, clock)
    state = _with_pass_rates(state, draw, groups, run.config)
    return Collected(groups, groups, draw.drawn, age_max=0), state


def with_following(state: TrainState, collected: Collected, clock: Clock) -> tuple[TrainState, Collected]:
    """The state with the batch that is sampled ahead, once that is whole: the sampler gets other weights next, and a
    checkpoint needs no policy that is gone. What was drawn for it is added to what was collected.

    Raises:
        UngradedError: more of the batch than the config allows could not be graded.
    """
    if collected.following is None:
        return state, collected
    with clock("wait_for_batch"):
        following = collected.following.result()
    if following.seconds:
        clock.note("generate_beside", following.seconds)
    found = following.state
    state = replace(
        state,
        ahead=found.ahead,
        in_flight=found.in_flight,
        problems_seen=found.problems_seen,
        postponed=found.postponed,
        pass_rates=found.pass_rates,
    )
    return state, replace(collected, drawn=collected.drawn + following.drawn)


def _one_ahead(run: TrainingRun, state: TrainState, clock: Clock) -> tuple[Collected, TrainState]:
    """The batch that was sampled ahead, while the one after it is started."""
    drawn = Drawn()
    if not state.ahead:  # the first batch of a run
        state, drawn = _with_batch(run, state, state.step, clock)
    groups, state = state.ahead, replace(state, ahead=())
    step = state.step + run.config.training.steps_per_batch
    if run.workers.apart:
        following = in_background(lambda: _beside(run, state, step))
    else:
        following = Future()
        following.set_result(Following(*_with_batch(run, state, step, clock), 0.0))
        _end_sampling(run, clock)
    return replace(_perhaps_stale(run, state, groups, drawn, clock), following=following), state


def _perhaps_stale(
    run: TrainingRun, state: TrainState, groups: Sequence[ScoredGroup], drawn: Drawn, clock: Clock
) -> Collected:
    trained = _completed(run, groups, clock)
    age = max(state.step - sample.policy_version for group in trained for sample in group.samples)
    return Collected(trained, groups, drawn, age, stale=age > 0)


def _beside(run: TrainingRun, state: TrainState, step: int) -> Following:
    clock = Clock()
    state, drawn = _with_batch(run, state, step, clock)
    return Following(state, drawn, clock.seconds["generate"])


def _with_batch(run: TrainingRun, state: TrainState, step: int, clock: Clock) -> tuple[TrainState, Drawn]:
    """The state with a batch in ``ahead``, for the update behind ``step`` steps."""
    partial = run.config.rollout.partial
    if partial is not None:
        groups, state, drawn = partial_batch(run, state, step, partial, clock)
        return replace(state, ahead=tuple(groups)), drawn
    draw, state = _sample(run, state, step, "", clock)
    groups = _graded(run, draw, _samples(draw, run.config), clock)
    return replace(_with_pass_rates(state, draw, groups, run.config), ahead=tuple(groups)), draw.drawn


def _until_full(
    run: TrainingRun, state: TrainState, dynamic: DynamicSamplingConfig, clock: Clock
) -> tuple[Collected, TrainState]:
    """Groups that wait in the buffer go first, then those of as many rounds as it takes to fill the step. A buffer that
    holds a whole step (of a run that is continued with a smaller batch) is trained on before anything is sampled."""
    wanted = run.config.training.problems_per_step
    fresh = [group for group in state.buffer if state.step - group.samples[0].policy_version <= dynamic.max_staleness]
    waiting, left = fresh[:wanted], fresh[wanted:]
    found: list[ScoredGroup] = []
    without_signal: list[ScoredGroup] = []
    drawn = Drawn(dropped_stale=len(state.buffer) - len(fresh))
    while len(waiting) + len(found) < wanted and drawn.rounds < dynamic.max_rounds:
        together = (*fresh, *found, *without_signal)
        draw, state = _sample(run, state, state.step, f"+{drawn.rounds}" if drawn.rounds else "", clock, together)
        groups = _graded(run, draw, _samples(draw, run.config), clock)
        state = _with_pass_rates(state, draw, groups, run.config)
        for group in groups:
            (found if group.has_signal(run.config.algorithm) else without_signal).append(group)
        drawn += draw.drawn
    _end_sampling(run, clock)
    generated = [*found, *without_signal]
    missing = max(0, wanted - len(waiting) - len(found))
    if missing and dynamic.if_short == "fail":
        raise StarvedError(
            f"step {state.step + 1}: {len(generated)} groups in {drawn.rounds} rounds gave {len(found)} with signal, "
            f"and {wanted - len(waiting)} were needed. Raise algorithm.dynamic_sampling.max_rounds, take easier or "
            "harder problems, or set algorithm.dynamic_sampling.if_short to fill."
        )
    room = wanted - len(waiting)
    step = _completed(run, [*waiting, *found[:room], *without_signal[:missing]], clock)
    surplus = _completed(run, found[room:], clock, whole=True) if dynamic.max_staleness > 0 else []
    collected = Collected(
        groups=step,
        generated=generated,
        drawn=drawn,
        age_max=max((state.step - group.samples[0].policy_version for group in waiting), default=0),
        filled=missing,
        from_buffer=len(waiting),
    )
    return collected, replace(state, buffer=(*left, *surplus))


def _sample(
    run: TrainingRun,
    state: TrainState,
    step: int,
    round_: str,
    clock: Clock,
    together: Sequence[ScoredGroup] = (),
) -> tuple[_Draw, TrainState]:
    """Draw and sample one round, for the update behind ``step`` steps; what has ended is graded while the rest is
    sampled.

    Args:
        together: groups of the same step, whose problems are avoided as long as there are others.
    """
    config = run.config
    epoch = state.problems_seen // len(run.problems)
    used = {group.group.problem.problem_id for group in together}
    avoid = [index for index, problem in enumerate(run.problems) if problem.problem_id in used] if used else []
    indices, state = draw_problems(config.data, len(run.problems), state, config.training.problems_per_step, avoid)
    problems = [run.problems[i] for i in indices]
    batch = f"{step}{round_}"
    seed = run.adjustments.seed(step + 1, config.seed)
    requests = sample_requests(problems, config.rollout.group_size, seed=seed, batch=batch)
    if isinstance(config.algorithm.advantage, RemaxAdvantage):
        requests += [SampleRequest(problem, 1, 0, greedy=True) for problem in problems]
    groups: dict[int, SampledGroup] = {}
    gradings: list[_Grading] = []
    with clock("generate"):
        for ended in run.workers.generate(requests):
            every = [(place, completion) for place, group in ended.items() for completion in group.completions]
            asked = [requests[place].problem for place, _ in every]
            scores = run.grader.submit(asked, [completion for _, completion in every])
            gradings.append(_Grading([place for place, _ in every], scores))
            groups |= ended
    sampled = [groups[place] for place in range(len(requests))]
    draw = _Draw(epoch, indices, problems, sampled[: len(problems)], sampled[len(problems) :], gradings)
    return draw, state


def _end_sampling(run: TrainingRun, clock: Clock) -> None:
    with clock("generate"):
        run.workers.release_sampler()


def _samples(draw: _Draw, config: ExperimentConfig) -> list[TrainingSample]:
    mask_truncated = config.algorithm.mask_truncated
    return [
        to_sample(problem, group.prompt_token_ids, completion, mask_truncated=mask_truncated)
        for problem, group in zip(draw.problems, draw.sampled, strict=True)
        for completion in group.completions
    ]


def _graded(run: TrainingRun, draw: _Draw, samples: Sequence[TrainingSample], clock: Clock) -> list[ScoredGroup]:
    with clock("reward"):  # what grading takes beyond what it ran beside
        found = [(grading.places, grading.scores.result()) for grading in draw.gradings]
    require_graded([score for _, scores in found for score in scores], run.config.reward.max_ungraded_share, run.grader)
    by_place: defaultdict[int, list[Score]] = defaultdict(list)
    for places, scores in found:
        for place, score in zip(places, scores, strict=True):
            by_place[place].append(score)
    rest = iter(samples)
    count = len(draw.problems)
    return [
        ScoredGroup(
            to_group(problem, group, by_place[place]),
            tuple(next(rest) for _ in group.completions),
            by_place[count + place][0] if draw.baselines else None,
        )
        for place, (problem, group) in enumerate(zip(draw.problems, draw.sampled, strict=True))
    ]


def with_policy_logprobs(
    run: TrainingRun, samples: Sequence[TrainingSample], clock: Clock, *, whole: bool = False
) -> list[TrainingSample]:
    """Samples with old and reference log-probs, where the config needs them. Those that are there already stay: they
    are of the policy that sampled.

    Args:
        whole: the samples are not those of one step, to be split into its updates.
    """
    config = run.config
    with clock("old_logprobs"):
        if needs_old_logprobs(config):
            parts = [samples] if whole else split(samples, config.training.updates_per_batch)
            samples = [sample for part in parts for sample in _with_old_logprobs(run, part)]
    with clock("ref_logprobs"):
        missing = [sample for sample in samples if sample.ref_logprobs is None]
        if config.algorithm.kl.coefficient > 0 and missing:
            reference = iter(run.workers.reference_logprobs(missing))
            samples = [
                s if s.ref_logprobs is not None else replace(s, ref_logprobs=next(reference).logprobs) for s in samples
            ]
    return list(samples)


def _with_old_logprobs(run: TrainingRun, update: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
    """The samples of one update. All of them go through the pass, also those whose values stay: the microbatches are
    then those of the update, so that its ratio starts at exactly 1."""
    if all(sample.old_logprobs is not None for sample in update):
        return update
    return [
        s if s.old_logprobs is not None else replace(s, old_logprobs=scored.logprobs, log_kept=scored.log_kept)
        for s, scored in zip(update, run.workers.logprobs(update), strict=True)
    ]


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
    rest = iter(with_policy_logprobs(run, [s for group in groups for s in group.samples], clock, whole=whole))
    return [replace(group, samples=tuple(next(rest) for _ in group.samples)) for group in groups]


def _with_pass_rates(
    state: TrainState, draw: _Draw, groups: Sequence[ScoredGroup], config: ExperimentConfig
) -> TrainState:
    measured = [(index, draw.epoch, found.group) for index, found in zip(draw.indices, groups, strict=True)]
    return with_pass_rates(state, config.data, measured)


def split(samples: Sequence[TrainingSample], parts: int) -> list[Sequence[TrainingSample]]:
    """Equal parts in order; whole groups, because ``parts`` divides the problems of a batch."""
    size = len(samples) // parts
    return [samples[start : start + size] for start in range(0, len(samples), size)]
