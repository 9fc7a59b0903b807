"""From problems to scored groups, and from groups to training samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from rlcore.ports import SampledGroup, SampleRequest
from rlcore.types import Problem, Rollout, RolloutGroup, Score, TrainingSample


def sample_requests(problems: Sequence[Problem], group_size: int, *, seed: int, batch: int) -> list[SampleRequest]:
    """One request per problem; its seed depends on (run seed, rollout batch, problem) and nothing else."""
    return [SampleRequest(p, group_size, sampling_seed(seed, batch, p.problem_id)) for p in problems]


def sampling_seed(seed: int, batch: int, problem_id: str) -> int:
    """31 bits. vLLM gives completion i of a request this seed + i, so completions of a group differ."""
    digest = hashlib.sha256(f"{seed}/{batch}/{problem_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def to_sample(problem: Problem, sampled: SampledGroup, index: int) -> TrainingSample:
    """Prompt and completion ``index`` of a group as one sequence; its advantage is not known yet and stands at 0."""
    completion = sampled.completions[index]
    prompt, answer = sampled.prompt_token_ids, completion.token_ids
    mask = np.zeros(len(prompt) + len(answer), np.bool_)
    mask[len(prompt) :] = True
    sampler_logprobs = np.zeros(len(mask), np.float32)
    sampler_logprobs[len(prompt) :] = completion.logprobs
    return TrainingSample(
        token_ids=np.concatenate([prompt, answer]),
        loss_mask=mask,
        sampler_logprobs=sampler_logprobs,
        advantage=0.0,
        images=problem.images,
        policy_version=completion.policy_version,
    )


def to_group(problem: Problem, sampled: SampledGroup, scores: Sequence[Score]) -> RolloutGroup:
    rollouts = tuple(Rollout(c, s) for c, s in zip(sampled.completions, scores, strict=True))
    return RolloutGroup(problem, sampled.prompt_token_ids, rollouts)
