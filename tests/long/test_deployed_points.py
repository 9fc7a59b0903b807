"""An ablation's points as runs of a deployment, at a real Prefect server without a worker."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Completed, Failed, Running

from flows.ablate import ablate
from flows.ablation_point import ablation_point
from rlcore.ablation.plan import Job, make_plan
from rlcore.config import AblationConfig
from tasks.ablation import runners as ablation_points
from tasks.ablation.runners import DEPLOYMENT, DeployedPoints, cancel_points, tag_of
from tasks.ablation.study import Ablation
from tasks.experiments import load_experiment

TINY = "grpo-geo3k-tiny"


@pytest.fixture
def client(_prefect: None) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        client.create_deployment(client.create_flow(ablation_point), DEPLOYMENT.split("/")[1])
        yield client


@pytest.fixture
def ablation(tmp_path: Path) -> Ablation:
    settings = AblationConfig(points=(("training.learning_rate=1",),), seeds=(4,))
    plan = make_plan(tmp_path.name.lower(), TINY, ["training.steps=8"], settings, partial(load_experiment, TINY))
    return Ablation(plan, tmp_path)


def flow_run_of(client: SyncPrefectClient, runner: DeployedPoints, ablation: Ablation, job: Job) -> FlowRun:
    return client.read_flow_run(runner.flow_runs[ablation.run_id(job)])


def test_a_retry_finds_its_points_and_a_failed_one_is_tried_again_under_its_own_id(
    client: SyncPrefectClient, ablation: Ablation
) -> None:
    job = ablation.plan.jobs(["p01"], 0)[0]
    runner = DeployedPoints(ablation, client)
    runner.start(job)
    first = flow_run_of(client, runner, ablation, job)
    assert first.name == ablation.run_id(job) == f"{ablation.plan.ablation_id}-p01-s4"
    assert first.parameters == {"ablation": ablation.plan.ablation_id, "point": "p01", "seed": 4, "steps": 8}
    assert not runner.ended(job)

    again = DeployedPoints(ablation, client)  # as after a kill
    again.start(job)
    assert again.flow_runs == runner.flow_runs
    client.set_flow_run_state(first.id, Running(), force=True)
    assert not again.ended(job)
    client.set_flow_run_state(first.id, Failed(message="lost"), force=True)
    assert again.ended(job)
    again.start(job)
    state = flow_run_of(client, again, ablation, job).state
    assert state is not None
    assert (state.type, state.name) == (StateType.SCHEDULED, "AwaitingRetry")
    assert not again.ended(job)


def test_a_cancelled_ablation_cancels_what_is_left_of_its_points(client: SyncPrefectClient, ablation: Ablation) -> None:
    runner = DeployedPoints(ablation, client)
    base, other = ablation.plan.jobs(["base", "p01"], 0)
    for job in (base, other):
        runner.start(job)
    client.set_flow_run_state(runner.flow_runs[ablation.run_id(base)], Completed(), force=True)
    client.set_flow_run_state(runner.flow_runs[ablation.run_id(other)], Running(), force=True)
    stranger = client.create_flow_run(ablation_point, parameters={}, tags=[tag_of("another")], state=Running())
    parent = client.create_flow_run(ablate, parameters={}, name=ablation.plan.ablation_id, state=Running())
    cancel_points(ablate, parent, Running())
    states = [flow_run_of(client, runner, ablation, job).state for job in (base, other)]
    assert [state.type for state in states if state] == [StateType.COMPLETED, StateType.CANCELLING]
    untouched = client.read_flow_run(stranger.id).state
    assert untouched is not None
    assert untouched.type is StateType.RUNNING


def test_an_ablation_of_more_points_than_one_page_is_cancelled_whole(
    client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation_points, "_PAGE", 2)
    parent = client.create_flow_run(ablate, parameters={}, name="many-points", state=Running())
    ids = [
        client.create_flow_run(ablation_point, parameters={}, tags=[tag_of("many-points")], state=Running()).id
        for _ in range(5)
    ]
    cancel_points(ablate, parent, Running())
    states = [client.read_flow_run(flow_run).state for flow_run in ids]
    assert {state.type for state in states if state} == {StateType.CANCELLING}
