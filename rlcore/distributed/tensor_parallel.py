"""Several ranks that hold one engine: all run it on the same requests, and must sample the same tokens.

The first rank returns the completions, the others a fingerprint of theirs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlcore.errors import SamplerError
from rlcore.types import SampledGroup, SampleRequest

Answer = SampledGroup | int  # the group from an engine's first rank; its ``fingerprint`` from the others


def fingerprint(group: SampledGroup) -> int:
    """A 32-bit checksum of the prompt and all sampled tokens, in order."""
    crc = zlib.crc32(np.asarray(group.prompt_token_ids, np.int64).tobytes())
    for completion in group.completions:
        ids = np.asarray(completion.token_ids, np.int64)
        crc = zlib.crc32(np.concatenate([[len(ids)], ids]).tobytes(), crc)
    return crc


def answers(ended: Iterator[dict[int, SampledGroup]], rank: int, tensor_parallel: int) -> Iterator[dict[int, Answer]]:
    """The groups of this rank's engine, as the rank returns them."""
    for groups in ended:
        yield {index: group if rank % tensor_parallel == 0 else fingerprint(group) for index, group in groups.items()}


def verify_answers(
    answers_of_ranks: Iterator[tuple[int, Mapping[int, Answer]]],
    requests: Sequence[SampleRequest],
    ranks: int,
    tensor_parallel: int,
) -> Iterator[dict[int, SampledGroup]]:
    """Groups by the index of their request. Yields a group when all ranks of its engine have returned it and agree.

    Args:
        answers_of_ranks: a rank, and its answers by their index in its requests. Engine e of E has requests e, e + E,
            ...

    Raises:
        SamplerError: two ranks of an engine sampled different tokens, or one returned nothing.
    """
    engines = ranks // tensor_parallel
    waiting: dict[int, dict[int, Answer]] = {}
    for rank, own in answers_of_ranks:
        complete = {}
        for place, answer in own.items():
            index = rank // tensor_parallel + engines * place
            by_rank = waiting.setdefault(index, {})
            by_rank[rank] = answer
            if len(by_rank) == tensor_parallel:
                complete[index] = _same(waiting.pop(index), requests[index])
        if complete:
            yield complete
    for index, by_rank in waiting.items():
        raise SamplerError(
            f"problem {requests[index].problem.problem_id}: of the {tensor_parallel} ranks that hold its engine only "
            f"{sorted(by_rank)} answered. Compare the devices and software of the ranks, or set "
            "rollout.tensor_parallel to 1."
        )


def _same(by_rank: Mapping[int, Answer], request: SampleRequest) -> SampledGroup:
    first = min(by_rank)
    group = by_rank[first]
    assert isinstance(group, SampledGroup)  # ``answers`` of the first rank
    for rank, other in by_rank.items():
        if rank != first and other != fingerprint(group):
            raise SamplerError(
                f"problem {request.problem.problem_id}: rank {first} sampled tokens of crc {fingerprint(group):08x}, "
                f"rank {rank} of the same engine of crc {other:08x}. Ranks of one engine must take the same decisions: "
                "give them the same kind of device and the same software, or set rollout.tensor_parallel to 1."
            )
    return group
