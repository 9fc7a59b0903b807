"""The benchmarks that start engines run to their end with tiny models. Their seconds mean nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import tiny
from tests.bench.guard import BENCHMARKS, MAIN_ROWS
from tests.bench.tiny import PROGRAMS


@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.long and program.positive])
def test_a_benchmark_runs_to_its_end(name: str, tmp_path: Path) -> None:
    tiny.check_figures(name, tiny.last_json(tiny.run(name, tmp_path)))


def test_the_guard_measures_every_main_row(tmp_path: Path) -> None:
    """It runs whole steps, updates and sampling, for text and pictures; figures of a CPU are compared with nothing."""
    printed = tiny.run("guard", tmp_path)
    assert {path.stem for path in tmp_path.glob("*.json")} == set(BENCHMARKS)
    for row in MAIN_ROWS:
        (line,) = (line for line in printed.splitlines() if line.startswith(f"| {row} |"))
        _, _, _, accepted, measured, _, verdict, _ = (cell.strip() for cell in line.split("|"))
        assert float(accepted) > 0
        assert float(measured) >= 0  # to two places
        assert verdict.startswith("not compared")
    steps = json.loads((tmp_path / "step-vl.json").read_text())
    assert steps["regimes"]["fixed"]["prompt"]["median"] == 2 * 4 * 48
    assert steps["regimes"]["fixed"]["completion"]["median"] == 2 * 4 * 48, "every completion is at the cap"


def test_every_algorithm_has_a_row_in_the_table_of_a_tiny_run(tmp_path: Path) -> None:
    printed = tiny.run("algorithms", tmp_path)
    assert "\n| grpo | " in printed
    outcomes = json.loads((tmp_path / "results.json").read_text())
    by_algorithm = {outcome["algorithm"]: outcome for outcome in outcomes}  # in any order: two processes run at once
    assert set(by_algorithm) == {None, "grpo"}
    assert by_algorithm[None]["completions"] == 0, "the policy that the run starts from"
    assert by_algorithm["grpo"]["completions"] > 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000
