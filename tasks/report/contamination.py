"""What a run's page and MLflow have about validation problems that training has too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.tracking.tracker import Tracker
from rlcore.artifacts import DatasetRef, DuplicatesRef, EvalReport
from rlcore.data.contamination import Duplicate, most_alike, read_pairs
from rlcore.data.table import load_problems
from rlcore.evaluation.report import PartAccuracy, clean_metrics, whole_and_clean
from rlcore.evaluation.rows import read_rows
from rlcore.types import Problem
from tasks.lineage import read_duplicates, read_origins
from tasks.run import Run

_PAIRS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ShownProblem:
    """One side of a pair."""

    problem_id: str
    question: str
    answer: str
    pictures: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class ShownPair:
    """A validation problem beside the training problem that is most like it."""

    pair: Duplicate
    validation: ShownProblem
    training: ShownProblem

    @property
    def likeness(self) -> str:
        """In words."""
        pair = self.pair
        if pair.kind == "exact":
            return pair.kind
        bits = f", pictures differ in {pair.bits} of 256 bits" if self.validation.pictures else ""
        return f"{pair.kind}: similarity of texts {pair.similarity:.2f}{bits}"


@dataclass(frozen=True, slots=True)
class Contamination:
    """The duplicates of a run, the accuracy without them, and the first pairs."""

    found: DuplicatesRef
    before: PartAccuracy | None  # None: every problem has a duplicate
    after: PartAccuracy | None
    pairs: Sequence[ShownPair] = ()

    def row(self) -> tuple[str, str, str]:
        """Beside the accuracy on all problems."""
        return "accuracy, clean part [95 %]", _interval(self.before), _interval(self.after)

    def counts(self) -> list[tuple[str, str]]:
        """Name and text of each row above the pairs."""
        found = self.found
        rows = [("exact: same text, same pictures", found.exact)]
        if not found.exact_only:
            rows.append(("near: similar text, similar pictures", found.near))
            rows.append(("same_images: similar pictures, another text", found.same_images))
        rows.append(("clean", found.problems - found.found))
        return [(name, f"{number} of {found.problems}") for name, number in rows]


def _interval(part: PartAccuracy | None) -> str:
    if part is None:
        return "no clean problem"
    return f"{part.accuracy:.3f} [{part.low:.3f}, {part.high:.3f}] on {part.problems}"


def contamination_of(run: Run, validation: DatasetRef, before: EvalReport, after: EvalReport) -> Contamination | None:
    """None: the run did not look for duplicates of its training data in this validation data."""
    noted = [found for found in read_duplicates(run) if found.evaluation_digest == validation.digest]
    if not noted:
        return None
    found = noted[-1]
    pairs = read_pairs(Path(found.path))
    return Contamination(
        found,
        before=clean_part(before, pairs),
        after=clean_part(after, pairs),
        pairs=_shown(run, found, validation, most_alike(pairs, _PAIRS_SHOWN)),
    )


def clean_part(report: EvalReport, pairs: Sequence[Duplicate]) -> PartAccuracy | None:
    """Accuracy on the problems of an evaluation that are in no pair. None: there are none."""
    rows = read_rows(Path(report.table))
    return whole_and_clean(rows, {pair.evaluation_id for pair in pairs}).get("clean")


def _shown(run: Run, found: DuplicatesRef, validation: DatasetRef, pairs: Sequence[Duplicate]) -> list[ShownPair]:
    """The texts and pictures of pairs; none if a dataset was removed."""
    trains = [item.train for item in reversed(read_origins(run.run_dir)) if item.train.digest == found.train_digest]
    if not pairs or not trains or not all(Path(item.path).is_dir() for item in (validation, trains[0])):
        return []
    return show_pairs(pairs, Path(trains[0].path), Path(validation.path))


def show_pairs(pairs: Sequence[Duplicate], train: Path, evaluation: Path) -> list[ShownPair]:
    """The pairs with the texts and pictures of two prepared datasets."""
    known, training = (
        {problem.problem_id: problem for problem in load_problems(folder)} for folder in (evaluation, train)
    )
    return [
        ShownPair(pair, _problem(known[pair.evaluation_id]), _problem(training[pair.training_id])) for pair in pairs
    ]


def _problem(problem: Problem) -> ShownProblem:
    pictures = tuple(Path(image.file) for image in problem.images if image.file is not None)
    return ShownProblem(problem.problem_id, problem.conversation, problem.answer, pictures)


def log_contamination(tracker: Tracker, contamination: Contamination, evaluations: Sequence[EvalReport]) -> None:
    """Log the pairs, their number, and the accuracy on the clean part of each evaluation. Safe to repeat."""
    found, first = contamination.found, evaluations[0]
    pairs = read_pairs(Path(found.path))
    counts = {"exact": found.exact, "near": found.near, "same_images": found.same_images}
    named = {f"eval/duplicates_{kind}": float(count) for kind, count in counts.items()}
    tracker.log_metrics(named, step=first.step, timestamp_ms=round(first.at * 1000))
    for report in evaluations:
        if Path(report.table).exists():
            metrics = clean_metrics(clean_part(report, pairs))
            named = {f"eval/{name}": value for name, value in metrics.items()}
            tracker.log_metrics(named, step=report.step, timestamp_ms=round(report.at * 1000))
    tracker.log_file(Path(found.path), "duplicates")
