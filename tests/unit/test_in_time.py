"""Which long tests a limited time is enough for."""

from __future__ import annotations

import pytest

from tests.in_time import fitting, slowness


def test_files_are_taken_from_the_given_one_on_while_they_fit() -> None:
    seconds = {"a": 100.0, "b": 300.0, "c": 50.0, "d": 40.0}
    assert fitting(["a", "b", "c", "d"], seconds, available=200, first=0) == ["a", "c", "d"], "b is too long"
    assert fitting(["a", "b", "c", "d"], seconds, available=350, first=1) == ["b", "c"], "none is left for d"
    assert fitting(["a", "b", "c", "d"], seconds, available=490, first=2) == ["c", "d", "a", "b"]
    assert fitting(["a", "b", "c", "d"], seconds, available=0, first=6) == []


def test_a_file_that_is_not_on_record_takes_five_seconds() -> None:
    assert fitting(["new", "newer"], {}, available=9, first=0) == ["new"]


def test_slowness_compares_the_files_that_both_know() -> None:
    assert slowness({"a": 30.0, "b": 20.0, "new": 500.0}, {"a": 15.0, "b": 10.0, "long": 400.0}) == 2.0
    with pytest.raises(ValueError, match="make test first"):
        slowness({"new": 500.0}, {"a": 15.0})
