"""The loop that fills a rollout batch: sample, grade while sampling, admit to training, add log-probs.

``schedule.py`` decides when groups are sampled and trained.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, replace
from functools import partial
from operator import add
from typing import Protocol

from rlcore.adjustments import Adjustments
from rlcore.config import ExperimentConfig
from rlcore.config.algorithm import RemaxAdvantage
from rlcore.data.mixture import MixturePosition, next_of_mixture, source_sizes
from rlcore.data.stream import ProblemStream, next_problems
from rlcore.distributed.group import WorkerGroup
from rlcore.errors import StarvedError
from rlcore.process import Clock, in_background
from rlcore.rollout.advantages import has_signal
from rlcore.rollout.grading import Grading, require_graded, with_scores
from rlcore.rollout.groups import Group, new_groups
from rlcore.rollout.policy_logprobs import with_policy_logprobs
from rlcore.rollout.schedule import Schedule
from rlcore.rollout.state import RolloutState
from rlcore.types import Grader, Problem, SampleRequest


class RolloutRun(Protocol):
    """The parts of a training run that this module uses."""

    @property
    def config(self) -> ExperimentConfig: ...
    @property
    def problems(self) -> Sequence[Problem]: ...
    @property
    def workers(self) -> WorkerGroup: ...
    @property
    def grader(self) -> Grader: ...
    @property
    def adjustments(self) -> Adjustments: ...


@dataclass(frozen=True, slots=True)
class Counts:
    """The sampler's work for one batch."""

    rounds: int = 0
    tokens: int = 0  # of completions
    continued: int = 0  # completions that an older policy began
    dropped_stale: int = 0  # groups that would exceed the allowed staleness

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """The groups to train on, and the remaining state."""

    groups: Sequence[Group]
    generated: Sequence[Group]  # for this batch, trained on or not; empty if surplus groups fill the batch
    counts: Counts
    rollouts: RolloutState  # without these groups
    age_max: int = 0  # policy versions between the oldest token and the policy that trains on it
    stale: bool = False  # the sampler's log-probs come from older policies
    filled: int = 0  # groups without signal, used because too few have one
    from_buffer: int = 0  # surplus groups of earlier batches
    following: Future[Filled] | None = None  # the prefetched batch


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """The state when enough groups are ready for a batch. These come first in ``state.groups``."""

    state: RolloutState
    counts: Counts
    generated: Sequence[Group] = ()  # with dynamic sampling: groups with signal, then groups without
    gradings: Sequence[Grading] = ()  # not finished yet
    ungraded: Collection[tuple[str, int]] = ()  # keys of the ready groups that wait for their scores
    seconds: float = 0.0  # of sampling during the previous batch's training; 0 without prefetching on other devices

    def without(self, size: int) -> RolloutState:
        """The state without the first ``size`` groups."""
        return replace(self.state, groups=self.state.groups[size:])


def collect(run: RolloutRun, state: RolloutState, step: int, clock: Clock) -> RolloutBatch:
    """The rollout batch to train on after ``step`` optimizer steps. With prefetching, also start the next one.

    Raises:
        StarvedError: dynamic sampling found too few groups with signal, and the config ends the run in that case.
        UngradedError: a larger share of the completions than the config allows could not be graded.
    """
    schedule = Schedule.of(run.config)
    filled = _fill(run, schedule, state, clock, step=step, version=step)
    following = None
    if schedule.prefetch:
        filled = _graded(run, filled, clock)
        following = _prefetch(run, schedule, filled.without(schedule.size), clock, step)
    if not (schedule.prefetch and run.workers.disaggregated):
        with clock("generate"):
            run.workers.release_sampler()
    filled = _graded(run, _ready_to_train(run, schedule, filled, clock), clock)  # while grading runs
    groups = filled.state.groups[: schedule.size]
    age = max(schedule.age(group, step) for group in groups)
    return RolloutBatch(
        groups,
        filled.generated if schedule.needs_signal else groups,
        filled.counts,
        filled.without(schedule.size),
        age_max=age,
        stale=schedule.asynchronous and age > 0,
        filled=sum(not has_signal(group, run.config.algorithm) for group in groups) if schedule.needs_signal else 0,
        from_buffer=sum(group.surplus for group in groups),
        following=following,
    )


def with_prefetched(batch: RolloutBatch, clock: Clock) -> RolloutBatch:
    """Wait for the prefetched batch, and return ``batch`` with a state that includes it.

    After this the sampler may get new weights, and a checkpoint depends on no older policy.

    Raises:
        StarvedError, UngradedError: as ``collect``, for the next batch.
    """
    if batch.following is None:
        return batch
    with clock("wait_for_batch"):
        following = batch.following.result()
    if following.seconds:
        clock.note("generate_beside", following.seconds)
    return replace(
        batch,
        rollouts=following.state,
        counts=batch.counts + following.counts,
        generated=[*batch.generated, *following.generated],
        following=None,
    )


def _prefetch(run: RolloutRun, schedule: Schedule, state: RolloutState, clock: Clock, step: int) -> Future[Filled]:
    """Sample the batch after the one for ``step``, with the same policy: in the background if the sampler has its own
    devices, else now."""
    next_step = step + schedule.steps_per_version

    def fill(clock: Clock) -> Filled:
        return _graded(run, _fill(run, schedule, state, clock, step=next_step, version=step), clock)

    def fill_in_background() -> Filled:
        own_clock = Clock()
        return replace(fill(own_clock), seconds=own_clock.seconds.get("generate", 0.0))

    if run.workers.disaggregated:
        return in_background(fill_in_background)
    done: Future[Filled] = Future()
    done.set_result(fill(clock))
    return done


def _fill(run: RolloutRun, schedule: Schedule, state: RolloutState, clock: Clock, *, step: int, version: int) -> Filled:
    """Sample until a batch of groups is ready.

    Args:
        step: optimizer steps before the batch is trained.
        version: of the policy that samples.
    """
    algorithm = run.config.algorithm
    admit = partial(Group.admitted, mask_truncated=algorithm.mask_truncated)
    usable = [group for group in state.groups if schedule.usable(group, step)]
    waiting = [group for group in usable if group.state != "ready"]
    ready = [group for group in usable if group.state == "ready"]
    if schedule.asynchronous:  # log-probs are computed when the groups train
        ready = [admit(group) for group in ready]
    before, needed = len(ready), schedule.size - len(ready)
    continued = sum(len(group.unfinished) for group in waiting) if needed > 0 else 0
    counts = Counts(continued=continued, dropped_stale=len(state.groups) - len(usable))
    gradings: list[Grading] = []
    with_signal: list[Group] = []
    without_signal: list[Group] = []
    for attempt in range(schedule.max_attempts):
        room = schedule.size - len(ready)
        if room <= 0:
            break
        batch, others = f"{step}+{attempt}" if attempt else str(step), [*ready, *waiting, *without_signal]
        judged = {group.key for group in waiting if not group.unfinished}
        state, new = _next_groups(run, state, schedule.missing(len(ready) + len(waiting)), batch, others, version)
        first = schedule.due(ready, [*waiting, *new], step)
        waiting, sampled = _sample(run, schedule, [*waiting, *new], first, room, step, gradings, clock)
        counts += sampled
        if schedule.needs_signal:
            waiting, gradings = with_scores(waiting, gradings, clock), []
            ended = [admit(group) for group in waiting if not group.unfinished and group.key not in judged]
            state = _judged(run, state, ended)
            replaced = {group.key for group in ended if not has_signal(group, algorithm)}
            with_signal += [group for group in ended if group.key not in replaced]
            without_signal += [group for group in ended if group.key in replaced]
            waiting = [group for group in waiting if group.key not in replaced]
        places = schedule.chosen(waiting, room)
        ready += [admit(waiting[place]) for place in places]
        waiting = [group for place, group in enumerate(waiting) if place not in places]
    short = max(0, schedule.size - len(ready))
    if short and not schedule.fills:
        raise StarvedError(
            f"step {step + 1}: {len(with_signal) + len(without_signal)} groups in {counts.rounds} rounds gave "
            f"{len(with_signal)} with signal, and {needed} were needed. Raise algorithm.dynamic_sampling.max_rounds, "
            "use easier or harder problems, or set algorithm.dynamic_sampling.if_short to fill."
        )
    ready += without_signal[:short]
    surplus = [replace(group, surplus=True) for group in ready[schedule.size :]] if schedule.keeps_surplus else []
    return Filled(
        replace(state, groups=(*ready[: schedule.size], *surplus, *waiting)),
        counts,
        generated=[*with_signal, *without_signal],
        gradings=gradings,
        ungraded=() if schedule.needs_signal else {group.key for group in ready[before:]},
    )


def _next_groups(
    run: RolloutRun, state: RolloutState, count: int, batch: str, others: Sequence[Group], version: int
) -> tuple[RolloutState, list[Group]]:
    """New groups for the next problems of the stream.

    Args:
        others: groups whose problems are avoided as far as possible.
    """
    state, chosen = _next_problems(run, state, count, avoid={group.index for group in others})
    groups = new_groups(
        [(index, run.problems[index]) for index, _ in chosen],
        run.config.rollout.group_size,
        batch=batch,
        epoch=0,
        policy_version=version,
        taken=[group.key for group in others],
    )
    return state, [replace(group, epoch=epoch) for group, (_, epoch) in zip(groups, chosen, strict=True)]


def _next_problems(
    run: RolloutRun, state: RolloutState, count: int, avoid: Collection[int]
) -> tuple[RolloutState, list[tuple[int, int]]]:
    """The index of each next problem, and the epoch of the stream that it comes from."""
    data, rates, postponed = run.config.data, state.pass_rates, state.postponed
    if not data.mixture:
        stream = ProblemStream(len(run.problems), data.shuffle_seed, taken=state.problems_seen)
        epoch = stream.taken // stream.num_problems
        chosen = next_problems(stream, count, rates, data.curriculum, postponed=postponed, avoid=avoid)
        state = replace(state, problems_seen=stream.taken, postponed=chosen.postponed)
        return state, [(index, epoch) for index in chosen.indices]
    weights = {name: source.weight for name, source in data.mixture.items()}
    at = state.mixture or MixturePosition.start(weights, source_sizes(run.problems))
    mixed = next_of_mixture(
        run.problems,
        at.with_weights(weights),
        count,
        rates,
        data.curriculum,
        seed=data.shuffle_seed,
        postponed=postponed,
        avoid=avoid,
    )
    now = mixed.position
    return replace(state, problems_seen=now.taken, mixture=now, postponed=mixed.postponed), mixed.problems


def _sample(
    run: RolloutRun,
    schedule: Schedule,
    groups: Sequence[Group],
    first: int,
    room: int,
    step: int,
    gradings: list[Grading],
    clock: Clock,
) -> tuple[list[Group], Counts]:
    """Sample in rounds until ``room`` groups have ended, and submit ended completions to the grader at once.

    A round adds at most ``tokens_per_round`` tokens to each completion, but samples the ``first`` groups to their ends.
    """
    seed = run.adjustments.seed(step + 1, run.config.seed)
    current, counts = {group.key: group for group in groups}, Counts()
    while counts.rounds == 0 or sum(not group.unfinished for group in current.values()) < room:
        asked: list[tuple[Group, tuple[int, ...] | None, SampleRequest]] = []
        for place, group in enumerate(current.values()):
            budget = None if place < first else schedule.tokens_per_round
            asked += [(group, which, request) for which, request in group.requests(seed, budget)]
        if isinstance(run.config.algorithm.advantage, RemaxAdvantage):
            begun = [group for group in current.values() if group.state == "new"]
            asked += [(group, None, SampleRequest(group.problem, 1, 0, greedy=True)) for group in begun]
        tokens = 0
        with clock("generate"):
            for answers in run.workers.generate([request for _, _, request in asked]):
                places: list[tuple[tuple[str, int], int | None]] = []
                completions = []
                for number, answer in answers.items():
                    key, which = asked[number][0].key, asked[number][1]
                    tokens += sum(len(piece.token_ids) for piece in answer.completions)
                    if which is None:
                        places.append((key, None))
                        completions.append(answer.completions[0])
                        continue
                    group = current[key] = current[key].continued(answer, which)
                    ended = [i for i in which if i not in group.unfinished]
                    places += [(key, i) for i in ended]
                    completions += [group.completions[i] for i in ended]
                if places:
                    problems = [current[key].problem for key, _ in places]
                    gradings.append(Grading(places, run.grader.submit(problems, completions)))
        counts += Counts(rounds=1, tokens=tokens)
    return list(current.values()), counts


def _graded(run: RolloutRun, filled: Filled, clock: Clock) -> Filled:
    """Wait for the grader and add the scores."""
    if not filled.ungraded:
        return filled
    groups = with_scores(filled.state.groups, filled.gradings, clock)
    state = _judged(run, filled.state, [group for group in groups if group.key in filled.ungraded])
    return replace(filled, state=replace(state, groups=tuple(groups)), gradings=(), ungraded=())


def _judged(run: RolloutRun, state: RolloutState, groups: Sequence[Group]) -> RolloutState:
    """The state with the pass rates of newly graded groups, in the order of the stream.

    Raises:
        UngradedError: too few of them could be graded.
    """
    baselines = [group.baseline for group in groups if group.baseline is not None]
    scores = [rollout.score for group in groups for rollout in group.rollouts]
    require_graded([*scores, *baselines], run.config.reward.max_ungraded_share, run.grader)
    return state if run.config.data.curriculum is None else state.with_pass_rates(groups)


def _ready_to_train(run: RolloutRun, schedule: Schedule, filled: Filled, clock: Clock) -> Filled:
    """Add the policies' log-probs to the batch, and to its surplus unless the surplus trains asynchronously."""
    batch, surplus = filled.state.groups[: schedule.size], filled.state.groups[schedule.size :]
    ready = with_policy_logprobs(run.config, run.workers, batch, clock, run.config.training.mini_batches)
    if surplus and not schedule.asynchronous:
        surplus = tuple(with_policy_logprobs(run.config, run.workers, surplus, clock, 1))
    return replace(filled, state=replace(filled.state, groups=(*ready, *surplus)))
