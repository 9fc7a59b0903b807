"""Groups in flight: what partial rollouts carry from one rollout batch to the next (Kimi k1.5, arXiv:2501.12599).

Everything here is decided by counts of tokens and groups, so neither time nor placement changes what is trained when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlcore.ports import SampledGroup, SampleRequest
from rlcore.rollout.collect import batch_key, sampling_seed, to_group
from rlcore.types import Completion, Ints, Problem, RolloutGroup, Score


@dataclass(frozen=True, slots=True, eq=False)
class GroupInFlight:
    """The completions of one problem, some of them unfinished; or all whole, waiting for a step with room."""

    index: int  # of the problem, in the dataset
    problem: Problem
    batch: int  # optimizer steps before the update that it was first drawn for
    epoch: int  # of the stream, when the problem was drawn
    prompt_token_ids: Ints  # [P]; none before the first round
    completions: tuple[Completion, ...]  # each policy_version is that of its oldest token
    scores: tuple[Score | None, ...]  # None: not ended
    occurrence: int = 0  # how often the problem was among those that the same batch drew before it

    @classmethod
    def new(
        cls,
        index: int,
        problem: Problem,
        size: int,
        *,
        batch: int,
        epoch: int,
        policy_version: int,
        occurrence: int = 0,
    ) -> GroupInFlight:
        """Nothing drawn yet; ``policy_version`` will draw the first tokens."""
        empty = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "", "unfinished", policy_version)
        return cls(index, problem, batch, epoch, np.zeros(0, np.int32), (empty,) * size, (None,) * size, occurrence)

    @property
    def policy_version(self) -> int:
        """Of the oldest token: all completions of a group begin in the same round."""
        return self.completions[0].policy_version

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Which completions have not ended."""
        return tuple(i for i, found in enumerate(self.completions) if found.finish_reason == "unfinished")

    @property
    def begun(self) -> bool:
        return len(self.prompt_token_ids) > 0

    def requests(self, seed: int, max_tokens: int | None) -> list[tuple[tuple[int, ...], SampleRequest]]:
        """What to ask a sampler for in the next round, and which completions each request is for.

        A group begins with one request, as a group that is drawn in one go does, and with its seed. Later each
        unfinished completion has one, whose seed says where it goes on.
        """
        if not self.begun:
            first = sampling_seed(seed, batch_key(str(self.batch), self.occurrence), self.problem.problem_id)
            return [(self.unfinished, SampleRequest(self.problem, len(self.completions), first, max_tokens=max_tokens))]
        return [((which,), self._continuation(which, seed, max_tokens)) for which in self.unfinished]

    def _continuation(self, which: int, seed: int, max_tokens: int | None) -> SampleRequest:
        drawn = self.completions[which].token_ids
        batch = batch_key(str(self.batch), self.occurrence)
        own = sampling_seed(seed, f"{batch}.{which}.{len(drawn)}", self.problem.problem_id)
        return SampleRequest(self.problem, 1, own, max_tokens=max_tokens, drawn=drawn)

    def continued(self, prompt: Ints, pieces: Mapping[int, Completion]) -> GroupInFlight:
        """With what a round drew of some completions."""
        completions = tuple(
            joined(before, pieces[which]) if which in pieces else before
            for which, before in enumerate(self.completions)
        )
        return replace(self, prompt_token_ids=prompt, completions=completions)

    def scored(self, scores: Mapping[int, Score]) -> GroupInFlight:
        return replace(self, scores=tuple(scores.get(which, before) for which, before in enumerate(self.scores)))

    def to_group(self) -> RolloutGroup:
        """Of a group that is whole."""
        scores = [score for score in self.scores if score is not None]
        return to_group(self.problem, SampledGroup(self.prompt_token_ids, self.completions), scores)


def joined(before: Completion, piece: Completion) -> Completion:
    """A completion with the piece behind it: each token keeps the log-prob of the policy that drew it."""
    return Completion(
        token_ids=np.concatenate([before.token_ids, piece.token_ids]),
        logprobs=np.concatenate([before.logprobs, piece.logprobs]),
        text=piece.text,
        finish_reason=piece.finish_reason,
        policy_version=before.policy_version,
    )


def due(ages: Sequence[int], size: int, max_staleness: int) -> int:
    """How many of the first groups the coming batch has to train, lest one of them is too old when its turn comes.

    A batch trains ``size`` groups. The group at place i, from 1, has ``max_staleness - age`` batches after this one, in
    which at most ``size`` groups each are trained; what of the first i does not fit into these is due now. While that
    is at most ``size``, it stays so: at least the due ones leave from before every place behind them, so a place falls
    by as much as its room does, and new groups stand at most at place ``in_flight``, which the config bounds.

    Args:
        ages: batches from each group's oldest token to the coming update, in the order of the stream: never rising.
    """
    return max([0, *(place - size * (max_staleness - age) for place, age in enumerate(ages, 1))])


def chosen(groups: Sequence[GroupInFlight], first: int, size: int) -> list[int]:
    """The places of the groups that the batch trains: the ``first``, which are whole, then the oldest whole ones."""
    whole = [place for place, group in enumerate(groups) if place >= first and not group.unfinished]
    return [*range(first), *whole][:size]
