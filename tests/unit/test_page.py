"""What a model or a dataset wrote is shown on a page as it is, and asks for nothing."""

from __future__ import annotations

import html
import re

import pytest
from markdown_it import MarkdownIt

from tasks.report.page import as_text
from tests.hostile_text import HOSTILE

PAGE = "| a | b |\n| --- | --- |\n| 1 | {} |\n"


def rendered(markdown: str) -> str:
    return MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(markdown)


def test_the_renderer_would_show_them() -> None:
    page = "".join(rendered(PAGE.format(text)) for text in HOSTILE)
    assert page.count("<img ") > 5
    assert page.count("<a ") > 1


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("around", [PAGE, "- it said: {}\n", "{}\n"])
def test_a_hostile_text_is_text(text: str, around: str) -> None:
    page = rendered(around.format(as_text(text)))
    tags = set(re.findall(r"<\s*(\w+)", page))
    assert tags <= {"table", "thead", "tbody", "tr", "th", "td", "ul", "li", "p"}
    assert page.count("<td") <= 2, "no further cell"
    shown = html.unescape(re.sub(r"<[^>]+>", "", page)).replace("\u200b", "")
    assert re.sub(r"\s+", " ", text).strip() in re.sub(r"\s+", " ", shown), "nothing of it is lost"


@pytest.mark.parametrize("text", HOSTILE)
def test_no_address_is_left_that_a_renderer_could_find_in_the_text(text: str) -> None:
    """GFM's autolinks are looked for in the text as it is shown, entities and all."""
    shown = html.unescape(as_text(text))
    assert not re.search(r"(?i)(https?|ftp)://|www\.|[\w.+-]@[\w-]", shown)
