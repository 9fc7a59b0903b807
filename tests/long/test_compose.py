"""The stack of compose.yaml, started from the file itself; a run through it, while each of its services dies once.

There is no docker: ``compose_stack`` says what stands for it and for the images of others.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.long import hosts
from tests.long.compose_run import SERVERS, STEPS

# a loaded machine takes minutes for the servers' tables and the deployments
pytestmark = [pytest.mark.clusters, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compose")
    answer = hosts.inside(folder, "tests.long.compose_run")
    assert answer.returncode == 0, answer.stdout[-3000:] + answer.stderr[-12000:]
    found: dict[str, Any] = json.loads((folder / "happened.json").read_text())
    return found


def test_a_run_through_compose_outlives_the_death_of_every_service(happened: dict[str, Any]) -> None:
    assert happened["starts"] == {
        **dict.fromkeys(SERVERS, 2),  # one of them after its death
        "worker": 3,  # and one after its stop
        "deploy": 1,
        **dict.fromkeys(("bucket", "mlflow-user"), 2),  # a second up repeats what they do
    }
    assert happened["killed"].keys() == {*SERVERS, "worker"}
    assert all(0 < step < STEPS for step in happened["killed"].values()), "each died while the run trained"
    assert happened["steps"] == list(range(1, STEPS + 1))
    assert happened["tracked"] == list(range(1, STEPS + 1))
    assert happened["status"] == "FINISHED"
    steps, states = zip(*happened["registered"], strict=True)  # evaluate-latest may have registered a champion as well
    assert (steps.count(STEPS), len(set(steps)), set(states)) == (1, len(steps), {"READY"})
    assert happened["artifact"] > 0  # bytes of a file that lies in the object store


def test_the_servers_of_compose_want_a_password(happened: dict[str, Any]) -> None:
    assert happened["refused"] == {"prefect": 401, "mlflow": 401}
    assert happened["worker is admin"] is False


def test_a_stopped_worker_commits_before_it_ends(happened: dict[str, Any]) -> None:
    """``docker compose stop`` in the middle of a segment: the run goes on from the step that it had reached."""
    stopped = happened["stopped"]
    assert stopped["seconds"] < stopped["allowed"]
    assert stopped["committed"] >= stopped["step"]
