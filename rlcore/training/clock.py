"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """``with clock("generate"): ...`` adds to ``seconds["generate"]``; ``seconds["step"]`` counts from construction."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.note(phase, time.perf_counter() - start)

    def note(self, phase: str, seconds: float) -> None:
        """Add seconds that a phase took beside the others."""
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds

    def move(self, seconds: float, phase: str, to: str) -> None:
        """Count seconds of one phase as another's."""
        self.note(phase, -seconds)
        self.note(to, seconds)

    @property
    def seconds(self) -> dict[str, float]:
        return {**self._phases, "step": time.perf_counter() - self._start}
