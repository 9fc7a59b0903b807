"""Tells the trainer that its driver lives, from a thread of its own: the driver may wait for a server meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path

from infra.logs import get_logger
from rlcore.segment.lease import Control

_BEAT_SECONDS = 1.0


class Heartbeat:
    """Repeats, once a second, the last thing that was wanted of a run's trainer."""

    def __init__(self, control: Path) -> None:
        self._control = Control(control)
        self._wanted: tuple[int, bool] | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="heartbeat", daemon=True)
        self._thread.start()

    def want(self, through_segment: int, *, stop: bool = False) -> None:
        """Say at once what is wanted, and repeat it until something else is."""
        with self._lock:
            self._wanted = (through_segment, stop)
            self._control.beat(through_segment, stop=stop)

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            with self._lock:
                if self._wanted is None:
                    continue
                try:
                    self._control.beat(self._wanted[0], stop=self._wanted[1])
                except OSError as error:  # a full disk: the trainer fails for it too, and says more
                    get_logger().warning("train: the trainer cannot be told that its driver lives: %s", error)
