"""From problems to scored groups, and from groups to training samples."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rlcore.ports import SampledGroup, SampleRequest
from rlcore.types import Completion, Ints, Problem, Rollout, RolloutGroup, Score, TrainingSample


def sample_requests(problems: Sequence[Problem], group_size: int, *, seed: int, batch: str) -> list[SampleRequest]:
    """One request per problem; its seed depends on (run seed, rollout batch, problem, how often the problem was among
    those before it) and nothing else."""
    return [
        SampleRequest(p, group_size, sampling_seed(seed, batch_key(batch, occurrence), p.problem_id))
        for p, occurrence in zip(problems, occurrences(p.problem_id for p in problems), strict=True)
    ]


def occurrences(ids: Iterable[str]) -> list[int]:
    """How often each id was among those before it."""
    seen: Counter[str] = Counter()
    found = []
    for id_ in ids:
        found.append(seen[id_])
        seen[id_] += 1
    return found


def batch_key(batch: str, occurrence: int) -> str:
    """A problem that is in a batch again is sampled with another seed, or its completions would be the same."""
    return f"{batch}#{occurrence}" if occurrence else batch


def sampling_seed(seed: int, batch: str, problem_id: str) -> int:
    """31 bits. vLLM gives completion i of a request this seed + i, so completions of a group differ."""
    digest = hashlib.sha256(f"{seed}/{batch}/{problem_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def in_order(ended: Iterable[Mapping[int, SampledGroup]]) -> list[SampledGroup]:
    """Everything that a sampler yields, in the order of the requests."""
    groups = {index: group for some in ended for index, group in some.items()}
    return [groups[index] for index in sorted(groups)]


def to_sample(
    problem: Problem, prompt: Ints, completion: Completion, *, mask_truncated: bool = False
) -> TrainingSample:
    """Prompt and completion as one sequence; its advantages are not known yet.

    Args:
        mask_truncated: train no token of a completion that was cut at its budget.
    """
    answer = completion.token_ids
    is_answer = np.arange(len(prompt) + len(answer)) >= len(prompt)
    sampler_logprobs = np.zeros(len(is_answer), np.float32)
    sampler_logprobs[is_answer] = completion.logprobs
    truncated = mask_truncated and completion.finish_reason == "length"
    return TrainingSample(
        token_ids=np.concatenate([prompt, answer]),
        loss_mask=is_answer & np.bool_(not truncated),
        sampler_logprobs=sampler_logprobs,
        images=problem.images,
        policy_version=completion.policy_version,
    )


def to_group(problem: Problem, sampled: SampledGroup, scores: Sequence[Score]) -> RolloutGroup:
    rollouts = tuple(Rollout(c, s) for c, s in zip(sampled.completions, scores, strict=True))
    return RolloutGroup(problem, sampled.prompt_token_ids, rollouts)
