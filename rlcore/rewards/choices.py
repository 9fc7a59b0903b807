"""The letter of a choice, A to J, where a text says so and not just uses the letter."""

from __future__ import annotations

import re

MAX_CHARS = 2000  # of an answer; the letter is at its start

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
