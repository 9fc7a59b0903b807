"""What recover finds of a flow that an outage ended before its run was open."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from infra import processes
from infra.errors import ServerError
from infra.settings import Settings
from rlcore.errors import ConfigError
from rlcore.failures import Failure
from tasks import open as opening
from tasks import run as runs
from tasks.driver.failures import read_outage, unopened_runs
from tasks.driver.jobs import jobs_mark
from tasks.experiments import load_experiment
from tasks.open import note_if_unopened
from tasks.run import drivers, existing_run


@pytest.fixture
def flow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The flow run at work, started by a worker."""
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    found = SimpleNamespace(id=uuid4(), deployment_id=uuid4())
    context = SimpleNamespace(get=lambda: SimpleNamespace(flow_run=found, parameters={}))
    for module in (opening, runs):
        monkeypatch.setattr(module, "FlowRunContext", context)
    return found


def fail(error: Exception) -> None:
    with pytest.raises(type(error)), note_if_unopened("run"):
        raise error


def test_a_run_that_could_not_be_opened_is_noted_until_it_is(flow_run: SimpleNamespace) -> None:
    fail(ServerError("no MLflow server answers"))
    (run,) = unopened_runs(Settings())
    (driver,) = drivers(run)
    assert (run.run_id, driver.flow_run_id, driver.deployed) == ("run", str(flow_run.id), True)
    outage = read_outage(run)  # as recover asks
    assert outage is not None
    assert (outage.failure, outage.error) == (Failure.TRACKING, "no MLflow server answers")
    assert not (Settings().runs_dir / "run").exists(), "a folder would hide the run in the store"
    with note_if_unopened("run"):
        pass
    assert not unopened_runs(Settings())


@pytest.mark.parametrize("end", ["opened in a terminal", "another error"])
def test_the_note_of_an_unopened_run_is_removed(flow_run: SimpleNamespace, end: str) -> None:
    fail(ServerError("no MLflow server answers"))
    assert unopened_runs(Settings())
    if end == "another error":
        fail(ConfigError("a typo"))
    else:
        flow_run.deployment_id = None
        fail(ServerError("no MLflow server answers"))
        assert unopened_runs(Settings()), "the deployed flow run is still to be restarted"
        with note_if_unopened("run"):
            pass
    assert not unopened_runs(Settings())


def test_the_run_of_a_flow_that_comes_back_has_a_folder_already(flow_run: SimpleNamespace) -> None:
    runs.open_run(load_experiment("grpo-geo3k-tiny"), "run", Settings())
    fail(ServerError("no MLflow server answers"))
    run = existing_run("run", Settings())
    assert read_outage(run) is not None
    assert not unopened_runs(Settings())


@pytest.mark.parametrize("deployed", [True, False])
def test_a_mistake_and_a_flow_of_a_terminal_are_left_to_the_person(flow_run: SimpleNamespace, deployed: bool) -> None:
    if not deployed:
        flow_run.deployment_id = None
    fail(ConfigError("a typo") if deployed else ServerError("no MLflow server answers"))
    assert not unopened_runs(Settings())


def test_the_temporary_folders_of_a_killed_flows_jobs_go_when_the_run_is_continued(
    flow_run: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    experiment = load_experiment("grpo-geo3k-tiny")
    run = opening.open_run.fn(experiment, "run")
    (driver,) = drivers(run)
    killed, elsewhere = str(uuid4()), str(uuid4())
    for gone in (
        driver.model_copy(update={"flow_run_id": killed, "started": driver.started - 1000}),
        driver.model_copy(update={"flow_run_id": elsewhere, "host": "another/12345678"}),
    ):
        runs.append_line(run.run_dir / "drivers.jsonl", gone.model_dump_json())
    folders = {
        name: processes.temporary_folder(f"{jobs_mark(name)}1") for name in (killed, elsewhere, str(flow_run.id))
    }
    for folder in folders.values():
        folder.mkdir()
    opening.open_run.fn(experiment, "run")
    assert {name for name, folder in folders.items() if folder.exists()} == {elsewhere, str(flow_run.id)}
