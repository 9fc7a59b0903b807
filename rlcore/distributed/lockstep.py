"""Ranks that hold one engine together: all of them run it on the same requests, the first one answers, and the others
say what they drew, so that it is known that they kept step."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rlcore.errors import SamplerError
from rlcore.ports import SampledGroup, SampleRequest

Answer = SampledGroup | int  # of the first rank of an engine; ``drawn`` of the others


def drawn(group: SampledGroup) -> int:
    """A number for the prompt and all sampled tokens, in their order. 32 bits."""
    found = zlib.crc32(np.asarray(group.prompt_token_ids, np.int64).tobytes())
    for completion in group.completions:
        ids = np.asarray(completion.token_ids, np.int64)
        found = zlib.crc32(np.concatenate([[len(ids)], ids]).tobytes(), found)
    return found


def answers(ended: Iterator[dict[int, SampledGroup]], rank: int, tensor_parallel: int) -> Iterator[dict[int, Answer]]:
    """What this rank says of what its engine yields."""
    for groups in ended:
        yield {index: group if rank % tensor_parallel == 0 else drawn(group) for index, group in groups.items()}


def agreed(
    said: Iterator[tuple[int, Mapping[int, Answer]]],
    requests: Sequence[SampleRequest],
    ranks: int,
    tensor_parallel: int,
) -> Iterator[dict[int, SampledGroup]]:
    """Groups by the place of their request, each when all ranks of its engine have drawn the same.

    Args:
        said: rank, and by place in its own requests what it says. Engine e has requests e, e + E, ... of E engines.

    Raises:
        SamplerError: two ranks of an engine drew other tokens, or one drew nothing.
    """
    engines = ranks // tensor_parallel
    waiting: dict[int, dict[int, Answer]] = {}
    for rank, some in said:
        whole = {}
        for place, answer in some.items():
            index = rank // tensor_parallel + engines * place
            heard = waiting.setdefault(index, {})
            heard[rank] = answer
            if len(heard) == tensor_parallel:
                whole[index] = _same(waiting.pop(index), requests[index])
        if whole:
            yield whole
    for index, heard in waiting.items():
        raise SamplerError(
            f"problem {requests[index].problem.problem_id}: of the {tensor_parallel} ranks that hold its engine only "
            f"{sorted(heard)} answered. Set rollout.tensor_parallel to 1, or look for what differs between the ranks."
        )


def _same(heard: Mapping[int, Answer], request: SampleRequest) -> SampledGroup:
    first = min(heard)
    group = heard[first]
    assert isinstance(group, SampledGroup)  # what ``answers`` makes of the first rank
    for rank, other in heard.items():
        if rank != first and other != drawn(group):
            raise SamplerError(
                f"problem {request.problem.problem_id}: rank {first} drew tokens of crc {drawn(group):08x}, rank "
                f"{rank} of the same engine of crc {other:08x}. Ranks of one engine have to take the same decisions: "
                "give them the same kind of device and the same software, or set rollout.tensor_parallel to 1."
            )
    return group
