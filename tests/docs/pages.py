"""The documentation as data: blocks and their markers, commands, quoted messages, words in backticks, links.

Commands stand in indented blocks and in ``sh`` blocks. The comment before such a block says how it is checked:
``run`` (really, in order), ``run, Ctrl-C`` (really, interrupted at its first checkpoint), ``run on a finished run``
(really, with the names of a small run), ``elsewhere: WHAT`` (programs of others may be missing here); none: checked
without running. tests/long/test_tutorial.py runs them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
ON_A_RUN = "run on a finished run"
MARKERS = ("run", "run, Ctrl-C", ON_A_RUN, "elsewhere: ")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?:    .*\n(?:\n(?=    ))?)+)")
_MARKER = re.compile(r"<!-- ([^>]*?) -->\s*\Z")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_HEADING = re.compile(r"^(#{1,6}) (.*)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code, with the comment before it."""

    page: Path
    line: int
    language: str  # "sh" for an indented one
    text: str
    marker: str  # "": none

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Whether the tutorial's test runs it in order."""
        return self.marker in ("run", "run, Ctrl-C")


def blocks(page: Path) -> list[Block]:
    """Every block of a page, in its order; a comment that is no known marker counts as none."""
    text = page.read_text()
    found = [(match.start(), match[1], match[2]) for match in _FENCE.finditer(text)]
    rest = _blanked(text)
    found += [(match.start(), "sh", re.sub(r"^    ", "", match[1], flags=re.M)) for match in _INDENTED.finditer(rest)]
    return [Block(page, _line(text, at), language, body, _marker(text[:at])) for at, language, body in sorted(found)]


def commands_of(block: Block) -> Iterator[list[str]]:
    """Words of each simple command: lines joined at their backslash, split at pipes, ``;`` and ``&&``; no comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        yield from simple_commands(line)


def simple_commands(line: str) -> Iterator[list[str]]:
    for inner in _SUBSTITUTION.findall(line):
        yield from simple_commands(inner)
    line = _SUBSTITUTION.sub("$VALUE", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set(";|&"):
            yield words
            words = []
        else:
            words.append(word)
    if words:
        yield words


def prose(page: Path) -> str:
    """The page without its blocks and its comments."""
    text = _blanked(page.read_text())
    return re.sub(r"<!--.*?-->", "", _INDENTED.sub("\n", text), flags=re.DOTALL)


def code_words(page: Path) -> list[str]:
    """What stands in backticks, lines joined."""
    return [" ".join(match.split()) for match in _CODE.findall(prose(page))]


def quotes(page: Path) -> list[str]:
    """Quoted messages: the lines that begin with ``>``. A backslash at the end of one breaks the line."""
    return [line[2:].removesuffix("\\").strip() for line in prose(page).splitlines() if line.startswith("> ")]


def anchors(page: Path) -> set[str]:
    """Names of the headings, as GitHub makes them."""
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        for _, title in _HEADING.findall(_blanked(page.read_text()))
    }


def links(page: Path) -> list[str]:
    return _LINK.findall(prose(page))


def sections(page: Path, level: int) -> dict[str, str]:
    """Title to text, of the headings of one level."""
    found: dict[str, str] = {}
    title = ""
    for line in page.read_text().splitlines():
        heading = _HEADING.match(line)
        if heading and len(heading[1]) <= level:
            title = heading[2] if len(heading[1]) == level else ""
        elif title:
            found[title] = f"{found.get(title, '')}{line}\n"
    return found


def _blanked(text: str) -> str:
    """The text with fenced blocks as empty lines, so that lines keep their places."""
    return _FENCE.sub(lambda match: re.sub(r"[^\n]", "", match[0]).ljust(len(match[0]), "\n"), text)


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _marker(before: str) -> str:
    match = _MARKER.search(before)
    return match[1] if match and match[1].startswith(MARKERS) else ""
