"""A table of right and wrong completions, with their pictures, for each evaluation of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jinja2 import Environment

from infra.tracking.tracker import Tracker
from rlcore.artifacts import DatasetRef, EvalReport
from rlcore.data.table import load_problems
from rlcore.errors import StorageError
from rlcore.evaluation.rows import EvalRow, read_rows
from tasks.pictures import small_picture

_EACH = 6  # right completions, and as many wrong ones
_SIDE = 320  # pixels of a picture's longer side, so that the size of a table is bounded


@dataclass(frozen=True, slots=True)
class ShownCompletion:
    row: EvalRow
    pictures: tuple[str, ...]  # data URIs


def log_completions(
    tracker: Tracker, templates: Environment, validation: DatasetRef, evaluations: Iterable[EvalReport]
) -> None:
    """Log one HTML table for each evaluation whose completions are there. Safe to repeat."""
    pictures = _pictures(Path(validation.path))
    for report in evaluations:
        if Path(report.table).exists():
            chosen = list(choose(read_rows(Path(report.table))))
            tracker.log_text(
                as_html(templates, report, chosen, pictures), f"eval/completions/step-{report.step:06d}.html"
            )


def choose(rows: Sequence[EvalRow], each: int = _EACH) -> Iterator[EvalRow]:
    """The first right and the first wrong completions, at most ``each`` of both and one of both for a problem.

    The order is that of the data, so that the tables of two steps have much in common. Ungraded ones are left out.
    """
    for right in (True, False):
        first: dict[str, EvalRow] = {}
        for row in rows:
            if row.graded and (row.accuracy == 1) == right:
                first.setdefault(row.problem_id, row)
        yield from list(first.values())[:each]


def as_html(
    templates: Environment, report: EvalReport, rows: Iterable[EvalRow], pictures: Mapping[str, Sequence[Path]]
) -> str:
    """A page of its own: picture, question and answer beside the completion.

    Args:
        pictures: by problem.
    """
    small = partial(small_picture, most_pixels=_SIDE)
    shown = [ShownCompletion(row, tuple(map(small, pictures.get(row.problem_id, ())))) for row in rows]
    return templates.get_template("completions.html.jinja").render(report=report, shown=shown)


def _pictures(dataset: Path) -> dict[str, list[Path]]:
    """The resized pictures of each problem; none if the dataset was removed."""
    try:
        problems = load_problems(dataset)
    except StorageError:
        return {}
    return {problem.problem_id: [Path(image.file) for image in problem.images if image.file] for problem in problems}
