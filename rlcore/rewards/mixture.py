"""A grader for problems of several sources, some of which have rewards of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock

from rlcore.types import Completion, Grader, Problem, Score


@dataclass(frozen=True, slots=True)
class MixtureGrader:
    """Gives each problem to the grader of its source."""

    graders: Mapping[str, Grader]  # by name of a source; "": of all other problems

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        places: defaultdict[str, list[int]] = defaultdict(list)
        for place, problem in enumerate(problems):
            places[problem.source_name if problem.source_name in self.graders else ""].append(place)
        joined = _Joined(len(problems), waiting=len(places))
        for name, own in places.items():
            scores = self.graders[name].submit([problems[i] for i in own], [completions[i] for i in own])
            joined.add(own, scores)
        if not places:
            joined.future.set_result([])
        return joined.future

    def last_failures(self) -> Sequence[str]:
        return [
            f"{name}: {text}" if name else text
            for name, grader in self.graders.items()
            for text in grader.last_failures()
        ]

    def take_metrics(self) -> Mapping[str, float]:
        """Those of a source's own grader are named after the source."""
        return {
            f"source/{name}/{key}" if name else key: value
            for name, grader in self.graders.items()
            for key, value in grader.take_metrics().items()
        }

    def close(self) -> None:
        for grader in self.graders.values():
            grader.close()


@dataclass(slots=True)
class _Joined:
    """The scores of several graders, in the order of the completions."""

    size: int
    waiting: int  # graders
    future: Future[list[Score]] = field(default_factory=Future)
    scores: dict[int, Score] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def add(self, places: Sequence[int], scores: Future[list[Score]]) -> None:
        scores.add_done_callback(lambda done: self._done(places, done))

    def _done(self, places: Sequence[int], scores: Future[list[Score]]) -> None:
        with self.lock:
            if self.future.done():
                return
            if (error := scores.exception()) is not None:
                self.future.set_exception(error)
                return
            self.scores.update(zip(places, scores.result(), strict=True))
            self.waiting -= 1
            if self.waiting == 0:
                self.future.set_result([self.scores[place] for place in range(self.size)])
