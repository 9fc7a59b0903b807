"""Skips tests where the machine lacks what tests/skips.toml lists for them, and fails every other skip.

``python -m tests.skips`` shows what this machine lacks; with ``--packages`` the Debian packages that provide it.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).with_suffix(".toml")
_LISTED = pytest.StashKey[bool]()
_REFUSED = (
    "This test was skipped or marked xfail ({reason}), and that is not allowed. A test may be skipped only where the "
    "machine lacks something that it needs: list the test in tests/skips.toml and delete its own skip. Otherwise make "
    "it run, or delete it."
)


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a machine may lack, and the tests that cannot run without it."""

    name: str
    needs: str
    tests: tuple[str, ...]
    debian: tuple[str, ...] = ()
    remedy: str = ""
    ci_may_lack_it: bool = False

    def covers(self, node_id: str) -> bool:
        return any(matches(pattern, node_id) for pattern in self.tests)

    def lacking(self) -> str:
        """What is missing and what to do about it; empty where the machine has it."""
        missing = measure(self.name)
        install = f"As root: apt-get install {' '.join(self.debian)}." if self.debian else ""
        return " ".join(filter(None, (f"{missing}.", install, self.remedy))) if missing else ""


@cache
def needs() -> tuple[Need, ...]:
    return tuple(
        Need(name, **{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()})
        for name, table in tomllib.loads(LIST.read_text()).items()
    )


def matches(pattern: str, node_id: str) -> bool:
    """Only * is special in ``pattern``, since node ids contain brackets."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), node_id, re.DOTALL) is not None


def is_ci() -> bool:
    """The variable forbids skips that are allowed elsewhere. No value of it allows one."""
    value = os.environ.get("RLFLOW_TESTS", "")
    if value not in ("", "ci"):
        raise pytest.UsageError(f"RLFLOW_TESTS is {value!r}, and the only value is ci. Unset it outside of CI.")
    return value == "ci"


def _gpus(at_least: int) -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "" if count >= at_least else f"torch finds {count or 'none'}"


def _flash_attention(version: str) -> str:
    from rlcore.models.flash import MODULES

    if missing := _gpus(1):
        return missing
    import torch

    module, majors = next(made for name, made in MODULES.items() if name == version)
    parts = module.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]  # find_spec raises where a parent is missing
    if not all(importlib.util.find_spec(name) is not None for name in names):
        return f"there is no module {module}"
    major = torch.cuda.get_device_capability()[0]
    return "" if major in majors else f"the compute capability of this GPU is {major}"


def _mounts() -> str:
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, text=True, check=False)
        if tried.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return tried.stderr.strip()


def _namespaces() -> str:
    from tests.long.hosts import why_not

    return why_not() or ""


def _debootstrap() -> str:
    from tests.long.image_build import why_not

    return why_not()


def _postgresql() -> str:
    from tests.stores import postgres_programs

    return _error_of(postgres_programs)


def _swift() -> str:
    from tests.swift import check_programs

    return _error_of(check_programs)


def _browser() -> str:
    from tests.tour.pages import find_browser

    return _error_of(find_browser)


def _error_of(find: Callable[[], object]) -> str:
    try:
        find()
    except FileNotFoundError as error:
        return str(error)
    return ""


def _syscall_filter() -> str:
    from rlcore.rewards.sandbox import MACHINES

    return "" if platform.machine() in MACHINES else f"this is {platform.machine()}"


# What is missing, in words; empty where the machine has it.
FACTS: dict[str, Callable[[], str]] = {
    "gpu": lambda: _gpus(1),
    "two_gpus": lambda: _gpus(2),
    "four_gpus": lambda: _gpus(4),
    "flash_attention_2": lambda: _flash_attention("FA2"),
    "flash_attention_3": lambda: _flash_attention("FA3"),
    "flash_attention_4": lambda: _flash_attention("FA4"),
    "browser": _browser,
    "postgresql": _postgresql,
    "swift": _swift,
    "openssl": lambda: "" if shutil.which("openssl") else "it is not on the PATH",
    "namespaces": _namespaces,
    "debootstrap": _debootstrap,
    "mounts": _mounts,
    "root": lambda: "" if os.geteuid() == 0 else f"this is user {os.geteuid()}",
    "linux": lambda: "" if sys.platform == "linux" else f"this is {sys.platform}",
    "syscall_filter": _syscall_filter,
}


@cache
def measure(name: str) -> str:
    return FACTS[name]()


def pytest_configure() -> None:
    is_ci()  # refuses a wrong value before anything runs


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for need in needs():
        if not need.covers(item.nodeid) or not (missing := need.lacking()):
            continue
        if is_ci() and not need.ci_may_lack_it:
            pytest.fail(f"This test needs {need.needs}: {missing} CI must have it.", pytrace=False)
        item.stash[_LISTED] = True
        pytest.skip(f"{need.needs}: {missing}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    expected_to_fail = getattr(report, "wasxfail", None)
    if (report.skipped and not item.stash.get(_LISTED, False)) or expected_to_fail is not None:
        _refuse(report, expected_to_fail)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself would hide all of its tests."""
    report = yield
    if report.skipped:
        _refuse(report, None)
    return report


def _refuse(report: Any, expected_to_fail: str | None) -> None:
    reason = (
        report.longrepr[2].removeprefix("Skipped: ")
        if isinstance(report.longrepr, tuple)
        else f"xfail: {expected_to_fail}"
    )
    report.__dict__.pop("wasxfail", None)
    report.outcome = "failed"
    report.longrepr = _REFUSED.format(reason=reason)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if not skipped:
        return
    terminalreporter.section(f"{len(skipped)} test{'s' * (len(skipped) > 1)} did not run")
    for reason, count in Counter(report.longrepr[2] for report in skipped).most_common():
        terminalreporter.write_line(f"{count:>4} need {reason.removeprefix('Skipped: ')}")


def main() -> int:
    """Returns 1 where CI lacks something that it must have."""
    missing = {need: text for need in needs() if (text := need.lacking())}
    if "--packages" in sys.argv:
        sys.stdout.writelines(f"{name}\n" for name in sorted({name for need in missing for name in need.debian}))
        return 0
    for need, text in missing.items():
        sys.stdout.write(f"Missing: {need.needs}. {text[:1].upper()}{text[1:]}\n")
    return int(is_ci() and any(not need.ci_may_lack_it for need in missing))


if __name__ == "__main__":
    sys.exit(main())
