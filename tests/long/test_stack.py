"""The local stack as ``make up`` starts it: real servers and workers, the fake trainer behind them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import psutil
import pytest
from mlflow import MlflowClient
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType

from infra import processes
from infra.login import login_file, login_of
from infra.processes import is_running
from infra.servers import answers, free_port
from infra.services import StackState, read_state
from infra.settings import Settings
from infra.supervisor import mark_of
from rlcore.segment.journal import read_journal
from tests.flows.interpreter import fake_interpreter
from tests.long.prefect_stack import end_trainers, settings_of
from tests.long.test_bare_names import installed
from tests.shell import new_shell

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(1200)


@dataclass(frozen=True, slots=True)
class Place:
    settings: Settings
    env: Mapping[str, str]

    def stack(self, command: str) -> str:
        """What ``make COMMAND`` runs; its output."""
        words = [sys.executable, "-m", "infra.stack", command]
        answer = subprocess.run(words, env=self.env, cwd=ROOT, capture_output=True, text=True, check=False)
        logs = "".join(path.read_text()[-3000:] for path in self.settings.stack_dir.glob("*.log"))
        assert answer.returncode == 0, answer.stdout + answer.stderr + logs
        return answer.stdout

    def state(self) -> StackState:
        state = read_state(self.settings)
        assert state is not None
        return state

    def pid(self, service: str) -> int:
        return next(item.pid for item in self.state().services if item.name == service)

    def client(self) -> SyncPrefectClient:
        return SyncPrefectClient(api=f"{self.state().prefect}/api", auth_string=login_of(self.settings).text)

    def scheduled(self) -> bool:
        """Whether Prefect's scheduler has made runs for every deployment with a schedule."""
        with self.client() as client:
            runs = [run for run in client.read_flow_runs(limit=200) if run.auto_scheduled]
            wanted = {item.id for item in client.read_deployments() if any(s.active for s in item.schedules)}
        return bool(wanted) and wanted <= {run.deployment_id for run in runs}

    def submit(self, steps: int) -> UUID:
        """As a person does in the repository's root, who has set no server."""
        values = '["segment.steps=20", "data.template=math", "recovery.silence_seconds=20"]'
        words = ["deployment", "run", "grpo-geo3k-tiny", "-p", f"steps={steps}", "-p", f"overrides={values}"]
        command = [str(Path(sys.executable).with_name("prefect")), *words]
        answer = subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stdout + answer.stderr
        found = re.search(r"UUID: (\S+)", answer.stdout)
        assert found, answer.stdout
        return UUID(found[1])

    def run_dir(self, flow_run_id: UUID) -> Path:
        return self.settings.runs_dir / f"grpo-geo3k-tiny-{flow_run_id.hex[:12]}"

    def steps(self, flow_run_id: UUID) -> list[int]:
        return [record.step for record in read_journal(self.run_dir(flow_run_id) / "journal.jsonl")]

    def files_with_the_login(self) -> list[Path]:
        password = login_of(self.settings).password.encode()
        files = [path for path in self.settings.data_dir.rglob("*") if path.is_file()]
        return [path for path in files if password in path.read_bytes()]

    def processes_that_show_the_login(self) -> list[str]:
        """By their command line, which every user can read; trainers and jobs by their environment as well."""
        password, found = login_of(self.settings).password, []
        for item in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                command = " ".join(item.cmdline())
                environment = str(item.environ()) if "rlcore" in command else ""
                if password in command + environment:
                    found.append(command)
        return found

    def kill(self, service: str) -> None:
        """With SIGKILL; then waits until the supervisor has started another."""
        old = self.pid(service)
        psutil.Process(old).kill()
        wait_for(lambda: any(s.name == service and s.pid != old for s in self.state().services), f"another {service}")


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.3)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with place_at(tmp_path, {}) as found:
        yield found


@contextmanager
def place_at(folder: Path, variables: Mapping[str, str]) -> Iterator[Place]:
    env = {
        **new_shell(),
        "RLFLOW_DATA_DIR": str(folder / "data"),
        "RLFLOW_TRAINER_PYTHON": str(fake_interpreter(folder)),
        "FAKE_STEP_SECONDS": "1",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PYTHONPATH": f"{installed(folder)}{os.pathsep}{ROOT}",
        "RLFLOW_PREFECT_PORT": str(free_port()),
        "RLFLOW_MLFLOW_PORT": str(free_port()),
        **variables,
    }
    settings = settings_of(folder / "data", env)
    try:
        yield Place(settings, env)
    finally:
        # the supervisor first: it would start the others again
        for name in ("supervisor", "gpu", "cpu", "mlflow", "prefect"):
            processes.kill(mark_of(settings, name))
        end_trainers(settings)


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
    wait_for(finished.exists, "the end of the run", seconds=400)
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
