"""The tables of measured figures are what ``make docs`` writes from the records, and records agree with their steps."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench import accepted, measured, models
from tests.bench.accepted import FOLDER, record
from tests.bench.tables import FILES, PAGES, TABLES, with_tables

PERFORMANCE = PAGES[0]
QUICK = [page for page in PAGES if page.name != "cost.md"]


def test_the_tables_are_what_make_docs_writes() -> None:
    """tests/unit/test_estimate.py does the same for docs/cost.md."""
    for page in QUICK:
        assert page.read_text() == with_tables(page.read_text()), "run make docs"


def test_each_table_is_on_one_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert {name: text.count(f"<!-- table: {name} -->\n") for name in TABLES} == dict.fromkeys(TABLES, 1)
    assert text.count("<!-- end of the table -->") == len(TABLES)


def test_the_models_on_a_gpu_are_those_of_the_record() -> None:
    page = models.PAGE.read_text()
    found = models.record()
    assert models.table(found) in page
    assert all(line in page for name, made in found.items() for line in models.refusals(name, made))


def test_a_figure_that_is_edited_in_the_page_is_found() -> None:
    page = PERFORMANCE.read_text()
    edited = page.replace(": 3.12 x |", ": 3.21 x |")
    assert edited != page
    assert with_tables(edited) == page


@pytest.mark.parametrize("name", FILES)
def test_a_record_that_is_edited_changes_the_page(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So each record is on the page, and a change of one needs a change of the other."""
    for file in FOLDER.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / f"{name}.json").unlink()
    (tmp_path / f"{name}.json").write_text(json.dumps(_greater(record(name))))
    monkeypatch.setattr(accepted, "FOLDER", tmp_path)
    record.cache_clear()
    try:
        assert any(with_tables(page.read_text()) != page.read_text() for page in QUICK)
    finally:
        record.cache_clear()


def _greater(value: Any) -> Any:
    match value:
        case dict():
            return {key: _greater(item) for key, item in value.items()}
        case list():
            return [_greater(item) for item in value]
        case float():
            return 1.2 * value
    return value


def test_every_record_is_in_the_table_of_files() -> None:
    assert sorted(FILES) == sorted(file.stem for file in FOLDER.glob("*.json"))


def _summaries() -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Name, the summary of a record, and the steps that it sums up."""
    for name in ("step-text-h200", "step-vl-h200"):
        found = record(name)
        for regime, sides in found["regimes"].items():
            for side in ("ours", "peer"):
                yield f"{name} {regime} {side}", sides[side], _counted(found["steps"][side], regime)
    for name, run in {"7b": record("step-geometry3k-7b-h200"), **record("memory-h200")}.items():
        if isinstance(run, dict):
            for regime, summary in run["regimes"].items():
                yield name, summary, _counted(run["steps"], regime)
    for name, run in record("step-cpu").items():
        if isinstance(run, dict):
            for side in ("peer", "ours"):
                yield f"cpu {name} {side}", run["medians"][side], run["rows"][side]


def _counted(rows: list[dict[str, Any]], regime: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["counted"] and row["regime"] == regime]


SUMMARIES = list(_summaries())


@pytest.mark.parametrize(("name", "summary", "rows"), SUMMARIES, ids=[name for name, _, _ in SUMMARIES])
def test_a_record_s_medians_are_those_of_its_steps(
    name: str, summary: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    assert summary.get("steps", len(rows)) == len(rows)
    for key in ("seconds", "generate", "update", "tokens_per_s"):
        values = [row[key] for row in rows]
        expected = {"median": statistics.median(values), "min": min(values), "max": max(values)}
        assert summary[key] == pytest.approx(expected, rel=1e-3), key


def test_steps_without_a_range_on_the_page_are_near_their_median() -> None:
    for name, summary, _ in SUMMARIES:
        if name in record("memory-h200"):
            seconds = summary["seconds"]
            assert seconds["max"] < 1.1 * seconds["median"], name
            assert seconds["min"] > 0.9 * seconds["median"], name


def test_the_ratios_of_a_record_are_those_of_its_medians() -> None:
    for kind in ("text", "vl"):
        for regime in record(f"step-{kind}-h200")["regimes"].values():
            ours, peer = regime["ours"], regime["peer"]
            seconds = peer["seconds"]["median"] / ours["seconds"]["median"]
            tokens = ours["tokens_per_s"]["median"] / peer["tokens_per_s"]["median"]
            assert regime["step time, peer / ours"] == pytest.approx(seconds)
            assert regime["real tokens/s, ours / peer"] == pytest.approx(tokens)
    for name, run in record("placement-h200x4")["placements"].items():
        assert run["seconds"]["step"] == statistics.median(row["step"] for row in run["rows"]), name


def test_a_row_says_whether_its_goal_is_reached() -> None:
    assert measured.reached(True, True) == "reached"
    assert measured.reached(False, see="5") == "short, see 5"
    assert measured.reached(True, False) == "reached in part"
    assert measured.rounded(28_541.07, 4) == "28,540"
    assert measured.rounded(9_632.3) == "9,630"
