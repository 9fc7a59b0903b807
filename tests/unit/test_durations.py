"""The record of how long each file of tests takes."""

from __future__ import annotations

from pathlib import Path

from tests.durations import ROOT, recorded, seconds_by_file


def test_every_file_on_record_exists() -> None:
    assert [name for name in recorded() if not (ROOT / name).is_file()] == []


def test_the_seconds_of_a_file_are_those_of_its_tests_in_the_slower_run(tmp_path: Path) -> None:
    case = '<testcase classname="{}" name="test" time="{}"/>'
    interrupted = '<testcase classname="tests.unit.test_a" name="test"/>'
    runs = {
        "test.xml": [("tests.unit.test_a", 4.0), ("tests.long.test_b", 6.5), ("tests.unit.test_a", 3.0)],
        "test-stacks.xml": [("tests.long.test_b", 9.0), ("tests.unit.test_short", 4.9)],
    }
    for name, cases in runs.items():
        lines = "".join(case.format(*values) for values in cases)
        (tmp_path / name).write_text(f"<testsuites><testsuite>{lines}{interrupted}</testsuite></testsuites>")
    seconds = seconds_by_file(sorted(tmp_path.iterdir()))
    assert list(seconds.items()) == [("tests/long/test_b.py", 9), ("tests/unit/test_a.py", 7)]
