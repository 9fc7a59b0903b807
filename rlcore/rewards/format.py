"""What a completion looks like: a think block, then a boxed answer. Linear in the length of the text."""

from __future__ import annotations

import re
from dataclasses import dataclass

# each run of blanks follows a literal, so no run is scanned twice however long it is
_OPEN = re.compile(r"<\s*think\s*>")
_CLOSE = re.compile(r"<\s*/\s*think\s*>")
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is text


@dataclass(frozen=True, slots=True)
class FormatParts:
    """What was found in a completion."""

    well_formed: bool  # one think block at the start, and the answer after it
    answer: str | None  # inside of the last \\boxed{...}; None: there is none, or it is never closed


def format_parts(text: str) -> FormatParts:
    """Take a completion apart.

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


def last_boxed(text: str) -> str | None:
    """The inside of the last ``\\boxed{...}``, blanks stripped; None if there is none or it is never closed.

    An earlier box does not stand in for a last one that is cut off: the completion had not finished.
    """
    box = _last_box(text)
    return text[box[0] : box[1]].strip() if box else None


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
