"""A pytest plugin: which test runs which line of the mutated packages, and how long it takes.

The environment variable MUTANTS_MAP names the file that it writes. With MUTANTS_PROCESSES the tests that start
Prefect's server are kept, and what the processes of a test run counts for the test.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

from tests.mutants.mutants import PACKAGES

_root = Path.cwd()
_sources = [str(_root / package) for package in PACKAGES]
_coverage = coverage.Coverage(data_file=None, source=_sources, config_file=False)
_processes = bool(os.environ.get("MUTANTS_PROCESSES"))
_folder = Path(os.environ["MUTANTS_MAP"]).with_suffix(".processes")
_seconds: dict[str, float] = {}
_unfit: set[str] = set()  # failed or skipped without any fault


def pytest_configure() -> None:
    if _processes:
        # coverage.py starts by itself in each Python process that finds this variable; the context is the test.
        shutil.rmtree(_folder, ignore_errors=True)
        _folder.mkdir()
        lines = ["[run]", "parallel = true", "patch = _exit", f"data_file = {_folder / 'data'}", "context = ${CONTEXT}"]
        (_folder / "settings").write_text("\n".join([*lines, "source =", *(f"  {path}" for path in _sources)]))
        os.environ["COVERAGE_PROCESS_START"] = str(_folder / "settings")
    _coverage.start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without those that start Prefect's server: one of them takes longer than all others that run a line."""
    if not _processes:
        items[:] = [item for item in items if "_prefect" not in getattr(item, "fixturenames", ())]


def _switch_to(context: str) -> None:
    _coverage.switch_context(context)
    os.environ["CONTEXT"] = context


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    # A fixture may serve all tests of the file, and runs for the first.
    _switch_to(item.nodeid.partition("::")[0])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    _switch_to(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    _switch_to(item.nodeid.partition("::")[0])
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if report.outcome != "passed":
        _unfit.add(report.nodeid)


def pytest_sessionfinish() -> None:
    _coverage.stop()
    lines: dict[str, dict[int, set[str]]] = {}
    for data in (_coverage.get_data(), *_data_of_processes()):
        for file in data.measured_files():
            known = lines.setdefault(str(Path(file).relative_to(_root)), {})
            for line, contexts in data.contexts_by_lineno(file).items():
                known.setdefault(line, set()).update(contexts)
    told = {path: {line: sorted(tests) for line, tests in known.items()} for path, known in lines.items()}
    result = {"seconds": _seconds, "unfit": sorted(_unfit), "lines": told}
    Path(os.environ["MUTANTS_MAP"]).write_text(json.dumps(result))


def _data_of_processes() -> Generator[coverage.CoverageData]:
    for path in _folder.glob("data.*"):
        data = coverage.CoverageData(str(path))
        try:
            data.read()
        except coverage.CoverageException:  # its process was killed while it wrote
            continue
        yield data
