"""One rollout batch of partial rollouts: rounds of so many tokens, until the step is full of whole groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlcore.config import PartialRolloutConfig
from rlcore.rollout.collect import occurrences, to_sample
from rlcore.rollout.in_flight import GroupInFlight, chosen, due
from rlcore.training.advantages import ScoredGroup
from rlcore.training.clock import Clock
from rlcore.training.drawing import draw_problems, require_graded, with_pass_rates
from rlcore.training.run import Drawn
from rlcore.training.state import TrainState
from rlcore.types import Score

if TYPE_CHECKING:
    from rlcore.training.run import TrainingRun


@dataclass(frozen=True, slots=True, eq=False)
class _Grading:
    """Completions that ended together, and their scores; these may still be on their way."""

    places: list[tuple[int, int]]  # group and completion
    scores: Future[list[Score]]


def partial_batch(
    run: TrainingRun, state: TrainState, step: int, partial: PartialRolloutConfig, clock: Clock
) -> tuple[list[ScoredGroup], TrainState, Drawn]:
    """The groups of the update behind ``step`` steps, drawn to their ends by the policy of ``state.step``, and the
    state with what stays in flight.

    Groups in flight are topped up from the stream. A round continues every unfinished completion; one of a group that
    is due now (``in_flight.due``) to its end, others by ``tokens_per_round``. Rounds go on until a step's groups are
    whole, and the oldest of these are trained.

    Raises:
        UngradedError: more of the groups to train than the config allows could not be graded.
    """
    training, size = run.config.training, run.config.training.problems_per_step
    seed = run.adjustments.seed(step + 1, run.config.seed)
    carried = [group for group in state.in_flight if _age(run, group, step) <= training.max_staleness]
    drawn = Drawn(
        continued=sum(len(group.unfinished) for group in carried), dropped_stale=len(state.in_flight) - len(carried)
    )
    groups, state = _topped_up(run, state, carried, partial.groups(size), step)
    first = min(size, due([_age(run, group, step) for group in groups], size, training.max_staleness))
    budgets = [None if place < first else partial.tokens_per_round for place in range(len(groups))]
    gradings: list[_Grading] = []
    while drawn.rounds == 0 or sum(not group.unfinished for group in groups) < size:
        groups, tokens = _round(run, groups, budgets, seed, gradings, clock)
        drawn += Drawn(rounds=1, tokens=tokens)
    groups = _scored(groups, gradings, clock)
    places = set(chosen(groups, first, size))
    trained = [group for place, group in enumerate(groups) if place in places]
    scored = [_to_scored(group, mask_truncated=run.config.algorithm.mask_truncated) for group in trained]
    scores = [rollout.score for found in scored for rollout in found.group.rollouts]
    require_graded(scores, run.config.reward.max_ungraded_share, run.grader)
    measured = [(group.index, group.epoch, found.group) for group, found in zip(trained, scored, strict=True)]
    state = with_pass_rates(state, run.config.data, measured)
    waiting = tuple(group for place, group in enumerate(groups) if place not in places)
    return scored, replace(state, in_flight=waiting), drawn


def _age(run: TrainingRun, group: GroupInFlight, step: int) -> int:
    """Rollout batches from its oldest token to the update behind ``step`` steps."""
    return -(-(step - group.policy_version) // run.config.training.steps_per_batch)


def _topped_up(
    run: TrainingRun, state: TrainState, carried: Sequence[GroupInFlight], wanted: int, step: int
) -> tuple[list[GroupInFlight], TrainState]:
    epoch = state.problems_seen // len(run.problems)
    version, size = state.step, run.config.rollout.group_size
    missing, in_flight = max(0, wanted - len(carried)), [group.index for group in carried]
    indices, state = draw_problems(run.config.data, len(run.problems), state, missing, avoid=in_flight)
    problems = [run.problems[index] for index in indices]
    repeated = occurrences(problem.problem_id for problem in problems)
    new = [
        GroupInFlight.new(index, problem, size, batch=step, epoch=epoch, policy_version=version, occurrence=before)
        for index, problem, before in zip(indices, problems, repeated, strict=True)
    ]
    return [*carried, *new], state


def _round(
    run: TrainingRun,
    groups: Sequence[GroupInFlight],
    budgets: Sequence[int | None],
    seed: int,
    gradings: list[_Grading],
    clock: Clock,
) -> tuple[list[GroupInFlight], int]:
    """Every unfinished group with what the sampler drew next, and how many tokens that were; what has ended is graded
    while the rest is sampled."""
    asked = [
        (place, which, request)
        for place, (group, budget) in enumerate(zip(groups, budgets, strict=True))
        for which, request in group.requests(seed, budget)
    ]
    groups, tokens = list(groups), 0
    with clock("generate"):
        for answers in run.workers.generate([request for _, _, request in asked]):
            ended = []
            for number, answer in answers.items():
                place, which, _ = asked[number]
                pieces = dict(zip(which, answer.completions, strict=True))
                group = groups[place] = groups[place].continued(answer.prompt_token_ids, pieces)
                tokens += sum(len(piece.token_ids) for piece in pieces.values())
                ended += [(place, i) for i in which if i not in group.unfinished]
            if ended:
                problems = [groups[place].problem for place, _ in ended]
                completions = [groups[place].completions[i] for place, i in ended]
                gradings.append(_Grading(ended, run.grader.submit(problems, completions)))
    return groups, tokens


def _scored(groups: Sequence[GroupInFlight], gradings: Sequence[_Grading], clock: Clock) -> list[GroupInFlight]:
    with clock("reward"):  # what grading takes beyond what it ran beside
        found = [(grading.places, grading.scores.result()) for grading in gradings]
    by_group: defaultdict[int, dict[int, Score]] = defaultdict(dict)
    for places, scores in found:
        for (place, which), score in zip(places, scores, strict=True):
            by_group[place][which] = score
    return [group.scored(by_group[place]) for place, group in enumerate(groups)]


def _to_scored(group: GroupInFlight, *, mask_truncated: bool) -> ScoredGroup:
    prompt = group.prompt_token_ids
    samples = [to_sample(group.problem, prompt, c, mask_truncated=mask_truncated) for c in group.completions]
    return ScoredGroup(group.to_group(), tuple(samples), baseline=None)
