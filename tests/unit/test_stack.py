"""What make up refuses before it starts anything, and what make down says where nothing runs."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from infra.errors import ServerError
from infra.processes import this_process
from infra.settings import Settings
from infra.stack.control import describe, down, up
from infra.stack.services import StackState


def test_a_taken_port_is_named_with_its_setting(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"port {port} is taken .*RLFLOW_PREFECT_PORT"):
            up(Settings(data_dir=tmp_path, prefect_port=port))


def test_an_mlflow_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="RLFLOW_MLFLOW_URI is http://lab:5000"):
        up(Settings(data_dir=tmp_path, mlflow_uri="http://lab:5000"))
    assert not (tmp_path / "stack").exists()


def test_without_a_stack_down_has_nothing_to_do_and_status_says_so(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert down(settings) is False
    assert describe(settings) == f"The stack over {tmp_path} is down. make up starts it."


def test_status_says_so_where_prefect_gives_no_answer(tmp_path: Path, refusing_port: int) -> None:
    settings = Settings(data_dir=tmp_path, prefect_port=refusing_port)
    settings.stack_dir.mkdir(parents=True)
    state = StackState(supervisor=this_process(), phase="up", prefect="", mlflow="", services=())
    (settings.stack_dir / "state.json").write_text(state.model_dump_json())
    assert "pools: not known, for Prefect gave no answer" in describe(settings)
