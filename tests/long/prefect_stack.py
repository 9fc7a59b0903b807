"""A real Prefect server and a real process worker over a folder of the test's, with the fake trainer interpreter."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil
from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.workers.process import ProcessWorker

from infra import environment, processes
from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.servers import prefect_server
from rlcore.config import ExperimentConfig
from rlcore.segment.journal import read_journal
from tasks.run import Run, existing_run
from tests.flows.fake_interpreter import HURRY
from tests.flows.interpreter import fake_interpreter
from tests.flows.outcome import temporary_folders
from tests.left import command_of, still_running

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Stack:
    settings: Settings
    env: Mapping[str, str]
    client: SyncPrefectClient
    log: Path
    mark: str  # of its worker; other tests may run on this machine

    def prefect(self, *words: str) -> str:
        """A command of Prefect's, as a person types it; its output."""
        command = [sys.executable, "-m", "prefect", "--no-prompt", *words]
        answer = subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, (answer.stdout + answer.stderr)[-3000:]
        return answer.stdout

    def start_worker(self, pool: str = "gpu") -> None:
        # A job in a shell's background ignores SIGINT, and the worker turns its SIGTERM into one.
        command = [
            *("env", "--default-signal=INT", sys.executable, "-m", "prefect", "worker", "start"),
            *("--pool", pool, "--type", "process"),
        ]
        with self.log.open("ab") as log:
            mark = self.mark if pool == "gpu" else f"{self.mark}-{pool}"
            processes.start(command, env=self.env, mark=mark, output=log, cwd=ROOT, ends_with_parent=True)

    def stop_worker(self) -> None:
        """As systemctl stop does."""
        (worker,) = [item for item in processes.marked(self.mark) if "worker" in command_of(item).split()]
        worker.terminate()
        worker.wait(60)

    def submit(self, *overrides: str) -> UUID:
        values = ["training.steps=12", "segment.steps=4", "data.template=math", *overrides]
        name = "train-grpo/grpo-geo3k-tiny"
        deployment = self.client.read_deployment_by_name(name)
        parameters = {**deployment.parameters, "overrides": values}
        return self.client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id

    def recover(self) -> None:
        deployment = self.client.read_deployment_by_name("recover/recover")
        flow_run_id = self.client.create_flow_run_from_deployment(deployment.id).id
        ended = (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED)
        assert self.wait_for_state(flow_run_id, *ended).state.type is StateType.COMPLETED

    def flow_run(self, flow_run_id: UUID) -> FlowRun:
        return self.client.read_flow_run(flow_run_id)

    def wait_for_state(self, flow_run_id: UUID, *states: StateType, seconds: float = 300) -> FlowRun:
        def reached() -> bool:
            return self.flow_run(flow_run_id).state.type in states

        self.wait_for(reached, f"{states} of {flow_run_id}", seconds)
        return self.flow_run(flow_run_id)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (
                f"{what} did not come within {seconds} s\n{self.log.read_text()[-6000:]}"
            )
            time.sleep(0.2)

    def run_dir(self, flow_run_id: UUID) -> Path:
        return self.settings.runs_dir / f"grpo-geo3k-tiny-{flow_run_id.hex[:12]}"

    def wait_for_step(self, flow_run_id: UUID, step: int, seconds: float = 300) -> None:
        journal = self.run_dir(flow_run_id) / "journal.jsonl"
        self.wait_for(lambda: len(read_journal(journal)) >= step, f"step {step}", seconds)

    def hurry(self, flow_run_id: UUID) -> None:
        """The fake trainer takes the remaining steps of this run without a pause."""
        (self.run_dir(flow_run_id) / HURRY).touch()

    def driver(self, run_dir: Path) -> psutil.Process:
        """The flow's process of a run or an ablation."""
        lines = (run_dir / "drivers.jsonl").read_text().splitlines()
        return psutil.Process(json.loads(lines[-1])["pid"])


def end_trainers(settings: Settings) -> None:
    """Those of this data folder's runs alone: other tests may be at work on this machine."""
    for folder in settings.runs_dir.glob("*"):
        processes.kill(Run(run_id=folder.name, run_dir=folder, experiment=ExperimentConfig(name="any")).trainer_mark)


def settings_of(data_dir: Path, variables: Mapping[str, str]) -> Settings:
    """Those of a process that has these variables."""
    named = {name.removeprefix("RLFLOW_").lower(): value for name, value in variables.items()}
    return Settings(
        data_dir=data_dir,
        **{name: named[name] for name in (Settings.model_fields.keys() - {"data_dir"}) & named.keys()},
    )


@contextmanager
def prefect_stack(
    folder: Path, variables: Mapping[str, str], deployments: Sequence[str] = ("grpo-geo3k-tiny", "recover")
) -> Iterator[Stack]:
    """Deployed from prefect.yaml as it stands: by default the tiny experiment and recover, with its automations.

    The trainer's interpreter is the fake one unless ``variables`` names another; they may name databases and a store.
    """
    settings = settings_of(folder / "data", variables)
    env = {
        **environment.for_children(settings),
        "RLFLOW_DATA_DIR": str(settings.data_dir),
        "RLFLOW_TRAINER_PYTHON": str(fake_interpreter(folder)),
        "PREFECT_HOME": str(folder / "worker-home"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_CLI_COLORS": "false",
        # On a busy machine a recovery can take longer than the default of two minutes, and the trainer would stop.
        "RLFLOW_DRIVER_DEADLINE_SECONDS": "600",
        **variables,
    }
    mark = f"test-{secrets.token_hex(4)}"
    with prefect_server(settings) as address:
        env["PREFECT_API_URL"] = f"{address}/api"
        login = login_of(settings)
        env |= login.for_prefect()
        client = SyncPrefectClient(api=env["PREFECT_API_URL"], auth_string=login.text)
        stack = Stack(settings, env, client, folder / "worker.log", mark)
        try:
            for pool in ("gpu", "cpu"):
                template = ProcessWorker.get_default_base_job_template()
                client.create_work_pool(WorkPoolCreate(name=pool, type=ProcessWorker.type, base_job_template=template))
            stack.prefect("deploy", *(word for name in deployments for word in ("--name", name)))
            stack.start_worker()
            stack.start_worker("cpu")  # of recover
            yield stack
        finally:
            processes.stop(mark, 5.0)
            processes.stop(f"{mark}-cpu", 5.0)
            end_trainers(settings)


def assert_whole(stack: Stack, flow_run_id: UUID) -> None:
    """Complete, each step once in the journal and in MLflow, one MLflow run, nothing left behind."""
    run = existing_run(stack.run_dir(flow_run_id).name, stack.settings)
    assert run.finished_marker.exists()
    steps = list(range(1, run.experiment.training.steps + 1))
    assert [record.step for record in read_journal(run.run_dir / "journal.jsonl")] == steps
    client = MlflowClient(tracking_uri=stack.settings.tracking_uri)
    experiment = client.get_experiment_by_name("grpo-geo3k-tiny")
    (tracked,) = client.search_runs([experiment.experiment_id], f"tags.`rlflow.run_id` = '{run.run_id}'")
    assert tracked.info.status == "FINISHED"
    points = client.get_metric_history(tracked.info.run_id, "optim/learning_rate")
    assert sorted(point.step for point in points) == steps
    assert_nothing_left(stack, flow_run_id)


def assert_nothing_left(stack: Stack, flow_run_id: UUID) -> None:
    run = existing_run(stack.run_dir(flow_run_id).name, stack.settings)
    assert not processes.marked(run.trainer_mark)
    assert not temporary_folders(run.run_dir)
    servers = ("prefect worker start", "prefect server start", "prefect.server", "uvicorn")

    def left() -> list[str]:
        running = still_running(str(stack.settings.data_dir))
        return [line for line in running if not any(server in line for server in servers)]

    # Prefect's own process of a flow outlives its state by some seconds
    stack.wait_for(lambda: not left(), "the end of every process but the servers", seconds=60)
    assert not still_running(run.trainer_mark)
