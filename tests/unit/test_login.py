"""The login of the servers that rlflow starts: who can read it, who gets it, and what it opens."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from infra import environment
from infra.errors import ServerError
from infra.processes import this_process
from infra.settings import Settings
from infra.stack.apps import PasswordRequired
from infra.stack.login import Login, login_file, login_of
from infra.stack.servers import check_prefect
from infra.stack.services import Layout, StackState, log_in


def test_a_login_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    previous = os.umask(0)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _: login_of(settings), range(32)))
    finally:
        os.umask(previous)
    (login,) = found
    assert len(login.password) >= 24
    assert login_file(settings).stat().st_mode & 0o777 == 0o600
    assert login_file(settings).read_text() == f"{login.text}\n"
    assert [path.name for path in settings.stack_dir.iterdir()] == ["login"], "nothing is left aside"
    assert login_of(Settings(data_dir=tmp_path / "other")) != login


def test_a_login_that_others_can_read_or_have_made_is_refused(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    login_of(settings)
    path = login_file(settings)
    path.chmod(0o640)
    with pytest.raises(ServerError, match=r"with mode 640. Allowed: .*mode 600"):
        login_of(settings)
    path.chmod(0o600)
    path.write_text("rlflow:short\n")
    with pytest.raises(ServerError, match="does not hold user:password with 16 characters"):
        login_of(settings)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(f"rlflow:{'x' * 24}\n")
    elsewhere.chmod(0o600)
    path.unlink()
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic links"):
        login_of(settings)
    path.unlink()
    if os.getuid() == 0:  # only root can make another's file
        path.write_text(f"rlflow:{'x' * 24}\n")
        path.chmod(0o600)
        os.chown(path, 1234, 1234)
        with pytest.raises(ServerError, match="belongs to user 1234"):
            login_of(settings)


def test_workers_get_the_login_by_their_environment_and_jobs_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(data_dir=tmp_path)
    layout, login = Layout.of(settings), login_of(settings)
    variables = layout.environment()
    assert variables["PREFECT_API_AUTH_STRING"] == login.text
    assert (variables["MLFLOW_TRACKING_USERNAME"], variables["MLFLOW_TRACKING_PASSWORD"]) == (
        login.user,
        login.password,
    )
    for command in (layout.prefect.args, layout.mlflow.args, layout.worker_args("gpu")):
        assert login.password not in " ".join(command), "every user of the machine reads command lines"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert login.password in str(environment.for_children(settings))
    assert login.password not in str(environment.for_jobs(settings))


def test_each_local_ray_has_a_token_of_its_own_and_a_cluster_keeps_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of-a-cluster")
    local, other = (environment.for_jobs(Settings(data_dir=tmp_path, ray_address="")) for _ in range(2))
    assert local["RAY_AUTH_MODE"] == "token"
    assert len({local["RAY_AUTH_TOKEN"], other["RAY_AUTH_TOKEN"], "of-a-cluster"}) == 3
    cluster = environment.for_jobs(Settings(data_dir=tmp_path, ray_address="10.0.0.1:6379"))
    assert (cluster["RAY_AUTH_MODE"], cluster["RAY_AUTH_TOKEN"]) == ("disabled", "of-a-cluster")


def test_only_the_running_stacks_own_servers_get_its_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    settings = Settings(data_dir=tmp_path, mlflow_uri="http://127.0.0.1:2")
    login = login_of(settings)
    log_in(settings)
    assert not os.environ.keys() & set(names), "no stack runs: another program may listen there"

    state = StackState(
        supervisor=this_process(), phase="up", prefect="http://127.0.0.1:1", mlflow="http://127.0.0.1:2", services=()
    )
    (settings.stack_dir / "state.json").write_text(state.model_dump_json())
    log_in(Settings(data_dir=tmp_path, mlflow_uri="http://lab:5000"))
    assert os.environ["PREFECT_API_AUTH_STRING"] == login.text
    assert not os.environ.keys() & set(names[1:]), "the lab's server does not get our password"
    log_in(settings)
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == login.password


@pytest.fixture
def prefect() -> Iterator[str]:
    """Answers as Prefect's server does, for one login."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/api/health" or self.headers["Authorization"] == Login("me", "right").header
            self.send_response(200 if known else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/api"
        server.shutdown()


def test_a_missing_login_is_named_before_anything_starts(prefect: str) -> None:
    check_prefect(prefect, 5, "me:right")
    with pytest.raises(ServerError, match=r"wants a login. Set PREFECT_API_AUTH_STRING"):
        check_prefect(prefect, 5, None)
    with pytest.raises(ServerError, match="wants another login") as refused:
        check_prefect(prefect, 5, "me:wrong-one")
    assert "wrong-one" not in str(refused.value)


def ask(app: ASGIApp, path: str, **headers: str) -> httpx.Response:
    async def call() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(call())


def test_mlflow_answers_nobody_without_the_login() -> None:
    def answer(_: object) -> PlainTextResponse:
        return PlainTextResponse("inside")

    login = Login("rlflow", "a-password-of-some-length")
    inner = Starlette(routes=[Route("/health", answer), Mount("/", Starlette(routes=[Route("/{rest:path}", answer)]))])
    app = PasswordRequired(inner, login, name="MLflow", where="a variable")
    assert ask(app, "/health").text == "inside"
    for path in ("/", "/health/", "//health", "/health/../api", "/api/2.0/mlflow/runs/search", "/static-files/x.js"):
        refused = ask(app, path)
        assert refused.status_code == 401, path
        assert refused.headers["WWW-Authenticate"].startswith("Basic "), "a browser asks for the login"
        assert ask(app, path, Authorization=login.header).text == "inside", path
    for wrong in ("Basic", login.header[:-1], f"{login.header}A", Login("rlflow", "").header, "Bearer x"):
        assert ask(app, "/", Authorization=wrong).status_code == 401, wrong


def test_prefect_answers_to_no_foreign_name_not_even_the_one_it_has_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    from infra.stack.apps import prefect as create

    app = create()
    assert ask(app, "/api/ready", Host="localhost:4200").status_code != 400
    for name in ("prefect-in-memory", "prefect-in-memory:4200", "evil.example", ""):
        assert ask(app, "/api/ready", Host=name).status_code == 400, name
