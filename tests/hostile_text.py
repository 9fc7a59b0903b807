"""Texts of a model or a dataset that try to be more than text on a page."""

from __future__ import annotations

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
