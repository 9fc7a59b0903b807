"""Commands up to their last line: what they print, and with which words they end."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from pydantic import BaseModel

from infra.errors import ServerError
from rlcore.errors import ConfigError, TrainerFailedError
from tasks.cli import app, foreground
from tasks.cli import notify as notifications
from tasks.report import rollouts as notebook


@pytest.mark.parametrize(
    ("words", "run_id", "data_dir", "said"),
    [
        (["train", "toy", "--set", "a=b c"], "r", None, "train toy --set 'a=b c' --run-id r"),
        (["train", "toy", "--run-id", "old", "--data", "x"], "old", None, "train toy --data x --run-id old"),
        (["train", "toy", "--run-id=old"], "old", "/my data", "train toy --run-id old"),
        (["prepare", "toy"], None, None, "prepare toy"),
    ],
)
@pytest.mark.parametrize("program", [["/env/bin/rlflow"], [sys.executable, "-m", "tasks.cli"]], ids=["rlflow", "-m"])
def test_an_interrupted_command_says_how_to_continue(
    words: list[str], run_id: str | None, data_dir: str | None, said: str, program: list[str],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = "/src/tasks/cli/__main__.py" if "-m" in program else program[0]
    monkeypatch.setattr(sys, "argv", [file, *words])
    monkeypatch.setattr(sys, "orig_argv", [*(program if "-m" in program else [sys.executable, file]), *words])
    monkeypatch.delenv("RLFLOW_DATA_DIR", raising=False)
    if data_dir is not None:
        monkeypatch.setenv("RLFLOW_DATA_DIR", data_dir)
    foreground.say_how_to_continue(run_id)
    prefix = "" if data_dir is None else "RLFLOW_DATA_DIR='/my data' "
    assert capsys.readouterr().err == f"Continue with: {prefix}{shlex.join(program)} {said}\n"


def rlflow(*words: str) -> None:
    app(list(words), standalone_mode=False)


class Answer(BaseModel):
    steps: int


def _raised_in_answer_to(interrupt: BaseException) -> ValueError:
    """As Prefect does: tests/flows/test_train_flow.py."""
    error = ValueError("Task run is not set")
    error.__context__ = interrupt
    return error


@pytest.fixture
def _a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreground, "prefect_api", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(foreground.signal, "signal", lambda *_: None)  # this process keeps its own handlers


@pytest.mark.usefixtures("_a_server")
def test_a_command_prints_its_result_as_its_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    foreground.run_once(lambda: Answer(steps=3))
    assert capsys.readouterr().out == '{"steps":3}\n'


@pytest.mark.usefixtures("_a_server")
@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("seed: a typo"), 1, "\nConfigError: seed: a typo\nagain\n"),
        (ServerError("away"), 1, "\nServerError: away\nagain\n"),
        (KeyboardInterrupt(), 130, "\nInterrupted; what is committed stays.\nagain\n"),
        (_raised_in_answer_to(KeyboardInterrupt()), 130, "\nInterrupted; what is committed stays.\nagain\n"),
    ],
)
def test_a_command_that_ends_early_says_why_and_how_to_continue(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Answer:
        raise error

    with pytest.raises(SystemExit) as ended:
        foreground.run_once(fail, lambda: sys.stderr.write("again\n") and None)
    assert ended.value.code == code
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.usefixtures("_a_server")
def test_an_error_that_nobody_expects_is_not_an_interrupt() -> None:
    def fail() -> Answer:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        foreground.run_once(fail, lambda: pytest.fail("an unexpected error tells nobody to continue"))


class Client:
    """Prefect's, of a server with one deployment whose flow run goes through ``states``."""

    def __init__(self, states: list[SimpleNamespace], shown: list[float]) -> None:
        self.states, self.shown = states, shown
        self.asked: list[tuple[Any, ...]] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None: ...

    def read_deployment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(id=f"id of {name}")

    def create_flow_run_from_deployment(self, deployment: str, *, parameters: dict[str, Any]) -> tuple[Any, ...]:
        return (deployment, parameters)

    def read_flow_run(self, wanted: UUID) -> SimpleNamespace:
        state = self.states.pop(0)
        return SimpleNamespace(id=wanted, name="lr-3", state=state, state_name=state.name)

    def read_latest_artifacts(self, *, artifact_filter: Any, limit: int) -> list[SimpleNamespace]:
        self.asked.append((artifact_filter.key.any_, limit))
        return [SimpleNamespace(data=self.shown.pop(0))] if self.shown else []


def state(name: str, *, final: bool, completed: bool = False) -> SimpleNamespace:
    return SimpleNamespace(name=name, is_final=lambda: final, is_completed=lambda: completed, message="out of memory")


def test_a_notebook_shows_a_bar_while_it_waits_for_its_flow_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(notebook.time, "sleep", slept.append)
    states = [state("Running", final=False), state("Completed", final=True, completed=True)]
    client = Client(states, [12.34, 100.0])
    monkeypatch.setattr(notebook, "get_client", lambda *, sync_client: client if sync_client else None)
    assert notebook.start("grpo/toy", experiment="toy") == ("id of grpo/toy", {"experiment": "toy"})  # type: ignore[comparison-overlap]
    assert notebook.wait(SimpleNamespace(id=UUID(int=1))) == "lr-3"  # type: ignore[arg-type]
    assert slept == [1.0]
    assert client.asked == [(["lr-3-progress"], 1)] * 2
    bar = capsys.readouterr().err
    assert "lr-3: Completed" in bar
    assert "100%" in bar
    client.states = [state("Crashed", final=True)]
    with pytest.raises(TrainerFailedError, match="^lr-3 ended as Crashed: out of memory$"):
        notebook.wait(SimpleNamespace(id=UUID(int=1)))  # type: ignore[arg-type]


@pytest.fixture
def _at_a_server() -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: "http://prefect/api", PREFECT_API_AUTH_STRING: "me:secret"}):
        yield


@pytest.mark.usefixtures("_at_a_server")
def test_the_automations_of_a_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    client, checked, asked = contextlib.nullcontext("the client"), list[Any](), list[Any]()
    monkeypatch.setattr(notifications, "get_client", lambda *, sync_client: client if sync_client else None)
    monkeypatch.setattr(notifications, "check_prefect", lambda *words: checked.append(words))
    monkeypatch.setattr(notifications, "apply", lambda *words: asked.append(words) or ["one", "two"])
    monkeypatch.setattr(notifications, "remove", lambda *words: asked.append(words) or ["gone"])
    rlflow("notify", "webhook/team")
    assert capsys.readouterr().out == "one\ntwo\n"
    rlflow("notify", "webhook/team", "--on", "failed", "--flow", "a", "--flow", "b")
    rlflow("notify", "--remove", "--on", "finished")
    assert asked == [
        ("the client", "webhook/team", ["failed", "finished"], ("train-grpo",)),
        ("the client", "webhook/team", ["failed"], ["a", "b"]),
        ("the client", ["finished"]),
    ]
    ((url, seconds, login), *_) = checked
    assert (url, login) == ("http://prefect/api", "me:secret")
    assert seconds == notifications.Settings().server_timeout_seconds
    assert capsys.readouterr().out.endswith("gone\n")


def test_automations_need_a_server() -> None:
    said = r"^ServerError: no Prefect server is set: rlflow up starts one here, PREFECT_API_URL names another\.$"
    with temporary_settings(restore_defaults={PREFECT_API_URL}), pytest.raises(SystemExit, match=said):
        rlflow("notify", "webhook/team")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["train", "grpo-gsm8k-t"], ["grpo-gsm8k-tiny"]),
        (["merge", "lr"], ["lr-3"]),
        (["train", "grpo-gsm8k-tiny", "--set", "training.learning_r"], ["training.learning_rate="]),
        (["tra"], ["train"]),
    ],
)
def test_the_shell_completes(words: list[str], offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "lr-3").mkdir(parents=True)
    (tmp_path / "runs" / "lr-3" / "experiment.json").touch()
    typed = {"COMP_WORDS": shlex.join(["rlflow", *words]), "COMP_CWORD": str(len(words))}
    answer = subprocess.run(
        [sys.executable, "-m", "tasks.cli"], capture_output=True, text=True, check=False,
        env={**os.environ, **typed, "_RLFLOW_COMPLETE": "complete_bash", "RLFLOW_DATA_DIR": str(tmp_path)},
    )  # fmt: skip
    assert answer.stdout.split() == offered
