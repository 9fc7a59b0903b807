"""``prefect deployment run NAME`` with the real command line, from the repository and from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient

from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.servers import prefect_server
from tests.shell import installed, new_shell

ROOT = Path(__file__).resolve().parents[2]
PREFECT = Path(sys.executable).with_name("prefect")


@dataclass(frozen=True, slots=True)
class Shell:
    """A person's, with rlflow installed beside Prefect."""

    env: dict[str, str]

    def prefect(self, *words: str, cwd: Path) -> tuple[int, str]:
        command = [str(PREFECT), *words]
        answer = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, check=False)
        return answer.returncode, answer.stdout + answer.stderr


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Three deployments: one/alone, one/twice, two/twice."""
    folder = tmp_path_factory.mktemp("bare")
    settings = Settings(data_dir=folder / "data")
    login = login_of(settings)
    with (
        prefect_server(settings) as address,
        SyncPrefectClient(api=f"{address}/api", auth_string=login.text) as client,
    ):
        for flow, name in (("one", "alone"), ("one", "twice"), ("two", "twice")):
            flow_id = client.create_flow_from_name(flow)
            client.create_deployment(flow_id=flow_id, name=name, parameter_openapi_schema={"properties": {"steps": {}}})
        yield Shell(
            {
                **new_shell(),
                "PREFECT_HOME": str(folder / "home"),
                "PREFECT_API_URL": f"{address}/api",
                **login.for_prefect(),
                "PYTHONPATH": f"{installed(folder)}{os.pathsep}{ROOT}",
                "COLUMNS": "80",
            }
        )


def test_in_the_repository_a_bare_name_and_a_whole_one_run(shell: Shell) -> None:
    for name in ("alone", "one/alone"):
        code, said = shell.prefect("deployment", "run", "-p", "steps=40", name, cwd=ROOT)
        assert code == 0, said
        assert "Creating flow run for deployment 'one/alone'" in said
        assert "'steps': 40" in said


def test_no_such_name_and_two_of_it_are_errors_of_one_line(shell: Shell) -> None:
    code, said = shell.prefect("deployment", "run", "none", cwd=ROOT)
    assert (code, said.strip()) == (1, "No deployment is called 'none'; .venv/bin/prefect deployment ls lists them.")
    code, said = shell.prefect("deployment", "run", "twice", cwd=ROOT)
    assert (code, said.strip()) == (
        1,
        "2 deployments are called 'twice'; name one with its flow: one/twice, two/twice",
    )


def test_elsewhere_it_is_stock_until_the_profile_switches_it_on(shell: Shell, tmp_path: Path) -> None:
    code, said = shell.prefect("deployment", "run", "alone", cwd=tmp_path)
    assert code == 1
    assert "Invalid deployment name format" in said
    code, said = shell.prefect("config", "set", "PREFECT_PLUGINS_ENABLED=true", cwd=tmp_path)
    assert code == 0, said
    code, said = shell.prefect("deployment", "run", "alone", cwd=tmp_path)
    assert code == 0, said
    assert "Creating flow run for deployment 'one/alone'" in said
