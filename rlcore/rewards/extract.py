"""What a completion says: think block, box, answer tags, the letter of a choice, numbers. Linear in its length.

Of several boxes or answer tags the last one counts, wherever it is. If it is never closed there is no answer, because
the completion had not finished: an earlier one does not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice

# Each run of blanks follows a literal, so that no run is scanned twice.
_OPEN = re.compile(r"<\s*think\s*>")
_CLOSE = re.compile(r"<\s*/\s*think\s*>")
_THINK_TAG = re.compile(r"<\s*(?P<slash>/\s*)?think\s*>")
_OPEN_ANSWER = re.compile(r"<\s*answer\s*>")
_CLOSE_ANSWER = re.compile(r"<\s*/\s*answer\s*>")
_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is plain text
_DEPTH_CHANGE = {"{": 1, "}": -1}


EMPTY_THOUGHT = "<think></think>"


@dataclass(frozen=True, slots=True)
class FormatParts:
    well_formed: bool  # one think block at the start, and the answer after it
    answer: str | None  # blanks stripped; None: missing, or never closed


def format_parts(text: str) -> FormatParts:
    """The parts of a completion that should be a think block, then text with a box.

    Well formed is ``<think> ... </think> ... \\boxed{ ... } ...``: exactly one think block, at the start, and then a
    closed box that is not blank. Blanks inside a tag are allowed, because some tokenizers add them.
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
    """The parts of a completion that should be a think block, then an answer block.

    Well formed is ``<think> ... </think> <answer> ... </answer>``: one of each, the answer not blank, and only blanks
    before, between and after.
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
    """The content of the last ``\\boxed{...}``, stripped; None if it is missing or never closed."""
    box = _last_box(text)
    return text[box[0] : box[1]].strip() if box else None


def last_answer(text: str) -> str | None:
    """The content of the last ``<answer> ... </answer>``, stripped; None if it is missing or never closed."""
    opened = last_match(_OPEN_ANSWER, text)
    if opened is None or (closed := _CLOSE_ANSWER.search(text, opened.end())) is None:
        return None
    return text[opened.end() : closed.start()].strip()


def stated_truth(truth: str) -> str:
    """The reference answer, without the answer tags that some datasets put around it."""
    inside = last_answer(truth)
    return truth.strip() if inside is None else inside


def after_think(text: str) -> str:
    """The text after the last closing think tag; the whole text without one."""
    closed = last_match(_CLOSE, text)
    return text[closed.end() :] if closed else text


@dataclass(frozen=True, slots=True)
class ThoughtParts:
    well_formed: bool  # exactly one thought, at the start, and closed
    closed: bool  # no thought is open at the end; also True without any thought
    after: str  # the text after the last thought: all of it without one, empty if a thought is open at the end


def thought_parts(text: str, *, opened: bool) -> ThoughtParts:
    """What a completion says after its thoughts. Its last think tag decides whether a thought is open at the end.

    Args:
        opened: the prompt opened a thought, so that the completion begins inside it.
    """
    whole = f"<think>{text}" if opened else text
    last = last_match(_THINK_TAG, whole)
    if last is None:
        return ThoughtParts(well_formed=False, closed=True, after=text)
    if last["slash"] is None:
        return ThoughtParts(well_formed=False, closed=False, after="")
    return ThoughtParts(well_formed=_think_end(whole) is not None, closed=True, after=whole[last.end() :])


def last_match(pattern: re.Pattern[str], text: str, start: int = 0) -> re.Match[str] | None:
    last = None
    for last in pattern.finditer(text, start):  # noqa: B007 - the last one is wanted
        pass
    return last


def _think_end(text: str) -> int | None:
    """The end of the think block, if there is exactly one, at the start of the text."""
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
        depth += _DEPTH_CHANGE.get(brace[0], 0)
        if depth == 0:
            return opening.end(), brace.start()
    return None


MAX_CHOICE_CHARS = 2000  # of an answer that names a choice; its letter is at the start
_WRAPPER = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathit)\s*\{")
_LETTER = re.compile(
    r"\(([A-J])\)(?:[.:,]?\s.*|[.:]?)"  # (B), (B) text
    r"|([A-J])(?:[.):]\s.*|[.):]?)",  # B, B., B) text
    re.DOTALL,
)


def choice_letter(answer: str) -> str | None:
    """``B`` of "B", "(B)", "B.", "B) text", "\\text{B}" or "**B**"; None for anything else, such as "A triangle".

    Only capital letters count: a small one is a variable.
    """
    answer = answer[:MAX_CHOICE_CHARS]
    answer = _WRAPPER.sub("", answer).replace("{", "").replace("}", "").replace("$", "").replace("*", "").strip()
    match = _LETTER.fullmatch(answer)
    return match[1] or match[2] if match else None


MAX_NUMBER_CHARS = 1000  # far above any reference answer
# ASCII digits only. A minus behind a digit, letter or bracket is a subtraction, not a sign.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])-)?(?:\\?\$(?P<inner>-)?)?"
    r"(?:(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?P<fraction>\.[0-9]+)?|(?P<bare>\.[0-9]+))"
)
_CONTINUES = re.compile(r"[,./^*eE]?[0-9]")  # 42/7 is not 42


def leading_number(text: str, start: int = 0) -> Decimal | None:
    """The number that begins at ``start``; None without one, or if it continues as a larger expression (42/7)."""
    match = _NUMBER.match(text, start)
    if match is None or _CONTINUES.match(text, match.end()):
        return None
    return _value(match)


def last_number(text: str) -> Decimal | None:
    """The last number of a text; None without one, or if it is longer than ``MAX_NUMBER_CHARS``."""
    end = max(text.rfind(digit) for digit in "0123456789")
    last = last_match(_NUMBER, text, max(0, end - 2 * MAX_NUMBER_CHARS))
    return _value(last) if last else None


def only_number(text: str) -> Decimal | None:
    """The number in a text with exactly one number, else None."""
    match = list(islice(_NUMBER.finditer(text), 2))
    return _value(match[0]) if len(match) == 1 else None


def whole_number(text: str) -> Decimal | None:
    """The text as a number. Blanks, and a full stop or a percent sign at the end, are ignored."""
    text = text.strip().rstrip(".").rstrip("%").rstrip("\\").rstrip()
    match = _NUMBER.fullmatch(text)
    return _value(match) if match else None


def _value(match: re.Match[str]) -> Decimal | None:
    whole, fraction = match["whole"] or "", match["fraction"] or match["bare"] or ""
    if len(whole) + len(fraction) > MAX_NUMBER_CHARS:
        return None
    size = Decimal((whole.replace(",", "") or "0") + fraction)
    return -size if match["sign"] or match["inner"] else size
