"""The local stack as ``make up`` starts it: real servers and workers, the fake trainer behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.client.schemas.objects import StateType

from infra import processes
from infra.processes import is_running
from infra.stack.login import login_file
from infra.stack.servers import answers
from infra.stack.supervisor import mark_of
from tests.long.local_stack import Place, place_at, wait_for

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_at(tmp_path, {}) as found:
        yield found


def test_a_run_outlives_its_servers_its_worker_and_the_whole_stack(place: Place) -> None:
    assert "down" in place.stack("status")
    assert f"user:password is in {login_file(place.settings)}" in place.stack("up")
    # over SQLite, Prefect can be silent for as long as it waits for a lock: a minute
    wait_for(lambda: "pool gpu     0 running of 1 at a time, 0 waiting" in place.stack("status"), "an idle pool")
    supervisor = place.state().supervisor

    wait_for(place.scheduled, "runs that schedules ask for")

    flow_run_id = place.submit(steps=200)
    wait_for(lambda: len(place.steps(flow_run_id)) >= 2, "step 2")
    assert place.processes_that_show_the_login() == []
    place.stack("up")  # again: the same stack
    assert place.state().supervisor == supervisor

    place.kill("mlflow")
    place.kill("prefect")
    wait_for(lambda: answers(f"{place.state().prefect}/api/health", 2), "Prefect's answer")
    place.kill("worker gpu")

    taken = len(place.steps(flow_run_id))
    wait_for(lambda: len(place.steps(flow_run_id)) >= taken + 2, "two more steps")
    assert "restarted 1 x" in place.stack("status")

    place.stack("down")
    assert not is_running(supervisor)
    assert "down already" in place.stack("down")
    for name in ("supervisor", "gpu", "cpu", "mlflow", "prefect"):
        assert not processes.marked(mark_of(place.settings, name))
    assert not answers(f"http://127.0.0.1:{place.settings.prefect_port}/api/health", 1)

    replace(place, env={**place.env, "FAKE_STEP_SECONDS": "0.05"}).stack("up")  # what is left of it goes fast
    finished = place.run_dir(flow_run_id) / "finished"
    # Over SQLite, Prefect once answered only once a minute for five minutes; the report is then tried again.
    wait_for(finished.exists, "the end of the run", seconds=600)
    assert place.steps(flow_run_id) == list(range(1, 201))
    client = MlflowClient(tracking_uri=place.settings.database_uri)
    experiment = client.get_experiment_by_name("grpo-geo3k-tiny")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    points = client.get_metric_history(run.info.run_id, "reward/mean")
    assert sorted(point.step for point in points) == list(range(1, 201))
    with place.client() as prefect:
        wait_for(lambda: prefect.read_flow_run(flow_run_id).state.type is StateType.COMPLETED, "Prefect's word")
    place.stack("down")
    assert place.files_with_the_login() == [login_file(place.settings)]
