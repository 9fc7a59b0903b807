"""The order of problems of several sources: which source each place of a batch belongs to, and the place of each source
in its own endless stream.

Everything here is a pure function of (position, weights, pass rates, postponed problems), and with fixed weights the
sources of all places are a function of the weights alone. So a resumed run continues with the same problems.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rlcore.config import CurriculumConfig
from rlcore.data.stream import PassRates, ProblemStream, next_problems
from rlcore.errors import CheckpointError
from rlcore.types import Problem


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """How far a run has come in one source."""

    size: int  # problems of the source
    taken: int = 0  # from its stream, over all epochs; problems that rest or are postponed count
    places: int = 0  # of batches, filled from it since the weights are what they are

    @property
    def epoch(self) -> int:
        return self.taken // self.size


@dataclass(frozen=True, slots=True)
class MixturePosition:
    """How far a run has come in each source, by name, and the weights that led there."""

    weights: Mapping[str, float]
    sources: Mapping[str, SourcePosition]

    @classmethod
    def start(cls, weights: Mapping[str, float], sizes: Mapping[str, int]) -> MixturePosition:
        return cls(dict(weights), {name: SourcePosition(size) for name, size in sorted(sizes.items())})

    @property
    def taken(self) -> int:
        return sum(source.taken for source in self.sources.values())

    def with_weights(self, weights: Mapping[str, float]) -> MixturePosition:
        """The same position in each source. New weights hold from here on: no source catches up."""
        if weights == self.weights:
            return self
        return MixturePosition(dict(weights), {k: replace(source, places=0) for k, source in self.sources.items()})

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint; ``restored`` reads it."""
        return {
            name: {"weight": self.weights[name], "size": at.size, "taken": at.taken, "places": at.places}
            for name, at in self.sources.items()
        }


def restored(stored: Mapping[str, Any] | None, problems: Sequence[Problem], *, seen: int) -> MixturePosition | None:
    """The position that ``to_json`` stored. None: the run has a single source, or has taken no problem.

    Args:
        problems: of the run's dataset.
        seen: problems that the run has taken.

    Raises:
        CheckpointError: the dataset has other sources than the run had.
    """
    sizes = source_sizes(problems)
    if seen == 0:
        return None
    was = {name: int(at["size"]) for name, at in (stored or {}).items()}
    if was != sizes:
        raise CheckpointError(
            f"the checkpoint was trained on {_told(was)}, and the dataset has {_told(sizes)}. A run can be continued "
            "or forked with other weights, not with other sources. Keep the names and the data of data.mixture, or "
            "start a new run from the merged model of this one (model.path)."
        )
    if not stored:
        return None
    return MixturePosition(
        {name: float(at["weight"]) for name, at in stored.items()},
        {name: SourcePosition(int(at["size"]), int(at["taken"]), int(at["places"])) for name, at in stored.items()},
    )


def source_sizes(problems: Sequence[Problem]) -> dict[str, int]:
    """Problems of each source of a mixture, by name; empty for a single source."""
    counts = Counter(problem.source_name for problem in problems)
    return {name: counts[name] for name in sorted(counts) if name}


def _told(sizes: Mapping[str, int]) -> str:
    if not sizes:
        return "a single source (data.train)"
    return "the mixture " + ", ".join(f"{name} ({size} problems)" for name, size in sorted(sizes.items()))


def next_sources(weights: Mapping[str, float], places: Mapping[str, int], n: int) -> list[str]:
    """The sources of the next ``n`` places, after ``places`` of each.

    After every place, whatever the batches, the number of places of each of k sources differs from its share by at most
    1 - 1 / (2k - 2): the algorithm of R. Tijdeman, The chairman assignment problem (1980). A source may get the next
    place once it is owed enough; of these the one comes first that would be the soonest to be owed too much.

    Args:
        places: so far, with these weights from the first one on.
    """
    names = sorted(weights)
    if len(names) == 1:
        return names * n
    exact = {name: Fraction(str(weights[name])) for name in names}
    share = {name: exact[name] / sum(exact.values()) for name in names}
    least = Fraction(1, 2 * len(names) - 2)
    had, chosen = dict(places), list[str]()
    for place in range(sum(had.values()) + 1, sum(had.values()) + n + 1):
        owed = {name: share[name] * place - had[name] for name in names}
        due = [name for name in names if owed[name] >= least]
        chosen.append(min(due, key=lambda name: ((1 - least - owed[name]) / share[name], name)))
        had[chosen[-1]] += 1
    return chosen


@dataclass(frozen=True, slots=True)
class NextOfMixture:
    problems: list[tuple[int, int]]  # index in the dataset, and its source's epoch
    position: MixturePosition
    postponed: tuple[int, ...]  # of all sources


def next_of_mixture(
    problems: Sequence[Problem],
    position: MixturePosition,
    n: int,
    rates: PassRates,
    config: CurriculumConfig | None,
    *,
    seed: int,
    postponed: Sequence[int] = (),
    avoid: Collection[int] = (),
) -> NextOfMixture:
    """The next ``n`` problems. Each source gives its own by the rules of ``next_problems``: complete epochs, no early
    repeats, and a problem that rests or is postponed is replaced by the next one of the same source.

    Args:
        problems: of the whole dataset.
        postponed, avoid: as ``next_problems``, of any source.
    """
    places = {name: source.places for name, source in position.sources.items()}
    order = next_sources(position.weights, places, n)
    indices: dict[str, list[int]] = {name: [] for name in position.sources}
    for index, problem in enumerate(problems):
        indices[problem.source_name].append(index)
    chosen: dict[str, list[tuple[int, int]]] = {}
    sources: dict[str, SourcePosition] = {}
    waiting: list[int] = []
    for name, source in position.sources.items():
        stream = ProblemStream(source.size, seed_of(seed, name), taken=source.taken, indices=indices[name])
        own = next_problems(
            stream,
            order.count(name),
            rates,
            config,
            postponed=[index for index in postponed if problems[index].source_name == name],
            avoid={index for index in avoid if problems[index].source_name == name},
        )
        chosen[name] = [(index, source.epoch) for index in own.indices]
        sources[name] = replace(source, taken=stream.taken, places=source.places + len(own.indices))
        waiting += own.postponed
    following = {name: iter(own) for name, own in chosen.items()}
    return NextOfMixture(
        [next(following[name]) for name in order], MixturePosition(position.weights, sources), tuple(waiting)
    )


def seed_of(seed: int, name: str) -> int:
    """The seed of a source's epochs, so that sources of one size have different orders."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big")
