"""The order in which problems are trained on: seeded, endless, and the same after a restart."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Self

import numpy as np
import numpy.typing as npt


class ProblemStream:
    """One endless sequence of problem indices: epochs, each a permutation drawn from (seed, epoch).

    The sequence depends on ``num_problems`` and ``seed`` alone, not on how it is cut into batches. Any
    num_problems // 3 indices in a row are distinct, also across an epoch border.

    ``take`` hands out; ``advance`` says how many of those were trained, and only that is in ``state``. What
    was handed out but not trained when a run dies comes again.

    Raises:
        ValueError: num_problems below 1.
    """

    def __init__(self, num_problems: int, seed: int) -> None:
        if num_problems < 1:
            raise ValueError(f"num_problems is {num_problems}: there is nothing to draw from. Prepare a dataset first.")
        self._num_problems = num_problems
        self._seed = seed
        self._taken = 0
        self._trained = 0
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    @classmethod
    def at(cls, state: Mapping[str, int]) -> Self:
        """The stream as it was when ``state`` was read, with everything untrained still to come."""
        stream = cls(state["num_problems"], state["seed"])
        stream._taken = stream._trained = state["position"]
        return stream

    def take(self, n: int) -> list[int]:
        """The next ``n`` problem indices."""
        end = self._taken + n
        indices: list[int] = []
        while self._taken < end:
            epoch, start = divmod(self._taken, self._num_problems)
            part = self._order(epoch)[start : start + end - self._taken]
            indices += part.tolist()
            self._taken += len(part)
        return indices

    def advance(self, n: int) -> None:
        """Count ``n`` more of the problems handed out as trained.

        Raises:
            ValueError: fewer than ``n`` are handed out and not yet trained.
        """
        if not 0 <= n <= self._taken - self._trained:
            raise ValueError(f"advance({n}): {self._taken - self._trained} problems are handed out and not trained.")
        self._trained += n

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps; ``at`` reads it back."""
        return {"num_problems": self._num_problems, "seed": self._seed, "position": self._trained}

    @property
    def num_problems(self) -> int:
        return self._num_problems

    @property
    def taken(self) -> int:
        """Problems handed out so far, over all epochs: trained, waiting to be, or left out."""
        return self._taken

    @property
    def position(self) -> int:
        """Problems trained (or left out) so far, over all epochs."""
        return self._trained

    @property
    def epoch(self) -> float:
        """Epochs trained so far."""
        return self._trained / self._num_problems

    def _draw(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.Generator(np.random.PCG64([self._seed % 2**64, epoch])).permutation(self._num_problems)

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        """The epoch's draw, with the last third of the epoch before kept out of the first third.

        Only the first two thirds are rearranged, so the last third of any epoch is its plain draw, and no
        epoch needs more than its predecessor's. Of 2k places at most k hold a problem of that last third.
        """
        order, k = self._draw(epoch), self._num_problems // 3
        if epoch == 0 or k == 0:
            return order
        recent = np.isin(order[: 2 * k], self._draw(epoch - 1)[-k:])
        return np.concatenate([order[: 2 * k][~recent], order[: 2 * k][recent], order[2 * k :]])
