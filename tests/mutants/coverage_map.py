"""A pytest plugin: which test runs which line of the mutated packages, and how long it takes.

The file that it writes is named by the environment variable MUTANTS_MAP.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

from tests.mutants.mutants import PACKAGES

_root = Path.cwd()
_coverage = coverage.Coverage(data_file=None, source=[str(_root / package) for package in PACKAGES], config_file=False)
_seconds: dict[str, float] = {}
_unfit: set[str] = set()  # failed or skipped without any fault


def pytest_configure() -> None:
    _coverage.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without those that start Prefect's server: one of them takes longer than all others that run a line."""
    items[:] = [item for item in items if "_prefect" not in getattr(item, "fixturenames", ())]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    # A fixture may serve all tests of the file, and runs for the first.
    _coverage.switch_context(item.nodeid.partition("::")[0])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    _coverage.switch_context(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    _coverage.switch_context(item.nodeid.partition("::")[0])
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.outcome != "passed":
        _unfit.add(report.nodeid)


def pytest_sessionfinish() -> None:
    _coverage.stop()
    data = _coverage.get_data()
    lines: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        lines[str(Path(file).relative_to(_root))] = data.contexts_by_lineno(file)
    result = {"seconds": _seconds, "unfit": sorted(_unfit), "lines": lines}
    Path(os.environ["MUTANTS_MAP"]).write_text(json.dumps(result))
