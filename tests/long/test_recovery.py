"""A killed flow, a stopped worker, a cancelled run and a retry, on a real Prefect server with a real worker. A fake one
trains; what a real trainer leaves when it is stopped is in test_segment, and when it is killed in test_whole_run."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import StateType

from infra import processes
from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.servers import mlflow_command, start_server, wait_healthy
from rlcore.segment.journal import read_journal
from rlcore.segment.spec import SegmentManifest
from tasks.ablation.runners import tag_of
from tasks.run import existing_run
from tests.long.prefect_stack import Stack, assert_nothing_left, assert_whole, prefect_stack
from tests.ports import reserved_port
from tests.stores import Parts


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, parts: Parts) -> Iterator[Stack]:
    variables = {"FAKE_STEP_SECONDS": "0.5", **parts.variables("recovery")}
    deployments = ("grpo-geo3k-tiny", "ablate", "ablation-point", "recover")
    with prefect_stack(tmp_path_factory.mktemp("stack"), variables, deployments) as found:
        yield found


def calls(stack: Stack) -> int:
    """How often a trainer was started, over all runs so far."""
    return (stack.settings.data_dir / "calls.txt").read_text().count("train from segment")


def recoveries(run_dir: Path) -> list[dict[str, object]]:
    path = run_dir / "recoveries.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.stacks
def test_a_killed_flow_is_brought_back_by_its_automation_and_follows_its_trainer(stack: Stack) -> None:
    flow_run_id = stack.submit()
    stack.wait_for_step(flow_run_id, 2)
    before = calls(stack)
    run_dir = stack.run_dir(flow_run_id)
    stack.driver(run_dir).kill()
    stack.wait_for(lambda: bool(recoveries(run_dir)), "a recovery")  # Crashed -> automation -> recover
    ended = stack.wait_for_state(flow_run_id, StateType.COMPLETED)
    assert ended.run_count == 2
    assert ended.name == run_dir.name
    assert calls(stack) == before, "the trainer outlived its driver and was followed, not started again"
    (note,) = recoveries(run_dir)
    assert note["flow_run_id"] == str(flow_run_id)
    assert "follows the trainer" in str(note["reason"])
    assert_whole(stack, flow_run_id)
    key = ArtifactFilter(key=ArtifactFilterKey(any_=["recover"]))
    (table, *_) = stack.client.read_artifacts(artifact_filter=key)
    assert run_dir.name in str(table.data)


@pytest.mark.stacks
def test_a_killed_ablation_is_brought_back_and_waits_for_the_points_that_worked_on(stack: Stack) -> None:
    values = ["training.steps=12", "segment.steps=4", "data.template=math"]
    asked = {"experiment": "grpo-geo3k-tiny", "points": [["training.learning_rate=0.01"]], "seeds": [5]}
    deployment = stack.client.read_deployment_by_name("ablate/ablate")
    parameters = {**deployment.parameters, **asked, "overrides": values}
    flow_run_id = stack.client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id
    name = f"grpo-geo3k-tiny-{flow_run_id.hex[:12]}"
    folder = stack.settings.ablations_dir / name
    journals = [stack.settings.runs_dir / f"{name}-{point}-s5" / "journal.jsonl" for point in ("base", "p01")]
    stack.wait_for(lambda: any(map(read_journal, journals)), "a point's first step")
    stack.driver(folder).kill()
    stack.wait_for(lambda: bool(recoveries(folder)), "a recovery")
    assert stack.wait_for_state(flow_run_id, StateType.COMPLETED).run_count == 2
    assert len((folder / "table.csv").read_text().splitlines()) == 3  # its head, base, p01
    assert [[record.step for record in read_journal(path)] for path in journals] == [list(range(1, 13))] * 2
    tagged = FlowRunFilter(tags=FlowRunFilterTags(all_=[tag_of(name)]))
    assert [item.run_count for item in stack.client.read_flow_runs(flow_run_filter=tagged)] == [1, 1]
    assert len(recoveries(folder)) == 1


@pytest.mark.stacks
def test_the_run_of_a_stopped_worker_is_brought_back_once_it_is_silent(stack: Stack) -> None:
    # A flow may take ten seconds to start. The trainer takes 20 s, so that it is at work when the worker has stopped.
    flow_run_id = stack.submit("recovery.silence_seconds=20", "training.steps=40")
    stack.wait_for_step(flow_run_id, 2)
    run_dir = stack.run_dir(flow_run_id)
    driver = stack.driver(run_dir)
    stack.stop_worker()
    stack.wait_for(lambda: not driver.is_running(), "the end of the flow's process")
    assert stack.flow_run(flow_run_id).state.type is StateType.RUNNING, "what Prefect believes for ever"
    processes.kill(existing_run(run_dir.name, stack.settings).trainer_mark)
    before = calls(stack)
    stack.start_worker()
    stack.wait_for(lambda: _recovers(stack, run_dir), "a recovery")
    stack.recover()  # once more, while it waits or runs
    stack.hurry(flow_run_id)
    stack.wait_for_state(flow_run_id, StateType.COMPLETED)
    (note,) = recoveries(run_dir)
    assert "RUNNING, but its driver is gone" in str(note["reason"])
    assert calls(stack) == before + 1
    assert_whole(stack, flow_run_id)


def _recovers(stack: Stack, run_dir: Path) -> bool:
    stack.recover()
    return bool(recoveries(run_dir))


@pytest.mark.stacks
def test_a_cancelled_run_commits_is_left_alone_and_goes_on_when_a_person_retries_it(stack: Stack) -> None:
    flow_run_id = stack.submit("training.steps=104", "segment.steps=100")
    stack.wait_for_step(flow_run_id, 2)
    stack.prefect("flow-run", "cancel", str(flow_run_id))
    stack.wait_for_state(flow_run_id, StateType.CANCELLED)
    manifest = _first_segment(stack.run_dir(flow_run_id))
    assert not manifest.complete
    assert manifest.last_step >= 2
    assert_nothing_left(stack, flow_run_id)
    stack.recover()
    assert stack.flow_run(flow_run_id).state.type is StateType.CANCELLED
    assert not recoveries(stack.run_dir(flow_run_id))

    stack.hurry(flow_run_id)
    stack.prefect("flow-run", "retry", str(flow_run_id))
    assert stack.wait_for_state(flow_run_id, StateType.COMPLETED).run_count == 2
    assert _first_segment(stack.run_dir(flow_run_id)).complete
    assert_whole(stack, flow_run_id)


def _first_segment(run_dir: Path) -> SegmentManifest:
    return SegmentManifest.model_validate_json((run_dir / "segments" / "0000.json").read_text())


def test_a_flow_that_an_outage_ended_comes_back_once_the_outage_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its run is open, and at the end of its training; ``recover`` costs it no try while the outage lasts."""
    own = Settings(data_dir=tmp_path / "servers", mlflow_uri="")
    server, mark = mlflow_command(own, reserved_port()), f"recover-mlflow-{secrets.token_hex(4)}"
    variables = {
        "FAKE_STEP_SECONDS": "0.5",
        "RLFLOW_MLFLOW_URI": server.address,
        "RLFLOW_RETRY_DELAY_SCALE": "0.01",
        "RLFLOW_TRACKING_WAIT_SECONDS": "2",
        **login_of(own).for_mlflow(),
    }
    for name, value in login_of(own).for_mlflow().items():
        monkeypatch.setenv(name, value)  # the test reads MLflow too
    try:
        with prefect_stack(tmp_path, variables) as stack:
            flow_run_id = stack.submit()
            stack.wait_for_state(flow_run_id, StateType.FAILED)
            run_dir = stack.run_dir(flow_run_id)
            unopened = stack.settings.unopened_dir / run_dir.name
            assert not run_dir.exists()
            stack.recover()
            assert stack.flow_run(flow_run_id).state.type is StateType.FAILED
            assert not recoveries(unopened)

            wait_healthy(start_server(server, own, mark), server)
            stack.recover()
            stack.wait_for_step(flow_run_id, 2)
            processes.kill(mark)
            stack.wait_for_state(flow_run_id, StateType.FAILED)
            assert existing_run(run_dir.name, stack.settings).committed_step() == 12, "training went on to its end"
            stack.recover()
            assert stack.flow_run(flow_run_id).state.type is StateType.FAILED
            assert not recoveries(run_dir)

            wait_healthy(start_server(server, own, mark), server)
            stack.recover()
            assert stack.wait_for_state(flow_run_id, StateType.COMPLETED).run_count == 3
            assert len(recoveries(run_dir)) == 1
            assert not unopened.exists()
            assert_whole(stack, flow_run_id)
    finally:
        processes.kill(mark)
