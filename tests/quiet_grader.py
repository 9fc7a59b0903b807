"""The methods of a grader that have nothing to tell."""

from __future__ import annotations


class QuietGrader:
    def last_failures(self) -> list[str]:
        return []

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        return
