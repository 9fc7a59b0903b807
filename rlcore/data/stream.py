"""The order in which problems are trained on: a seeded, endless stream, and a curriculum that skips problems.

Everything here is a pure function of (position in the stream, pass rates, postponed problems). A run that is resumed
from these continues with the same problems.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from rlcore.config import CurriculumConfig


class ProblemStream:
    """An endless sequence of problem indices: epochs, each a permutation seeded by (seed, epoch).

    The sequence depends only on ``num_problems`` and ``seed``, not on batch sizes. Any num_problems // 3 indices in a
    row are distinct, also across an epoch border.

    Args:
        taken: indices that an earlier process has taken.
        indices: of the problems in the dataset. None: 0 to num_problems - 1.

    Raises:
        ValueError: num_problems below 1.
    """

    def __init__(self, num_problems: int, seed: int, taken: int = 0, indices: Sequence[int] | None = None) -> None:
        if num_problems < 1:
            raise ValueError(f"num_problems is {num_problems}: there is nothing to train on. Prepare a dataset first.")
        self.num_problems = num_problems
        self.taken = taken  # indices taken so far, over all epochs
        self._seed = seed
        self._indices = indices
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def take(self, n: int) -> list[int]:
        """The next ``n`` problem indices."""
        end = self.taken + n
        indices: list[int] = []
        while self.taken < end:
            epoch, start = divmod(self.taken, self.num_problems)
            part = self._order(epoch)[start : start + end - self.taken]
            indices += part.tolist() if self._indices is None else [self._indices[place] for place in part]
            self.taken += len(part)
        return indices

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.Generator(np.random.PCG64([self._seed % 2**64, epoch])).permutation(self.num_problems)

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The epoch's permutation, with the problems of the last third of the previous epoch moved out of the first
        third.

        Only the first two thirds are rearranged. So the last third of any epoch is that of its permutation, and no
        epoch depends on more than the one before. Of the first 2k places at most k hold such a problem.
        """
        order, k = self._permutation(epoch), self.num_problems // 3
        if epoch == 0 or k == 0:
            return order
        recent = np.isin(order[: 2 * k], self._permutation(epoch - 1)[-k:])
        return np.concatenate([order[: 2 * k][~recent], order[: 2 * k][recent], order[2 * k :]])


class Measured(NamedTuple):
    rate: float  # right completions / graded completions, 0 to 1
    epoch: int  # whole epochs taken from the stream when it was measured


@dataclass(frozen=True, slots=True)
class PassRates:
    """The latest pass rate of each problem that was trained on, by its index in the dataset. Immutable."""

    by_index: Mapping[int, Measured] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_index", MappingProxyType(dict(self.by_index)))

    def __reduce__(self) -> tuple[type[PassRates], tuple[dict[int, Measured]]]:
        return PassRates, (dict(self.by_index),)  # a mapping proxy cannot be pickled

    def updated(self, rates: Mapping[int, float], epoch: int) -> PassRates:
        """These pass rates with newer ones, all measured in ``epoch``.

        Raises:
            ValueError: a rate is not between 0 and 1.
        """
        for index, rate in rates.items():
            if not 0 <= rate <= 1:
                raise ValueError(f"problem {index} has a pass rate of {rate}. Allowed is right / graded, 0 to 1.")
        return PassRates({**self.by_index, **{index: Measured(rate, epoch) for index, rate in rates.items()}})

    def to_json(self) -> str:
        """For a checkpoint; ``from_json`` restores it exactly."""
        return json.dumps({str(index): list(measured) for index, measured in sorted(self.by_index.items())})

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls({int(index): Measured(float(rate), int(epoch)) for index, (rate, epoch) in json.loads(text).items()})


def rests(rates: PassRates, index: int, epoch: int, config: CurriculumConfig) -> bool:
    """Whether problem ``index`` is skipped in ``epoch``.

    A problem rests for ``config.rest_epochs`` epochs after a pass rate at or beyond a bound. Then it is trained on, and
    so measured, again. A problem without a pass rate never rests.
    """
    latest = rates.by_index.get(index)
    if latest is None or config.hardest < latest.rate < config.easiest:
        return False
    return epoch - latest.epoch <= config.rest_epochs


@dataclass(frozen=True, slots=True)
class NextProblems:
    indices: list[int]
    postponed: tuple[int, ...]  # taken from the stream but not in ``indices``; they come first in the next batch


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

    They are distinct and not in ``avoid``, as far as the dataset is large enough. A larger batch goes through the whole
    dataset before it repeats a problem. A problem that the stream repeats too early (at an epoch border) is postponed,
    so that each epoch is trained whole.

    A problem that rests counts as taken, so ``stream.taken`` may grow by more than ``n``. If a whole epoch has no
    problem for this batch, because all rest or are already in it, nothing rests for the remainder of the batch. So at
    most n + 2 epochs are searched.

    Args:
        postponed: of the previous batch.
        avoid: problems that will be trained together with these.
    """
    chosen: list[int] = []
    waiting = list(postponed)
    busy = set(avoid)
    skipped = 0  # in a row
    while len(chosen) < n:
        if len(busy) == stream.num_problems:
            busy.clear()
        epoch = stream.taken // stream.num_problems
        place = next((place for place, index in enumerate(waiting) if index not in busy), None)
        index = stream.take(1)[0] if place is None else waiting.pop(place)
        if index in busy:
            waiting.append(index)
            skipped += 1
        elif config is not None and skipped < stream.num_problems and rests(rates, index, epoch, config):
            skipped += 1
        else:
            chosen.append(index)
            busy.add(index)
            skipped = 0 if skipped < stream.num_problems else skipped
    return NextProblems(chosen, tuple(waiting))
