"""Prefect's and MLflow's servers stop answering (SIGSTOP) in the middle of a run, and it does not notice."""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from infra import processes
from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.servers import mlflow_command, prefect_command, start_server, wait_healthy
from rlcore.config import ExperimentConfig
from rlcore.segment.journal import read_journal
from tasks.run import Run
from tests.chaos.compare import weights_of
from tests.chaos.harness import EXPERIMENT, SMALL
from tests.flows.interpreter import fake_interpreter
from tests.ports import reserved_port
from tests.shell import new_shell

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Servers:
    prefect: str
    mlflow: str
    marks: tuple[str, str]

    def send(self, number: signal.Signals) -> None:
        for mark in self.marks:
            for process in processes.marked(mark):
                process.send_signal(number)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)


@contextmanager
def servers_over(settings: Settings) -> Iterator[Servers]:
    wanted = (prefect_command(settings, reserved_port()), mlflow_command(settings, reserved_port()))
    marks = (f"hang-prefect-{secrets.token_hex(4)}", f"hang-mlflow-{secrets.token_hex(4)}")
    with ExitStack() as stack:
        for server, mark in zip(wanted, marks, strict=True):
            process = start_server(server, settings, mark)
            stack.callback(processes.kill, mark)
            wait_healthy(process, server)
        yield Servers(wanted[0].address, wanted[1].address, marks)


@dataclass(frozen=True, slots=True)
class Command:
    """A run over ``data_dir`` as a person starts it."""

    data_dir: Path
    words: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def run(self) -> Run:
        return Run(run_id="run", run_dir=self.data_dir / "runs" / "run", experiment=ExperimentConfig(name="any"))

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        env = new_shell(self.variables, RLFLOW_DATA_DIR=str(self.data_dir))
        with (self.data_dir / "command.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *self.words, "--run-id", "run"], env=env, cwd=ROOT, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            processes.kill(self.run.trainer_mark)

    def wait_for(self, process: subprocess.Popen[bytes], condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert process.poll() in (None, 0), self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.2)

    def wait_for_end(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        self.wait_for(process, lambda: process.poll() == 0, seconds)

    @property
    def steps(self) -> int:
        return len(self.run.journal())

    @property
    def log(self) -> str:
        log = self.run.run_dir / "trainer.log"
        trainer = log.read_text()[-3000:] if log.exists() else ""
        return (self.data_dir / "command.log").read_text()[-8000:] + trainer

    @property
    def trainers(self) -> int:
        return (self.run.run_dir / "trainer.log").read_text().count("=== trainer started ")

    def metrics(self) -> list[dict[str, float]]:
        """Of each step, without times, rates and memory."""
        return [
            {
                name: value
                for name, value in record.metrics.items()
                if not name.startswith(("time/", "system/")) and not name.endswith("_per_second")
            }
            for record in read_journal(self.run.run_dir / "journal.jsonl")
        ]


def assert_each_step_once_in_mlflow(command: Command, uri: str) -> None:
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs(
        [item.experiment_id for item in client.search_experiments()], "tags.`rlflow.run_id` = 'run'"
    )
    assert run.info.status == "FINISHED"
    journal = read_journal(command.run.run_dir / "journal.jsonl")
    for metric in journal[-1].metrics:
        points = client.get_metric_history(run.info.run_id, metric)
        wanted = [(record.step, record.metrics[metric]) for record in journal if metric in record.metrics]
        assert sorted((point.step, point.value) for point in points) == wanted, metric
        assert max(Counter(point.step for point in points).values()) == 1


def logged_in(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the clients of these servers need; the test reads MLflow as well."""
    login = login_of(settings)
    for name, value in login.for_mlflow().items():
        monkeypatch.setenv(name, value)
    return {**login.for_prefect(), **login.for_mlflow()}


def test_a_pause_longer_than_the_trainer_s_patience_is_not_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        *("tasks.cli", "train", "grpo-geo3k-tiny"),
        *(
            word
            for value in ("training.steps=120", "segment.steps=20", "data.template=math")
            for word in ("--set", value)
        ),
    )
    settings = Settings(data_dir=tmp_path / "data", mlflow_uri="")
    with servers_over(settings) as servers:
        variables = {
            **logged_in(settings, monkeypatch),
            "RLFLOW_TRAINER_PYTHON": str(fake_interpreter(tmp_path)),
            "RLFLOW_MLFLOW_URI": servers.mlflow,
            "RLFLOW_DRIVER_DEADLINE_SECONDS": "8",
            "RLFLOW_RETRY_DELAY_SCALE": "0.1",
            "PREFECT_API_URL": f"{servers.prefect}/api",
            "FAKE_STEP_SECONDS": "0.5",
        }
        command = Command(tmp_path / "data", words, variables)
        with command.started() as process:
            command.wait_for(process, lambda: command.steps >= 10, 600)
            trainer = psutil.Process(next(iter(processes.marked(command.run.trainer_mark))).pid)
            with servers.hanging():
                time.sleep(30)
                assert trainer.is_running(), command.log
                assert command.run.committed_step() >= 40, command.log  # it goes on into other segments
            command.wait_for_end(process, 300)
        assert command.trainers == 1
        assert not (command.run.run_dir / "failures.jsonl").exists()
        assert [record.step for record in command.run.journal()] == list(range(1, 121))
        assert_each_step_once_in_mlflow(command, servers.mlflow)


@pytest.mark.clusters
@pytest.mark.timeout(3000)
def test_five_minutes_without_an_answer_change_nothing_in_a_real_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the default deadlines and a real trainer: the run that nobody disturbed, bit for bit."""
    values = (*SMALL, "training.steps=60", "segment.steps=10")
    words = ("tasks.cli", "train", EXPERIMENT, *(word for value in values for word in ("--set", value)))
    quiet = Command(tmp_path / "quiet" / "data", words, {})
    settings = Settings(data_dir=tmp_path / "data", mlflow_uri="")
    with servers_over(settings) as servers:
        variables = {
            **logged_in(settings, monkeypatch),
            "RLFLOW_MLFLOW_URI": servers.mlflow,
            "PREFECT_API_URL": f"{servers.prefect}/api",
        }
        command = Command(tmp_path / "data", words, variables)
        with command.started() as process:
            command.wait_for(process, lambda: command.steps >= 5, 1200)
            shutil.copytree(command.data_dir / "models", quiet.data_dir / "models")  # a warm start takes a minute
            with servers.hanging():
                over = time.monotonic() + 300
                with quiet.started() as undisturbed:
                    quiet.wait_for_end(undisturbed, 1200)
                time.sleep(max(0.0, over - time.monotonic()))
                assert command.run.committed_step() >= 20, command.log  # it goes on into other segments
            command.wait_for_end(process, 1200)
        assert command.trainers == 1
        assert not (command.run.run_dir / "failures.jsonl").exists()
        assert_each_step_once_in_mlflow(command, servers.mlflow)
    assert any(step["optim/grad_norm"] for step in quiet.metrics()), "equal weights would prove nothing"
    assert len(command.metrics()) == 60
    assert command.metrics() == quiet.metrics()
    assert weights_of(command.run.run_dir) == weights_of(quiet.run.run_dir)
