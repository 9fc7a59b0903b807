"""The list of commands of the pages that a test runs, in docs/contributing.md: ``python -m tests.docs.ran`` writes it.

All other commands are checked without running: programs, options, settings, files and names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.docs.pages import ON_A_RUN, PAGES, ROOT, Block, blocks

PAGE = ROOT / "docs" / "contributing.md"
_BEGIN, _END = "<!-- commands that a test runs -->\n", "<!-- end of the list -->\n"
_ELSEWHERE = re.compile(r"(tests/\S+\.py) runs it")


def test_of(block: Block) -> str:
    """The file of the test that runs a block; empty if none does."""
    if block.is_run or block.marker == ON_A_RUN:
        return "tests/long/test_tutorial.py"
    named = _ELSEWHERE.search(block.marker)
    return named[1] if named else ""


def rows() -> Iterator[str]:
    yield "| page | command | test |"
    yield "| --- | --- | --- |"
    for page in PAGES:
        for block in blocks(page):
            test = test_of(block)
            lines = block.text.replace("\\\n", " ").splitlines() if test and block.language == "sh" else []
            for line in lines:
                command = re.sub(r"\s{2,}# .*", "", line).strip()
                if command:
                    yield f"| {page.relative_to(ROOT)} | `{command.replace('|', chr(92) + '|')}` | `{test}` |"


def with_list(text: str) -> str:
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    return f"{before}{_BEGIN}\n" + "\n".join(rows()) + f"\n\n{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_list(PAGE.read_text()))
