"""A group is the completions of one problem. Its state goes from new to ready to train on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

import numpy as np

from rlcore.types import Completion, Ints, Problem, Rollout, SampledGroup, SampleRequest, Score, TrainingSample, Turn

State = Literal["new", "sampling", "graded", "ready"]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The G completions of one problem, all begun by the same policy."""

    index: int  # of the problem, in the dataset
    problem: Problem
    seed_key: str  # names its rollout batch; sampling seeds derive from it and the problem
    epoch: int  # of the stream, when the problem was taken from it
    prompt_token_ids: Ints  # [P], every image expanded to its image-token count; empty while the group is new
    completions: tuple[Completion, ...]
    scores: tuple[Score | None, ...]  # None: not graded yet
    baseline: Score | None = None  # of the greedy completion, if the estimator needs one
    samples: tuple[TrainingSample, ...] = ()  # one per completion, once the group is admitted to training
    surplus: bool = False  # admitted after its own batch was full

    @classmethod
    def new(cls, index: int, problem: Problem, size: int, *, seed_key: str, epoch: int, policy_version: int) -> Group:
        """A group without tokens; ``policy_version`` will sample the first ones."""
        nothing = np.zeros(0, np.int32)
        empty = Completion.one_turn(nothing, np.zeros(0, np.float32), "", "unfinished", policy_version)
        return cls(index, problem, seed_key, epoch, nothing, (empty,) * size, (None,) * size)

    @property
    def state(self) -> State:
        if self.samples:
            return "ready"
        if not self.unfinished:
            return "graded"
        return "sampling" if len(self.prompt_token_ids) else "new"

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the group within a run."""
        return self.seed_key, self.index

    @property
    def policy_version(self) -> int:
        """Version of the policy that sampled the oldest token."""
        return self.completions[0].policy_version

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Indices of the completions that have not ended."""
        return tuple(i for i, completion in enumerate(self.completions) if completion.finish_reason == "unfinished")

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """The graded completions."""
        return tuple(Rollout(c, s) for c, s in zip(self.completions, self.scores, strict=True) if s is not None)

    def requests(self, seed: int, max_tokens: int | None) -> list[tuple[tuple[int, ...], SampleRequest]]:
        """The next requests to the sampler, each with the indices of its completions.

        A new group is one request. Later each unfinished completion is a separate request, with a seed that depends on
        the tokens sampled so far.
        """
        if self.state == "new":
            first = sampling_seed(seed, self.seed_key, self.problem.problem_id)
            return [(self.unfinished, SampleRequest(self.problem, len(self.completions), first, max_tokens=max_tokens))]
        return [((which,), self._continuation(which, seed, max_tokens)) for which in self.unfinished]

    def _continuation(self, which: int, seed: int, max_tokens: int | None) -> SampleRequest:
        so_far = self.completions[which].token_ids
        own = sampling_seed(seed, f"{self.seed_key}.{which}.{len(so_far)}", self.problem.problem_id)
        return SampleRequest(self.problem, 1, own, max_tokens=max_tokens, so_far=so_far)

    def continued(self, answer: SampledGroup, which: Sequence[int]) -> Group:
        """The group with the tokens that the sampler added to the completions ``which``."""
        pieces = dict(zip(which, answer.completions, strict=True))
        completions = tuple(joined(c, pieces[i]) if i in pieces else c for i, c in enumerate(self.completions))
        return replace(self, prompt_token_ids=answer.prompt_token_ids, completions=completions)

    def scored(self, scores: Mapping[int | None, Score]) -> Group:
        """The group with the scores of some completions. The key None is the baseline."""
        return replace(
            self,
            scores=tuple(scores.get(i, before) for i, before in enumerate(self.scores)),
            baseline=scores.get(None, self.baseline),
        )

    def admitted(self, *, mask_truncated: bool) -> Group:
        """The group with its training samples, which have no log-probs of a policy yet.

        Args:
            mask_truncated: train no token of a completion that was cut at its token budget.
        """
        prompt = self.prompt_token_ids
        completions = with_routes_of_first(self.completions, len(prompt))
        samples = [to_sample(self.problem, prompt, c, mask_truncated=mask_truncated) for c in completions]
        return replace(self, samples=tuple(samples))


def new_groups(
    problems: Iterable[tuple[int, Problem]],
    size: int,
    *,
    batch: str,
    epoch: int,
    policy_version: int,
    taken: Iterable[tuple[str, int]] = (),
) -> list[Group]:
    """One new group of ``size`` completions per (index, problem).

    Args:
        batch: names the rollout batch and the attempt to fill it.
        taken: keys of other groups. A problem that occurs twice in a batch gets another seed key, because its
            completions would otherwise be the same.
    """
    keys, groups = set(taken), []
    for index, problem in problems:
        key = next(key for key in _seed_keys(batch) if (key, index) not in keys)
        keys.add((key, index))
        groups.append(Group.new(index, problem, size, seed_key=key, epoch=epoch, policy_version=policy_version))
    return groups


def _seed_keys(batch: str) -> Iterator[str]:
    """Seed keys for the first group of a problem in a batch, the second, and so on."""
    yield batch
    yield from (f"{batch}#{occurrence}" for occurrence in count(1))


def sampling_seed(seed: int, key: str, problem_id: str) -> int:
    """A seed of 31 bits. vLLM samples completion i of a request with seed + i, so that completions differ."""
    digest = hashlib.sha256(f"{seed}/{key}/{problem_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def joined(before: Completion, piece: Completion) -> Completion:
    """Append tokens of the policy to a completion. Each token keeps the log-prob that it was sampled with. Routes are
    those of the last policy, which has computed the earlier tokens again."""
    *turns, last = before.turns
    (more,) = piece.turns
    if last.given:
        turns, extended = [*turns, last], more
    elif len(last.token_ids):
        tokens = np.concatenate([last.token_ids, more.token_ids])
        extended = Turn(tokens, np.concatenate([last.logprobs, more.logprobs]))
    else:
        extended = more
    return Completion((*turns, extended), piece.text, piece.finish_reason, before.policy_version, piece.routes)


def with_routes_of_first(completions: Sequence[Completion], prompt: int) -> list[Completion]:
    """Completions whose prompt of ``prompt`` tokens has the experts of the first one, so that they can share it.

    The sampler computes the end of the prompt for each completion, and all of it again to continue one.
    """
    first = completions[0].routes
    if first is None:
        return list(completions)
    return [
        c
        if c.routes is None or np.array_equal(c.routes[:prompt], first[:prompt])  # then no copy
        else replace(c, routes=np.concatenate([first[:prompt], c.routes[prompt:]]))
        for c in completions
    ]


def in_order(ended: Iterable[Mapping[int, SampledGroup]]) -> list[SampledGroup]:
    """All groups that a sampler yields, in the order of the requests."""
    groups = {index: group for some in ended for index, group in some.items()}
    return [groups[index] for index in sorted(groups)]


def to_sample(
    problem: Problem, prompt: Ints, completion: Completion, *, mask_truncated: bool = False
) -> TrainingSample:
    """Prompt and completion as one sequence, without advantages. Arguments as ``Group.admitted``."""
    truncated = mask_truncated and completion.finish_reason == "length"
    before = np.zeros(len(prompt), np.bool_)
    return TrainingSample(
        token_ids=np.concatenate([prompt, completion.token_ids]),
        loss_mask=np.concatenate([before, completion.by_policy & np.bool_(not truncated)]),
        sampler_logprobs=np.concatenate([before, completion.logprobs], dtype=np.float32),
        images=problem.images,
        policy_version=completion.policy_version,
        routes=completion.routes,
    )
