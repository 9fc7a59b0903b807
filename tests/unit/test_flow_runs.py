"""What a flow run is called, and what a retry of it begins with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest
from prefect.context import FlowRunContext

from infra.settings import Settings
from tasks.ablation.study import open_ablation, point_name
from tasks.experiments import load_experiment
from tasks.open import choose_experiment, find_run, open_run
from tasks.run import append_line, drivers, experiment_of_retry, experiment_of_run, flow_run_name
from tasks.run import open_run as open_here

FLOW_RUN = SimpleNamespace(id=UUID("0123456789abcdef0123456789abcdef"), deployment_id=None)
TINY = "grpo-geo3k-tiny"


@pytest.fixture(autouse=True)
def _data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))


def at_work(parameters: dict[str, object] | None, flow_run: object = FLOW_RUN) -> FlowRunContext:
    return FlowRunContext.model_construct(flow_run=flow_run, parameters=parameters)


def test_a_flow_run_is_called_as_its_run() -> None:
    with at_work({"run_id": "mine", "experiment": "toy"}):
        assert flow_run_name() == "mine"
    for parameters in ({"run_id": None, "experiment": "toy"}, {"experiment": "toy"}):
        with at_work(parameters):
            assert flow_run_name() == "toy-0123456789ab"
    for context in (at_work(None), at_work({"experiment": "toy"}, flow_run=None)):
        with context, pytest.raises(RuntimeError, match="flow_run_name"):
            flow_run_name()
    with pytest.raises(RuntimeError, match="flow_run_name"):
        flow_run_name()


def test_a_point_is_called_as_its_run() -> None:
    open_ablation.fn(TINY, None, "study", points=[["training.learning_rate=1"]], seeds=[1, 2])
    with at_work({"ablation": "study", "point": "p01", "seed": 2}):
        assert point_name() == "study-p01-s2"
    with at_work(None), pytest.raises(RuntimeError, match="point_name"):
        point_name()
    with pytest.raises(RuntimeError, match="point_name"):
        point_name()


def test_a_retry_begins_with_what_its_run_was_begun_with() -> None:
    begun = load_experiment(TINY, ["seed=7"])
    assert experiment_of_retry("run") is None, "nothing is at work"
    with at_work({"experiment": TINY}):
        assert experiment_of_retry("run") is None, "there is no such run"
        run = open_here(begun, None, Settings())
        assert run.run_id == f"{TINY}-0123456789ab"
        assert experiment_of_retry(None) == experiment_of_retry(run.run_id) == begun
        assert choose_experiment.fn(None, experiment=TINY) == begun
    other = SimpleNamespace(id=UUID(int=7), deployment_id=None)
    with at_work({"experiment": TINY}, flow_run=other):
        assert experiment_of_retry(run.run_id) is None, "another flow run's"
    assert experiment_of_run(run.run_id, TINY) == begun
    assert experiment_of_run(run.run_id, "grpo-gsm8k-tiny") is None
    assert experiment_of_run(None, TINY) is None
    assert find_run.fn(run.run_id) == run


def test_an_opened_run_loses_what_its_killed_drivers_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr("tasks.open.processes.kill_all", ended.append)
    experiment = load_experiment(TINY)
    run = open_run.fn(experiment, "run")
    assert ended == []
    (driver,) = drivers(run)
    dead = driver.model_copy(update={"pid": 2**22 + 1})
    for flow_run_id in ("11111111-aaaa", None):
        line = dead.model_copy(update={"flow_run_id": flow_run_id}).model_dump_json()
        append_line(run.run_dir / "drivers.jsonl", line)
    append_line(run.run_dir / "drivers.jsonl", driver.model_copy(update={"flow_run_id": "living"}).model_dump_json())
    assert open_run.fn(experiment, "run") == run
    assert len(ended) == 1
    assert "11111111" in ended[0]
    changed = load_experiment(TINY, ["seed=9"])
    assert open_run.fn(changed, "run", allow_changes=True).experiment == changed
