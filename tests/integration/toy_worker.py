"""What an actor of the failure tests holds: no torch, but dies, fails and waits like a rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from rlcore.distributed.worker import WorkerSpec
from rlcore.errors import SamplerError


class ToyWorker:
    def __init__(self, spec: WorkerSpec) -> None:
        self.rank = spec.rank

    def rank_of(self) -> int:
        return self.rank

    def die(self, victim: int) -> None:
        """The victim goes; the others notice it in their collective, at once or never."""
        if self.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if victim == 1:
            raise RuntimeError("Connection closed by peer")
        time.sleep(600)

    def fail(self) -> None:
        """Rank 1 is wrong; rank 0 hears of it later."""
        if self.rank == 0:
            time.sleep(1.5)
            raise RuntimeError("Connection closed by peer")
        self._really_wrong()

    def _really_wrong(self) -> None:
        raise SamplerError("the weights of version 3 did not arrive")

    def stuck(self, folder: Path) -> None:
        """Until the file that says so is removed."""
        flag = folder / f"stuck-{self.rank}"
        flag.touch()
        while flag.exists():
            time.sleep(0.2)

    def count(self, victim_and_how: tuple[int, str]) -> Iterator[int]:
        """0, 1, 2; the victim does not get to 2."""
        victim, how = victim_and_how
        yield 0
        time.sleep(1)  # longer than the other rank needs to get here
        yield 1
        if self.rank == victim and how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.rank == victim:
            self._really_wrong()
        yield 2

    def forever(self) -> Iterator[int]:
        while True:
            time.sleep(0.01)
            yield self.rank
