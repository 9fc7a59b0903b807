"""Which problems rest: those that the policy always or never solves teach nothing, for some epochs.

A pass rate is the share of a group's completions that are right, measured whenever a problem is trained on. Everything
here is a pure function of (stream, pass rates, postponed problems): a run that is killed and resumed from these goes on
with the same problems.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, Self

from rlcore.config import CurriculumConfig
from rlcore.data.stream import ProblemStream


class Measured(NamedTuple):
    rate: float  # right completions / completions, 0 to 1
    epoch: int  # whole epochs that had been taken from the stream when it was measured


@dataclass(frozen=True, slots=True)
class PassRates:
    """The latest pass rate of each problem that has one, by its index in the dataset. Immutable."""

    by_index: Mapping[int, Measured] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_index", MappingProxyType(dict(self.by_index)))

    def __reduce__(self) -> tuple[type[PassRates], tuple[dict[int, Measured]]]:
        return PassRates, (dict(self.by_index),)  # a mapping proxy cannot be pickled

    def measured(self, index: int, rate: float, epoch: int) -> PassRates:
        """These pass rates with a newer one of problem ``index``.

        Raises:
            ValueError: the rate is not within 0 and 1.
        """
        return self.updated({index: rate}, epoch)

    def updated(self, rates: Mapping[int, float], epoch: int) -> PassRates:
        """These pass rates with the newer ones of a batch, all measured in ``epoch``.

        Raises:
            ValueError: a rate is not within 0 and 1.
        """
        for index, rate in rates.items():
            if not 0 <= rate <= 1:
                raise ValueError(f"problem {index} has a pass rate of {rate}. Allowed is right / graded, 0 to 1.")
        return PassRates({**self.by_index, **{index: Measured(rate, epoch) for index, rate in rates.items()}})

    def to_json(self) -> str:
        """What a checkpoint keeps; ``from_json`` reads it back, to the last bit."""
        return json.dumps({str(index): list(measured) for index, measured in sorted(self.by_index.items())})

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls({int(index): Measured(float(rate), int(epoch)) for index, (rate, epoch) in json.loads(text).items()})


def rests(rates: PassRates, index: int, epoch: int, config: CurriculumConfig) -> bool:
    """Whether problem ``index`` is left out of ``epoch``.

    It is if its latest pass rate is at or beyond a bound, for ``config.rest_epochs`` epochs after the one it was
    measured in; then it is due to be measured again. A problem never measured never rests.
    """
    found = rates.by_index.get(index)
    if found is None or config.hardest < found.rate < config.easiest:
        return False
    return epoch - found.epoch <= config.rest_epochs


@dataclass(frozen=True, slots=True)
class NextProblems:
    indices: list[int]
    postponed: tuple[int, ...]  # taken from the stream and not among ``indices``; they come first in the next batch


def next_problems(
    stream: ProblemStream,
    n: int,
    rates: PassRates,
    config: CurriculumConfig | None,
    *,
    postponed: Sequence[int] = (),
    avoid: Collection[int] = (),
) -> NextProblems:
    """The next ``n`` problems of the stream that do not rest.

    They are distinct, and none is in ``avoid``, as far as the dataset reaches; a batch of more problems goes through
    the whole dataset before any comes again. A problem that the stream repeats too early (at the border of two epochs)
    is not lost but postponed, so each epoch is trained whole.

    A problem that rests counts as taken, so ``stream.taken`` may grow by more than ``n``. Where a whole epoch in a row
    has nothing for this batch (all rest, or are in it already), nothing rests for the remainder of the batch: it never
    looks at more than n + 2 epochs.

    Args:
        postponed: of the batch before.
        avoid: problems that will be trained together with these.
    """
    chosen: list[int] = []
    waiting = list(postponed)
    busy = set(avoid)
    in_vain = 0
    while len(chosen) < n:
        if len(busy) == stream.num_problems:
            busy.clear()
        epoch = stream.taken // stream.num_problems
        place = next((place for place, index in enumerate(waiting) if index not in busy), None)
        index = stream.take(1)[0] if place is None else waiting.pop(place)
        if index in busy:
            waiting.append(index)
            in_vain += 1
        elif config is not None and in_vain < stream.num_problems and rests(rates, index, epoch, config):
            in_vain += 1
        else:
            chosen.append(index)
            busy.add(index)
            in_vain = 0 if in_vain < stream.num_problems else in_vain
    return NextProblems(chosen, tuple(waiting))
