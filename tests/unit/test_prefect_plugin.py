"""When the plugin steps in, that it leaves a Prefect that it does not know alone, and finds the local stack."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType

import pytest
from prefect.cli import deployment
from prefect.plugins import HookContext

from infra.prefect_plugin import accept_bare_names, runs_a_deployment, setup_environment
from infra.processes import ProcessId, this_process
from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.services import StackState


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/bin/python /venv/bin/prefect deployment run grpo-geo3k -p steps=40", True),
        ("python -m prefect deployment run grpo-geo3k", True),
        ("python /venv/bin/prefect --profile lab deployment run grpo-geo3k", True),
        ("python /venv/bin/prefect deployment ls", False),
        ("python -m prefect worker start --pool gpu", False),
        ("rlflow train deployment run", False),
    ],
)
def test_it_is_for_one_command(command: str, expected: bool) -> None:
    assert runs_a_deployment(command.split()) is expected


def test_the_installed_prefect_is_the_known_one() -> None:
    commands = ModuleType("commands")
    commands._get_deployment = stock = deployment._get_deployment
    accept_bare_names(commands)
    assert commands._get_deployment is not stock


def test_an_unknown_lookup_stays_as_it_is() -> None:
    async def other(client: object, reference: str) -> None: ...

    commands = ModuleType("commands")
    accept_bare_names(commands)
    assert not hasattr(commands, "_get_deployment")
    commands._get_deployment = other
    accept_bare_names(commands)
    assert commands._get_deployment is other


def context(api_url: str | None) -> HookContext:
    return HookContext(prefect_version="3.7.7", api_url=api_url, logger_factory=logging.getLogger)


def write_state(folder: Path, supervisor: ProcessId) -> None:
    state = StackState(supervisor=supervisor, phase="up", prefect="http://here:1", mlflow="http://here:2", services=())
    (folder / "stack").mkdir(exist_ok=True)
    (folder / "stack" / "state.json").write_text(state.model_dump_json())


def test_commands_find_the_stack_that_lives_where_no_server_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    assert setup_environment(ctx=context(None)) is None
    write_state(tmp_path, this_process())
    found = setup_environment(ctx=context(None))
    assert found is not None
    login = login_of(Settings(data_dir=tmp_path))
    assert found.env == {"PREFECT_API_URL": "http://here:1/api", "PREFECT_API_AUTH_STRING": login.text}
    assert setup_environment(ctx=context("http://here:1/api")) == found, "named by hand, it wants the login too"
    assert setup_environment(ctx=context("http://mine/api")) is None, "nobody else gets the login"
    write_state(tmp_path, ProcessId(this_process().pid, 1.0, this_process().host))  # an earlier process's number
    assert setup_environment(ctx=context(None)) is None
