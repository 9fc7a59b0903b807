"""Of an engine of several ranks it is proved that each holds what it took, and that together they took everything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from rlcore.errors import SamplerError
from rlcore.sampler.weights import Parts, Places, checksum, replay_load, watched_load, watched_reload

Weights = list[tuple[str, Tensor]]


class Part(nn.Module):
    """A rank of two: rows of one matrix, columns of another, a key-value head that both hold, a norm; the head tied."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self.up = nn.Parameter(torch.zeros(4, 6))
        self.down = nn.Parameter(torch.zeros(6, 3))
        self.key = nn.Parameter(torch.zeros(2, 6))
        self.norm = nn.Parameter(torch.zeros(6))
        self.embedding = nn.Parameter(torch.zeros(8, 6))  # padded

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, value in weights:
            if name == "up":
                self.up.data.copy_(value.narrow(0, 4 * self._rank, 4))
            elif name == "down":
                self.down.data.copy_(value.narrow(1, 3 * self._rank, 3))
            elif name in ("key", "norm"):
                getattr(self, name).data.copy_(value)
            elif name == "embedding":
                mine = value[8 * self._rank : 8 * self._rank + 8]
                self.embedding.data[: len(mine)].copy_(mine)

    def held(self) -> int:
        return checksum([*self.parameters(), self.embedding])  # the head is the embedding


def tensors(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"up": (8, 6), "down": (6, 6), "key": (2, 6), "norm": (6,), "embedding": (13, 6)}
    found = [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
    return [*found, ("head", found[-1][1].clone())]


def loaded(weights: Sequence[Weights]) -> list[tuple[Part, Parts]]:
    """Each rank loads its weights; what they say of it reaches the other."""
    said: list[Places] = []
    ranks = [(Part(rank), Parts(lambda own: said)) for rank in range(2)]
    for (model, parts), came in zip(ranks, weights, strict=True):
        watched_load(model, iter(came), parts.took)
        said.append(parts.places)
    return ranks


def test_each_rank_has_the_checksum_of_what_it_copied():
    for model, parts in loaded([tensors(0), tensors(0)]):
        assert parts.due(verify=True) == model.held() != checksum(value for _, value in tensors(0))
        model.key.data[1, 2] += 1
        assert parts.due(verify=False) != model.held()


def test_a_repeated_load_has_the_checksum_of_its_own_values():
    model, parts = Part(1), Parts(lambda own: [own])
    copies = watched_load(model, iter(tensors(0)))
    parts.begin()
    replay_load(copies, iter(tensors(1)), 100, parts.took)
    assert checksum([model.up, model.down, model.key, model.norm, model.embedding]) == parts.due(verify=False)


def test_a_load_that_copies_at_its_end_is_recorded_too():
    model = Part(0)
    found: dict[str, int] = {}
    buffer = torch.cat([value.flatten() for _, value in tensors(0)])  # as they come out of one packed message
    sizes = [value.numel() for _, value in tensors(0)]
    views = [
        (name, part.view(value.shape)) for (name, value), part in zip(tensors(0), buffer.split(sizes), strict=True)
    ]

    def reload(weights: Iterator[tuple[str, Tensor]]) -> None:
        kept = list(weights)
        meta = Part(0).to("meta")  # vLLM counts first
        meta.load_weights(kept)
        model.load_weights(kept)
        model.norm.data.copy_(kept[3][1])  # as a bias, which is there already when vLLM counts

    watched_reload(reload, iter(views), lambda name, source, copies: found.update({name: len(copies)}))
    assert found == {"up": 1, "down": 1, "key": 1, "norm": 1, "embedding": 1, "head": 0}


def test_elements_that_no_rank_copied_are_named():
    without = [(name, value) for name, value in tensors(0) if name != "up"]
    for _, parts in loaded([tensors(0), without]):
        with pytest.raises(SamplerError, match="24 of the 48 elements of up were taken by no rank"):
            parts.due(verify=True)
    for _, parts in loaded([tensors(0), [*without, ("up", torch.zeros(10, 6))]]):
        with pytest.raises(SamplerError, match=r"the ranks saw up in the shapes \[\(8, 6\), \(10, 6\)\]"):
            parts.due(verify=True)


def test_a_tensor_that_no_rank_copies_must_be_tied():
    changed = [(name, value + 1 if name == "head" else value) for name, value in tensors(0)]
    for _, parts in loaded([changed, changed]):
        with pytest.raises(SamplerError, match="78 of the 78 elements of head were taken by no rank"):
            parts.due(verify=True)
    for model, parts in loaded([tensors(0), tensors(0)]):
        parts.due(verify=True)
        parts.begin()
        watched_load(model, iter(changed), parts.took)
        with pytest.raises(SamplerError, match="ties head to embedding, and the trainer's two tensors differ"):
            parts.due(verify=False)
