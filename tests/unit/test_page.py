"""What a model or a dataset wrote is shown on a page as it is, and asks for nothing."""

from __future__ import annotations

import html
import re

import pytest
from markdown_it import MarkdownIt

from tasks.page import as_text

EVIL = "evil.example/p.png"
HOSTILE = [
    f"![x](http://{EVIL})",
    f"![x](//{EVIL})",
    f"![x][1]\n\n[1]: http://{EVIL}",
    f"[1]: http://{EVIL}",
    f"[click](http://{EVIL})",
    f"<img src=http://{EVIL}>",
    f"<img src='http://{EVIL}' onerror=alert(1)>",
    f"<a href=http://{EVIL}>x</a>",
    f"<http://{EVIL}>",
    f"see http://{EVIL} and HTTPS://{EVIL}, ftp://{EVIL}",
    f"www.{EVIL}",
    "mail me@evil.example or mailto:me@evil.example",
    f"<style>@import url(http://{EVIL})</style>",
    f"<script src=//{EVIL}></script>",
    f"<svg><image href=http://{EVIL}></svg>",
    f"&lt;img src=http://{EVIL}&gt; &#60;img src=x&#62;",
    f"a | ![x](http://{EVIL}) | \\| \\\\| b |\n| --- |\n| ![x](http://{EVIL})",
    f"`a` ``![x](http://{EVIL})` ```\n![x](http://{EVIL})",
    f"\\![x](http://{EVIL}) \\\\![x](http://{EVIL})",
    f"![x](data:image/svg+xml,%3Csvg%3E) ![x\r](http://{EVIL})",
    f"# title\n- [ ] item\n> quote\n---\n*b* __c__ ~~d~~ $x_1$ [^1]\n\n[^1]: http://{EVIL}",
]
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
