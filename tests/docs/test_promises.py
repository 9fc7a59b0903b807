"""Every promise of docs/design.md has tests in the first tier: the table of docs/contributing.md names them."""

from __future__ import annotations

import re

import pytest

from tests.docs.commands import check_test
from tests.docs.pages import ROOT

PROMISES = re.findall(
    r"^(\d+)\. \*\*(.+?)\.?\*\*",
    (ROOT / "docs" / "design.md").read_text().partition("\n## Promises\n")[2].partition("\n## ")[0],
    re.MULTILINE | re.DOTALL,
)
TABLE = dict(re.findall(r"^\| (\d+\. .+?) \| (.+) \|$", (ROOT / "docs" / "contributing.md").read_text(), re.MULTILINE))
TESTS = [(promise, test) for promise, cell in TABLE.items() for test in re.findall(r"`([^`]+)`", cell)]


def test_the_table_has_each_promise_by_its_words() -> None:
    assert [int(number) for number, _ in PROMISES] == list(range(1, 14))
    assert list(TABLE) == [f"{number}. {' '.join(words.split())}" for number, words in PROMISES]
    assert {promise for promise, _ in TESTS} == set(TABLE)


@pytest.mark.parametrize(("promise", "test"), TESTS)
def test_a_test_of_a_promise_is_one_that_make_test_runs(promise: str, test: str) -> None:
    assert not test.startswith(("long/", "gpu/")), promise
    assert "::" in test
    check_test(f"tests/{test}")
