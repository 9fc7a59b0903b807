"""The table of completions of an evaluation: which are chosen, and what it shows."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

from PIL import Image

from rlcore.artifacts import EvalReport
from rlcore.evaluation.rows import EvalRow
from tasks.report.completions import as_html, choose
from tasks.report.page import TEMPLATES


def row(name: str, sample: int, accuracy: float | None, text: str = "") -> EvalRow:
    return EvalRow(name, sample, f"<b>{name}?", "4", text, 0.5, accuracy, None, accuracy is not None, "stop", 7)


def test_right_ones_then_wrong_ones_in_the_order_of_the_data_and_one_of_both_for_a_problem() -> None:
    rows = [
        row("a", 0, 0.0), row("a", 1, 1.0), row("a", 2, 1.0), row("b", 0, None), row("b", 1, 0.0), row("c", 0, 1.0),
        row("d", 0, 1.0), row("e", 0, 0.0),
    ]  # fmt: skip
    assert [(item.problem_id, item.sample) for item in choose(rows, 2)] == [("a", 1), ("c", 0), ("a", 0), ("b", 1)]
    assert [item.problem_id for item in choose(rows, 1)] == ["a", "a"]
    assert list(choose([row("b", 0, None)])) == []


def test_a_picture_is_beside_its_completion_small_and_texts_are_escaped(tmp_path: Path) -> None:
    Image.new("RGB", (1000, 500), (9, 8, 7)).save(tmp_path / "large.png")
    report = EvalReport.model_construct(step=40, accuracy=0.5, accuracy_low=0.25, accuracy_high=0.75)
    rows = [row("a", 0, 1.0, "<script>4"), row("b", 0, 0.0, "5")]
    page = as_html(TEMPLATES, report, rows, {"a": [tmp_path / "large.png"]})
    assert "<h1>Step 40: accuracy 0.500 [0.250, 0.750]</h1>" in page
    assert re.findall(r"<tr><td>(\w+)</td>", page) == ["right", "wrong"]
    (picture,) = re.findall(r"<tr><td>right</td><td><img alt='' src='data:image/png;base64,(.*?)'></td>", page)
    assert page.count("<img") == 1
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    assert (image.size, image.getpixel((0, 0))) == ((320, 160), (9, 8, 7))
    assert "<pre>&lt;script&gt;4</pre><small>reward 0.50, 7 tokens, stop</small>" in page
    assert "<small>b</small><pre>&lt;b&gt;b?</pre>answer: 4</td>" in page
    assert "<script>" not in page
