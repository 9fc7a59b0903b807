"""A real Prefect server tells a local HTTP receiver of a failed and of a finished run, once each."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from infra import environment
from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.servers import prefect_server
from tests.shell import new_shell

ROOT = Path(__file__).resolve().parents[2]
RUN = """
from prefect import flow
@flow(name="train-grpo", flow_run_name="{name}")
def run(experiment: str):
    if {fails}:
        raise ValueError('out of "luck"')
run("grpo-geo3k-tiny")
"""
BLOCK = """
from prefect.blocks.webhook import Webhook
Webhook(url="{url}").save("team")
"""


@pytest.fixture
def received() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(address, bodies) of a receiver."""
    bodies: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/hook", bodies
    server.shutdown()
    server.server_close()


def python(env: dict[str, str], *words: str, code: int = 0) -> str:
    answer = subprocess.run([sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == code, answer.stdout + answer.stderr
    return answer.stdout + answer.stderr


def test_a_webhook_hears_of_failed_and_finished_runs_once(
    tmp_path: Path, received: tuple[str, list[dict[str, Any]]]
) -> None:
    url, bodies = received
    settings = Settings(data_dir=tmp_path / "data")
    with prefect_server(settings) as address:
        env = {
            **environment.for_children(settings), "RLFLOW_DATA_DIR": str(settings.data_dir),
            **login_of(settings).for_prefect(),
            "PREFECT_API_URL": f"{address}/api", "PREFECT_HOME": str(tmp_path / "home"), "PREFECT_PLUGINS_ENABLED": "0",
        }  # fmt: skip
        command = ("-m", "tasks.cli", "notify", "webhook/team")
        assert "no block webhook/team on this Prefect server. Found: none" in python(env, *command, code=1)
        python(env, "-c", BLOCK.format(url=url))
        assert "rlflow-failed: created" in python(env, *command)
        again = python(env, *command)
        assert "rlflow-failed: updated" in again
        assert "rlflow-finished: updated" in again

        deadline = time.monotonic() + 240
        while not bodies:  # the server reads its automations anew when it likes
            assert time.monotonic() < deadline
            python(env, "-c", RUN.format(name="first", fails=False))
        python(env, "-c", RUN.format(name="good", fails=False))
        python(env, "-c", RUN.format(name="bad", fails=True), code=1)
        python(env, "-c", RUN.format(name="last", fails=False))
        while "last" not in [body["run"] for body in bodies]:  # events are taken in their order
            assert time.monotonic() < deadline
            time.sleep(0.2)
        told = {body["run"]: body for body in bodies}
        assert sorted(body["run"] for body in bodies if body["run"] != "first") == ["bad", "good", "last"]
        assert (told["good"]["state"], told["bad"]["state"]) == ("Completed", "Failed")
        assert 'out of "luck"' in told["bad"]["message"]
        assert told["bad"]["experiment"] == "grpo-geo3k-tiny"
        assert told["bad"]["url"].startswith("http")

        assert "rlflow-failed: removed" in python(env, "-m", "tasks.cli", "notify", "--remove")
        assert "there was none" in python(env, "-m", "tasks.cli", "notify", "--remove")
    assert "no Prefect server answers" in python(env, *command, code=1)


def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    env = new_shell(RLFLOW_DATA_DIR=str(tmp_path / "data"), PREFECT_PLUGINS_ENABLED="0")
    assert "no Prefect server is set" in python(env, "-m", "tasks.cli", "notify", "webhook/team", code=1)
