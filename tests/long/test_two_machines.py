"""Machines with one folder, clocks five minutes apart and pids that collide, each with a network, a file
system and processes of its own; one of them is lost while it trains and another one goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.long import hosts
from tests.long.machines_run import AHEAD, BEHIND, UNDISTURBED

_DEADLINE = 120.0  # of a lease, in seconds


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("machines")
    answer = hosts.inside(folder, "tests.long.machines_run")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-9000:]
    found: dict[str, Any] = json.loads((folder / "happened.json").read_text())
    return found


pytestmark = [pytest.mark.clusters, pytest.mark.timeout(1800)]  # five trainers start, and seven flows


def test_a_living_trainer_is_followed_and_not_replaced_by_a_machine_with_another_clock(
    happened: dict[str, Any],
) -> None:
    assert happened["trainers while the first machine lived"] == {AHEAD: 1, BEHIND: 1}
    for answer in happened["refused"]:
        assert f"is held by pid {happened['pid']} on node/" in answer


def test_recovery_and_cleaning_elsewhere_leave_a_living_run_alone(happened: dict[str, Any]) -> None:
    asked_on_ahead, asked_on_behind = happened["recover"]
    # The newest driver of each run is the flow that follows it, on the machine that the run is named after.
    assert asked_on_ahead.splitlines() == [f"{AHEAD} leave True", f"{BEHIND} leave None"]
    assert asked_on_behind.splitlines() == [f"{AHEAD} leave None", f"{BEHIND} leave True"]
    assert happened["removed"] == []
    assert happened["what is written stays"]


def test_the_lease_of_a_lost_machine_is_taken_over_after_the_deadline(happened: dict[str, Any]) -> None:
    for run in (AHEAD, BEHIND):
        assert happened["taken over after"][run] >= _DEADLINE - 15, "counted from its last renewal"
        assert happened["trainers"][run] == 2
        assert happened["steps when it died"][run] > 0


@pytest.mark.parametrize("run", [AHEAD, BEHIND])
def test_the_result_is_that_of_an_undisturbed_run(happened: dict[str, Any], run: str) -> None:
    assert happened["compared"][run] == {"different": [], "missing_steps": [], "duplicate_steps": []}
    assert happened["weights"][run] == happened["weights"][UNDISTURBED]


def test_a_mirrored_run_goes_on_from_the_store_on_a_machine_with_another_clock(tmp_path: Path) -> None:
    answer = hosts.inside(tmp_path, "tests.long.machines_mirror")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-9000:]
    happened = json.loads((tmp_path / "mirrored.json").read_text())
    assert happened["compared"] == {"different": [], "missing_steps": [], "duplicate_steps": []}
    restored, expected = happened["weights"]
    assert restored == expected
    assert happened["from"].startswith("from step "), "not from the start"
