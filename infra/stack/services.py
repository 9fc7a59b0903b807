"""The local stack: its state, servers, work pools and deployments, and how a process connects to it.

Deployments run in two work pools: ``gpu``, limited to ``gpu_slots`` runs at a time, and ``cpu`` for flows that must not
wait for a slot, such as recover."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from infra import environment
from infra.errors import ServerError
from infra.files import write_atomically
from infra.processes import ProcessId, is_running
from infra.provenance import ROOT, code_digest
from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.servers import Server, end_of, metrics_command, mlflow_command, prefect_command

POOLS = ("gpu", "cpu")
_ANSWER_SECONDS = 20.0
_PATIENCE_SECONDS = 120.0  # longer than the minute for which Prefect waits for a lock of SQLite
_AGAIN_SECONDS = 0.5


class ServiceState(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    pid: int
    address: str | None
    restarts: int


class StackState(BaseModel):
    """``state.json`` of the stack's folder, written by its supervisor."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    supervisor: ProcessId
    phase: Literal["starting", "up", "draining"]
    prefect: str  # addresses of the pages
    mlflow: str
    services: tuple[ServiceState, ...]


def read_state(settings: Settings) -> StackState | None:
    """The state of the stack over this data folder. None: no supervisor is running."""
    path = settings.stack_dir / "state.json"
    try:
        state = StackState.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    return state if is_running(state.supervisor) else None


def use_stack() -> Settings:
    """Connect this process to the stack over the data folder (RLFLOW_DATA_DIR, else ``data`` in the repository), before
    Prefect and MLflow are imported. PREFECT_API_URL and RLFLOW_MLFLOW_URI take precedence."""
    os.environ.setdefault("RLFLOW_DATA_DIR", str(ROOT / "data"))
    state = read_state(Settings())
    if state is not None:
        os.environ.setdefault("PREFECT_API_URL", f"{state.prefect}/api")
        os.environ.setdefault("RLFLOW_MLFLOW_URI", state.mlflow)
    settings = Settings()
    environment.apply(settings)
    log_in(settings)
    return settings


def log_in(settings: Settings) -> None:
    """Set the login of the stack's servers if this process uses these servers. Variables set by the user stay."""
    state = read_state(settings)
    if state is None:
        return
    login = login_of(settings)
    variables: dict[str, str] = {}
    if os.environ.get("PREFECT_API_URL") == f"{state.prefect}/api":
        variables |= login.for_prefect()
    if settings.mlflow_uri == state.mlflow:
        variables |= login.for_mlflow()
    for name, value in variables.items():
        os.environ.setdefault(name, value)


class AppliedDeployments(BaseModel):
    """``deployed`` of Prefect's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    deployments: frozenset[tuple[str, str]]  # name and entrypoint


@dataclass(frozen=True, slots=True)
class Layout:
    """The two servers and the workers' processes over one data folder."""

    settings: Settings
    prefect: Server
    mlflow: Server
    metrics: Server | None

    @classmethod
    def of(cls, settings: Settings) -> Layout:
        return cls(
            settings,
            prefect_command(settings, settings.prefect_port),
            mlflow_command(settings, settings.mlflow_port),
            metrics_command(settings),
        )

    def environment(self) -> dict[str, str]:
        """Environment of workers and of Prefect's commands."""
        login = login_of(self.settings)
        return {
            **environment.for_children(self.settings),
            **login.for_prefect(),
            **login.for_mlflow(),
            "RLFLOW_DATA_DIR": str(self.settings.data_dir),
            "RLFLOW_MLFLOW_URI": self.mlflow.address,
            "PREFECT_HOME": str(self.settings.prefect_home),
            "PREFECT_API_URL": f"{self.prefect.address}/api",
            "PREFECT_PLUGINS_ENABLED": "0",
            "PREFECT_CLI_COLORS": "false",
            "PREFECT_CLIENT_MAX_RETRIES": "10",  # wait for a busy SQLite and for a restarting server
        }

    def worker_args(self, pool: str) -> list[str]:
        name = f"{socket.gethostname()}-{pool}"
        return [
            *(sys.executable, "-m", "prefect", "worker", "start"),
            *("--pool", pool, "--type", "process", "--name", name),
        ]

    def log(self, name: str) -> Path:
        return self.settings.stack_dir / f"{name}.log"

    def command(self, *words: str) -> None:
        """Run one of Prefect's commands.

        Raises:
            ServerError: it failed, with the end of its output.
        """
        log = self.log("commands")
        args = [sys.executable, "-m", "prefect", "--no-prompt", *words]
        with log.open("wb") as output:
            code = subprocess.run(
                args, env=self.environment(), cwd=ROOT, stdout=output, stderr=output, check=False
            ).returncode
        if code != 0:
            raise ServerError(f"prefect {' '.join(words)} ended with {code}. {end_of(log)}")

    def api(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        """Call the API of Prefect's server. None: 404. Retries on 503, which means that SQLite was busy.

        Raises:
            ServerError: the server refuses, or does not answer for two minutes.
        """
        what = f"{method} {path}"
        request = urllib.request.Request(
            f"{self.prefect.address}/api{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": login_of(self.settings).header},
        )
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as reply:
                    text = reply.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                if error.code == HTTPStatus.NOT_FOUND:
                    return None
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                    raise ServerError(f"Prefect refuses {what}: {error.read().decode()[:500]}") from error
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ServerError(f"Prefect at {self.prefect.address} does not answer {what}: {error}") from error
            time.sleep(_AGAIN_SECONDS)

    def apply(self) -> None:
        """Create or update the work pools and all deployments of prefect.yaml. Removes deployments that an earlier call
        applied and that are no longer in prefect.yaml. Deployments made by others stay."""
        for pool in POOLS:
            if self.api("GET", f"/work_pools/{pool}") is None:
                self.command("work-pool", "create", pool, "--type", "process")
        self.api("PATCH", "/work_pools/gpu", {"concurrency_limit": self.settings.gpu_slots})
        file = self.settings.prefect_home / "deployed"
        before, wanted = _applied(file), _wanted()
        there = {(item["name"], item["entrypoint"]): item["id"] for item in self.api("POST", "/deployments/filter", {})}
        # Applying everything again takes Prefect a minute or two.
        if before.digest != wanted.digest or not wanted.deployments <= there.keys():
            self.command("deploy", "--all")
        gone = {key: there[key] for key in before.deployments - wanted.deployments if key in there}
        busy = frozenset(key for key, deployment in gone.items() if not self._removed(deployment))
        applied = AppliedDeployments(digest=wanted.digest, deployments=wanted.deployments | busy)
        write_atomically(file, applied.model_dump_json())

    def _removed(self, deployment: str) -> bool:
        """Remove a deployment with its schedules and automations. False: one of its runs is active, and recover needs
        the deployment to restart that run. It is then paused until a later ``apply`` removes it."""
        self.api("DELETE", f"/automations/owned-by/prefect.deployment.{deployment}")
        at_work = {
            "deployments": {"id": {"any_": [deployment]}},
            "flow_runs": {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING", "PAUSED"]}}},
        }
        if self.api("POST", "/flow_runs/count", at_work):
            self.api("PATCH", f"/deployments/{deployment}", {"paused": True})
            return False
        self.api("DELETE", f"/deployments/{deployment}")
        return True

    def pause(self, paused: bool) -> None:
        for pool in POOLS:
            self.api("PATCH", f"/work_pools/{pool}", {"is_paused": paused})

    def recover(self) -> None:
        """Start the recover flow now."""
        found = self.api("GET", "/deployments/name/recover/recover")
        if found is not None:
            self.api("POST", f"/deployments/{found['id']}/create_flow_run", {"state": {"type": "SCHEDULED"}})


def _applied(file: Path) -> AppliedDeployments:
    """What ``apply`` last applied: empty on the first call, and if an older version wrote the file."""
    try:
        return AppliedDeployments.model_validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return AppliedDeployments(digest="", deployments=frozenset())


def _wanted() -> AppliedDeployments:
    """The deployments of prefect.yaml, and a digest of their entries and of their flows' parameters."""
    text = (ROOT / "prefect.yaml").read_bytes()
    code = code_digest("flows", "tasks/experiments.py", "rlcore/config")
    return AppliedDeployments(
        digest=f"{hashlib.sha256(text + str(ROOT).encode()).hexdigest()[:16]}-{code}",
        deployments=frozenset((item["name"], item["entrypoint"]) for item in yaml.safe_load(text)["deployments"]),
    )
