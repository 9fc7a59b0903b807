"""Every program of tests/bench has a tiny run in a test, and every other module there is used."""

from __future__ import annotations

import re
from pathlib import Path

from tests.bench.guard import BENCHMARKS
from tests.bench.tiny import GUARDED, PROGRAMS, ROOT

BENCH = ROOT / "tests" / "bench"
MODULES = {path.stem: path.read_text() for path in BENCH.glob("*.py")}


def programs(modules: dict[str, str]) -> set[str]:
    return {name for name, text in modules.items() if '\nif __name__ == "__main__":' in text}


def test_every_program_is_run_by_a_test() -> None:
    """tests/unit/test_benchmarks.py and tests/long/test_tiny_benchmarks.py run PROGRAMS; the guard runs GUARDED."""
    assert programs(MODULES) == {*PROGRAMS, *GUARDED}, "add the new program to tests/bench/tiny.py"
    assert {words[0] for words in BENCHMARKS.values()} == set(GUARDED)
    assert not set(GUARDED) & PROGRAMS.keys()


def test_a_program_without_a_tiny_run_is_found() -> None:
    new = {"newer": 'def main() -> None: ...\n\n\nif __name__ == "__main__":\n    main()\n'}
    assert programs(MODULES | new) - {*PROGRAMS, *GUARDED} == {"newer"}


def test_every_other_module_is_imported() -> None:
    others = MODULES.keys() - programs(MODULES)
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    imported = {name for path in files for name in re.findall(r"from tests\.bench\.(\w+) import", path.read_text())}
    imported |= {name for path in files for name in re.findall(r"from tests\.bench import (\w+)", path.read_text())}
    assert others - imported == set()
