"""What an answer says: the letter of a choice, a decimal number."""

from __future__ import annotations

import re
from decimal import Decimal
from itertools import islice

MAX_CHARS = 2000  # of an answer with a choice; the letter is at its start
_WRAPPER = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mathit)\s*\{")
_LETTER = re.compile(
    r"\(([A-J])\)(?:[.:,]?\s.*|[.:]?)"  # (B), (B) text
    r"|([A-J])(?:[.):]\s.*|[.):]?)",  # B, B., B) text
    re.DOTALL,
)


def choice_letter(answer: str) -> str | None:
    """``B`` of "B", "(B)", "B.", "B) text", "\\text{B}" or "**B**"; None of anything else, such as "A triangle".

    Capital letters only: a small one is a variable.
    """
    answer = answer[:MAX_CHARS]
    answer = _WRAPPER.sub("", answer).replace("{", "").replace("}", "").replace("$", "").replace("*", "").strip()
    found = _LETTER.fullmatch(answer)
    return found[1] or found[2] if found else None


MAX_NUMBER_CHARS = 1000  # far above any reference answer
# ASCII digits only. A minus behind a digit, letter or bracket is a subtraction, not a sign.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])-)?(?:\\?\$(?P<inner>-)?)?"
    r"(?:(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?P<fraction>\.[0-9]+)?|(?P<bare>\.[0-9]+))"
)
_GOES_ON = re.compile(r"[,./^*eE]?[0-9]")  # 42/7 is not 42


def leading_number(text: str, start: int = 0) -> Decimal | None:
    """The number that begins at ``start``; None if none does, or if it goes on as a larger expression (42/7)."""
    found = _NUMBER.match(text, start)
    if found is None or _GOES_ON.match(text, found.end()):
        return None
    return _value(found)


def last_number(text: str) -> Decimal | None:
    """The last number of a text; None if there is none, or it has more than ``MAX_NUMBER_CHARS`` characters."""
    end = max(text.rfind(digit) for digit in "0123456789")
    last = None
    for last in _NUMBER.finditer(text, max(0, end - 2 * MAX_NUMBER_CHARS)):  # noqa: B007 - the last one is wanted
        pass
    return _value(last) if last else None


def only_number(text: str) -> Decimal | None:
    """The number of a text that holds exactly one."""
    found = list(islice(_NUMBER.finditer(text), 2))
    return _value(found[0]) if len(found) == 1 else None


def whole_number(text: str) -> Decimal | None:
    """The number that the whole text is, but for blanks, a full stop and a percent sign at the end."""
    text = text.strip().rstrip(".").rstrip("%").rstrip("\\").rstrip()
    found = _NUMBER.fullmatch(text)
    return _value(found) if found else None


def _value(found: re.Match[str]) -> Decimal | None:
    whole, fraction = found["whole"] or "", found["fraction"] or found["bare"] or ""
    if len(whole) + len(fraction) > MAX_NUMBER_CHARS:
        return None
    size = Decimal((whole.replace(",", "") or "0") + fraction)
    return -size if found["sign"] or found["inner"] else size
