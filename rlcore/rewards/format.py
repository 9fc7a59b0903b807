"""What a completion looks like: think block, box, answer tags. Linear in the length of the text.

Of several boxes or answer tags the last one counts, wherever it is. One that is never closed is no answer, and an
earlier one does not stand in for it: the completion had not finished.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlcore.types import Score

# each run of blanks follows a literal, so no run is scanned twice however long it is
_OPEN = re.compile(r"<\s*think\s*>")
_CLOSE = re.compile(r"<\s*/\s*think\s*>")
_OPEN_ANSWER = re.compile(r"<\s*answer\s*>")
_CLOSE_ANSWER = re.compile(r"<\s*/\s*answer\s*>")
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text


@dataclass(frozen=True, slots=True)
class FormatParts:
    """What was found in a completion."""

    well_formed: bool  # one think block at the start, and the answer after it
    answer: str | None  # blanks stripped; None: there is none, or it is never closed


def format_parts(text: str) -> FormatParts:
    """Take apart a completion that should be a think block, then text with a box.

    Well formed is ``<think> ... </think> ... \\boxed{ ... } ...``: the think block opens the completion,
    there is exactly one, and the last box comes after it, is closed and not blank. Blanks inside a tag are
    tolerated, because some tokenizers put them there.
    """
    box = _last_box(text)
    if box is None:
        return FormatParts(well_formed=False, answer=None)
    answer = text[box[0] : box[1]].strip()
    think_end = _think_end(text)
    return FormatParts(
        well_formed=bool(answer) and think_end is not None and think_end <= box[0],
        answer=answer,
    )


def answer_parts(text: str) -> FormatParts:
    """Take apart a completion that should be a think block, then an answer block.

    Well formed is ``<think> ... </think> <answer> ... </answer>`` with nothing but blanks before, between and
    after: one think block, one answer tag after it, closed and not blank.
    """
    answer = last_answer(text)
    think_end = _think_end(text)
    if not answer or think_end is None:
        return FormatParts(well_formed=False, answer=answer)
    opened = list(_OPEN_ANSWER.finditer(text, think_end))
    closed = list(_CLOSE_ANSWER.finditer(text, think_end))
    return FormatParts(
        well_formed=len(opened) == len(closed) == 1
        and opened[0].end() <= closed[0].start()
        and not text[think_end : opened[0].start()].strip()
        and not text[closed[0].end() :].strip(),
        answer=answer,
    )


def last_boxed(text: str) -> str | None:
    """The inside of the last ``\\boxed{...}``, blanks stripped; None if there is none or it is never closed."""
    box = _last_box(text)
    return text[box[0] : box[1]].strip() if box else None


def last_answer(text: str) -> str | None:
    """The inside of the last ``<answer> ... </answer>``, blanks stripped; None if there is none or it is not closed."""
    opened = None
    for opened in _OPEN_ANSWER.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    if opened is None or (closed := _CLOSE_ANSWER.search(text, opened.end())) is None:
        return None
    return text[opened.end() : closed.start()].strip()


def stated_truth(truth: str) -> str:
    """The reference answer; some datasets keep it inside answer tags."""
    inside = last_answer(truth)
    return truth.strip() if inside is None else inside


def after_think(text: str) -> str:
    """What follows the last closing think tag; the whole text if there is none."""
    end = 0
    for closed in _CLOSE.finditer(text):
        end = closed.end()
    return text[end:]


def _think_end(text: str) -> int | None:
    """Where the think block ends, if there is exactly one and it opens the text."""
    opened, closed = list(_OPEN.finditer(text)), list(_CLOSE.finditer(text))
    if len(opened) != 1 or len(closed) != 1 or text[: opened[0].start()].strip():
        return None
    return closed[0].end() if opened[0].end() <= closed[0].start() else None


def _last_box(text: str) -> tuple[int, int] | None:
    start = text.rfind("\\boxed")
    while start >= 0:
        if opening := _BOX.match(text, start):
            break
        start = text.rfind("\\boxed", 0, start)
    else:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, opening.end()):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return opening.end(), brace.start()
    return None


def weighted_score(accuracy: bool, well_formed: bool, format_weight: float) -> Score:
    """(1 - format_weight) * accuracy + format_weight * format, both 0 or 1: a reward in [0, 1]."""
    parts = {"accuracy": float(accuracy), "format": float(well_formed)}
    return Score((1 - format_weight) * parts["accuracy"] + format_weight * parts["format"], parts, graded=True)
