"""tests/skips.toml lists every test that may be skipped; whatever else is skipped fails (tests/skips.py)."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import skips

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = """
from tests import skips

skips.needs = lambda: (
    skips.Need("browser", "a browser", ("test_a.py::test_page", "test_a.py::test_of[two*"), debian=("chromium",)),
    skips.Need("gpu", "a GPU", ("test_a.py::test_kernel*",), remedy="Buy one.", ci_may_lack_it=True),
    skips.Need("disk", "a disk", ("test_a.py::test_good",)),
)
skips.FACTS = {"browser": lambda: "none is on the PATH", "gpu": lambda: "torch finds none", "disk": lambda: ""}
pytest_plugins = ["tests.skips"]
"""
TESTS = """
import pytest

def test_good(): ...
def test_page(): ...
def test_kernel(): ...
def test_kernel_of_the_head(): ...
@pytest.mark.parametrize("name", ["one", "two"])
def test_of(name): ...
def test_skips_itself(): pytest.skip("I would rather not")
@pytest.mark.skipif(True, reason="not today")
def test_marked(): ...
@pytest.fixture
def shy(): pytest.skip("no fixture")
def test_of_the_fixture(shy): ...
@pytest.mark.xfail(reason="known bug")
def test_expected_to_fail(): assert False
@pytest.mark.xfail(reason="mended long ago")
def test_that_passes_all_the_same(): ...
@pytest.mark.parametrize("row", [])
def test_of_nothing(row): ...
"""
REFUSED = {
    "test_skips_itself": "I would rather not",
    "test_marked": "not today",
    "test_of_the_fixture": "no fixture",
    "test_expected_to_fail": "xfail: known bug",
    "test_that_passes_all_the_same": "xfail: mended long ago",
    "test_of_nothing": "got empty parameter set",
}


def run(folder: Path, *arguments: str, ci: str = "", module: str = TESTS) -> tuple[int, str]:
    (folder / "conftest.py").write_text(PLUGIN)
    (folder / "test_a.py").write_text(module)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RLFLOW_TESTS": ci}
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def outcomes(said: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"PASSED": set(), "FAILED": set(), "ERROR": set()}
    for word, test in re.findall(r"^(PASSED|FAILED|ERROR) test_a\.py::(\S+)", said, re.MULTILINE):
        found[word].add(test)
    return found


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_only_listed_tests_are_skipped_and_they_are_counted(tmp_path: Path, processes: tuple[str, ...]) -> None:
    code, said = run(tmp_path, *processes)
    assert code == pytest.ExitCode.TESTS_FAILED, said
    found = outcomes(said)
    assert found["PASSED"] == {"test_good", "test_of[one]"}
    assert {name.partition("[")[0] for name in found["FAILED"] | found["ERROR"]} == set(REFUSED)
    for reason in REFUSED.values():
        assert f"This test was skipped or marked xfail ({reason}" in said
    assert " 4 tests did not run " in said
    assert "2 need a browser: none is on the PATH. As root: apt-get install chromium.\n" in said
    assert "2 need a GPU: torch finds none. Buy one.\n" in said


def test_ci_skips_only_what_it_may_lack(tmp_path: Path) -> None:
    code, said = run(tmp_path, "-k", "page or kernel or of", ci="ci")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert {"test_page", "test_of[two]"} <= outcomes(said)["ERROR"]
    assert "This test needs a browser: none is on the PATH. As root: apt-get install chromium. CI must have it." in said
    assert " 2 tests did not run " in said


@pytest.mark.parametrize("processes", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_module_cannot_skip_itself(tmp_path: Path, processes: tuple[str, ...]) -> None:
    module = "import pytest\npytest.importorskip('no_such_module')\ndef test_it(): ...\n"
    code, said = run(tmp_path, *processes, module=module)
    assert code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), said
    assert "and that is not allowed" in said


def test_no_other_value_of_the_variable_is_taken(tmp_path: Path) -> None:
    code, said = run(tmp_path, ci="relaxed")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "RLFLOW_TESTS is 'relaxed', and the only value is ci. Unset it outside of CI." in said


def test_each_need_is_measured_and_says_what_to_do() -> None:
    assert {need.name for need in skips.needs()} == set(skips.FACTS)
    for need in skips.needs():
        assert need.debian or need.remedy, need.name
        assert need.tests, need.name
    ci_must_have = [need for need in skips.needs() if not need.ci_may_lack_it]
    assert {need.name for need in ci_must_have} == {"browser", "postgresql", "swift", "openssl"}
    assert all(need.debian for need in ci_must_have)


def test_each_pattern_of_the_list_still_matches_a_test() -> None:
    """Parameters are not compared: only a collection knows them."""
    tests = set(functions_of_tests())
    for need in skips.needs():
        for pattern in need.tests:
            without_parameters = pattern.partition("[")[0]
            assert any(skips.matches(without_parameters, test) for test in tests), f"{need.name}: {pattern}"


def functions_of_tests() -> Iterator[str]:
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield f"{name}::{node.name}"


def test_no_test_skips_itself() -> None:
    """On this machine its condition may be false, so that no run here would show it."""
    own = re.compile(r"pytest\.(mark\.)?(skip|skipif|importorskip|xfail)\b|unittest\.skip|SkipTest")
    for path in (ROOT / "tests").rglob("*.py"):
        if path.name in ("skips.py", "test_skips.py"):
            continue
        assert not own.search(path.read_text()), f"{path.name}: list the test in tests/skips.toml instead"
