"""What differs between the experiment of a run and the one that it is continued with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlcore.config.experiment import NOT_SCIENCE, STEPS, ExperimentConfig

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Change:
    key: str  # dotted
    was: Value  # None as well where there was no such key
    now: Value

    @property
    def is_science(self) -> bool:
        """Whether what is learned depends on it. More steps are only more of the same; fewer are another experiment."""
        if self.key == STEPS:
            return not (isinstance(self.was, int) and isinstance(self.now, int) and self.now > self.was)
        return not self.key.startswith(NOT_SCIENCE)

    def __str__(self) -> str:
        return f"{self.key}: was {self.was!r}, now {self.now!r}"


def changes(before: ExperimentConfig, now: ExperimentConfig) -> list[Change]:
    """Every value that differs, by key."""
    old, new = before.flat(), now.flat()
    return [Change(key, old.get(key), new.get(key)) for key in _in_order(old, new) if old.get(key) != new.get(key)]


def _in_order(*trees: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(key for tree in trees for key in tree)
