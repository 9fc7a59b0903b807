"""The local stack in a folder of the test's, as make up starts it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient

from infra import processes
from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.services import StackState, read_state
from infra.stack.supervisor import mark_of
from rlcore.segment.journal import read_journal
from tests.flows.interpreter import fake_interpreter
from tests.long.prefect_stack import end_trainers, settings_of
from tests.ports import reserved_port
from tests.shell import ROOT, installed, new_shell


@dataclass(frozen=True, slots=True)
class Place:
    settings: Settings
    env: Mapping[str, str]

    def stack(self, command: str) -> str:
        """What ``make COMMAND`` runs; its output."""
        words = [sys.executable, "-m", "tasks.cli", command]
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


@contextmanager
def place_at(folder: Path, variables: Mapping[str, str]) -> Iterator[Place]:
    env = {
        **new_shell(),
        "RLFLOW_DATA_DIR": str(folder / "data"),
        "RLFLOW_TRAINER_PYTHON": str(fake_interpreter(folder)),
        "FAKE_STEP_SECONDS": "1",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PYTHONPATH": f"{installed(folder)}{os.pathsep}{ROOT}",
        "RLFLOW_PREFECT_PORT": str(reserved_port()),
        "RLFLOW_MLFLOW_PORT": str(reserved_port()),
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
