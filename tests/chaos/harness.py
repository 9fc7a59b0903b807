"""A run under fire: real Prefect and MLflow servers, the ordinary command, and SIGKILL."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
from mlflow import MlflowClient

from infra.login import login_of
from infra.servers import free_port, mlflow_server, prefect_server
from infra.settings import Settings
from rlcore.segment.journal import read_journal
from rlcore.segment.resume import read_segments
from tests.chaos.faults import DAMAGES, SmallDisk
from tests.chaos.victims import TRAINER_SIDE, Scene, Victim, command, metrics_due
from tests.shell import new_shell

EXPERIMENT = "grpo-gsm8k-tiny"
RUN_ID = "chaos"
WHOLE, TRAINING = "flows.train_grpo", "tests.long.train_only"
SMALL = (
    "model.tiny.warm_start_steps=200",
    "segment.steps=2",
    "training.problems_per_step=8",
    "training.learning_rate=5.0e-5",
    "rollout.group_size=4",
    "data.synthetic_problems=256",
    "evaluation.problems=16",
    "evaluation.samples=1",
)
_RECOVERY_SECONDS = 180.0
_QUIET_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Row:
    """One disturbance and what became of it."""

    victim: str
    moment: str
    kill: bool  # by SIGKILL; else a fault of the disk
    recovered: bool
    seconds: float  # to the next new step of the journal
    replayed: int  # steps taken again

    def __str__(self) -> str:
        end = f"{self.seconds:.1f}" if self.recovered else "never"
        return f"| {self.victim} | {self.moment} | {end} | {self.replayed} |"


def markdown(rows: list[Row]) -> str:
    head = "| victim | moment | seconds to the next step | steps replayed |\n| --- | --- | --- | --- |"
    return "\n".join([head, *map(str, rows)]) + "\n"


def losses(rows: list[Row]) -> str:
    """What was lost with each victim: the rows of one victim and moment in one line."""
    lines = [
        "| what dies | when | times | came back | seconds to the next step: median (most) | steps repeated: most |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for victim, moment in dict.fromkeys((row.victim, row.moment) for row in rows):
        same = [row for row in rows if (row.victim, row.moment) == (victim, moment)]
        seconds = [row.seconds for row in same]
        lines.append(
            f"| {victim} | {moment} | {len(same)} | {sum(row.recovered for row in same)} | "
            f"{statistics.median(seconds):.0f} ({max(seconds):.0f}) | {max(row.replayed for row in same)} |"
        )
    return "\n".join(lines) + "\n"


def undisturbed(data_dir: Path, settings: list[str]) -> str:
    """The weights of the same run when nobody kills anything, and in one segment."""
    shutil.rmtree(data_dir, ignore_errors=True)
    data_dir.mkdir(parents=True)
    with (data_dir / "command.log").open("wb") as log:
        subprocess.run(_arguments(settings, TRAINING), env=_environment(data_dir), stdout=log, stderr=log, check=True)
    return weights_of(data_dir / "runs" / RUN_ID)


def weights_of(run_dir: Path) -> str:
    """A hash of the last checkpoint's weights, by name, bit for bit."""
    from rlcore.models.checkpoint import load_full_weights

    digest = hashlib.sha256()
    for name, value in sorted(load_full_weights(Path(read_segments(run_dir)[-1].checkpoint.path)).items()):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _arguments(settings: list[str], module: str) -> list[str]:
    chosen = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    return [sys.executable, "-m", module, EXPERIMENT, "--run-id", RUN_ID, *chosen]


def _environment(data_dir: Path, **more: str) -> dict[str, str]:
    # short delays: this is about what comes back, not about how politely it waits
    return new_shell({"RLFLOW_DATA_DIR": str(data_dir), "RLFLOW_RETRY_DELAY_SCALE": "0.1", **more})


class Server:
    """A server that can be killed and comes back on its port."""

    def __init__(self, serve: Callable[..., AbstractContextManager[str]], settings: Settings) -> None:
        self._serve, self._settings = serve, settings
        self.port = free_port()
        self._running = ExitStack()
        self.start()

    def start(self) -> None:
        self.address = self._running.enter_context(self._serve(self._settings, self.port))

    def kill(self) -> None:
        for process in psutil.process_iter():
            if f"--port {self.port}" in command(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def stop(self) -> None:
        self._running.close()


class Chaos:
    """The run, its servers and its command; as a context manager it starts all, and on leaving none is left."""

    def __init__(self, data_dir: Path, settings: list[str], chance: random.Random, models: Path, module: str) -> None:
        """
        Args:
            models: of a run like this one; its warm start need not be taken again.
            module: what is run, ``WHOLE`` or ``TRAINING``.
        """
        self.data_dir, self._chance, self._models = data_dir, chance, models
        self._arguments = _arguments(settings, module)
        self.scene = Scene(data_dir, data_dir / "runs" / RUN_ID)
        self.rows: list[Row] = []
        self._command: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Chaos:
        if (checkpoints := self.scene.run_dir / "checkpoints").is_mount():  # of a chaos that was killed itself
            subprocess.run(["umount", "--lazy", str(checkpoints)], check=True)
        shutil.rmtree(self.data_dir, ignore_errors=True)
        shutil.copytree(self._models, self.data_dir / "models")
        settings = Settings(data_dir=self.data_dir, mlflow_uri="")
        self._mlflow, self._prefect = Server(mlflow_server, settings), Server(prefect_server, settings)
        self._disk = SmallDisk(self.scene.run_dir / "checkpoints", "400m")
        self._run()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._command is not None and self._command.poll() is None:
            self._command.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._command.wait(60)
            self._command.kill()
        self._missing, self._duplicates = self._ask_mlflow()
        self._mlflow.stop()
        self._prefect.stop()
        self._found = weights_of(self.scene.run_dir)
        self._disk.close()

    def kill_all(self, kills: int) -> None:
        """Victims in turn, each after the run has committed something new since the one before."""
        turns = self._turns()
        while len(self.rows) < kills:
            self._progress()
            before = len(self.rows)
            next(turns)()
            sys.stderr.write(
                "".join(f"{number + 1}/{kills} {row}\n" for number, row in enumerate(self.rows) if number >= before)
            )

    def _turns(self) -> Iterator[Callable[[], None]]:
        while True:
            for index, victim in enumerate(TRAINER_SIDE):
                yield lambda victim=victim: self._kill(victim)
                if index == 2:
                    yield self._kill_command
                if index == 4:
                    yield lambda: self._kill_server("MLflow server", self._mlflow)
                if index == 6:
                    yield lambda: self._kill_server("Prefect server", self._prefect)

    def _kill(self, victim: Victim) -> None:
        if not victim.wait(self.scene, self._chance):
            return
        found = victim.find(self.scene)
        if not found:
            return
        steps = self.scene.steps
        trainer = self.scene.trainer()
        started = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._chance.choice(found).kill()
        self._record(victim.name, victim.moment, started, steps, trainer if victim.restarts_trainer else None)

    def _kill_command(self) -> None:
        """The flow's process, at a moment when metrics are due; started again with --run-id."""
        metrics_due(self.scene, self._chance)
        steps, started = self.scene.steps, time.monotonic()
        assert self._command is not None
        self._command.kill()
        self._command.wait()
        self._run()
        self._record("flow run", "metric upload", started, steps, None)

    def _kill_server(self, name: str, server: Server) -> None:
        time.sleep(self._chance.uniform(0, 1))
        steps, started = self.scene.steps, time.monotonic()
        server.kill()
        time.sleep(self._chance.uniform(1, 4))
        server.stop()
        server.start()
        self._record(name, "any", started, steps, None)

    def _record(
        self, name: str, moment: str, started: float, steps: int, trainer: psutil.Process | None, *, kill: bool = True
    ) -> None:
        """Wait for a step beyond ``steps`` (and, if the trainer has to be replaced, of another trainer)."""
        resumed_from: int | None = None
        deadline = time.monotonic() + _RECOVERY_SECONDS
        recovered = False
        while not recovered and time.monotonic() < deadline:
            time.sleep(_QUIET_SECONDS)
            if self._done():
                recovered = True
            now = self.scene.trainer()
            replaced = now is not None and (trainer is None or now.pid != trainer.pid)
            if replaced and resumed_from is None and trainer is not None:
                # without its Ray head, or its disk, the old one has gone on for some steps
                resumed_from, steps = self.scene.committed, max(steps, self.scene.steps)
            recovered = recovered or (replaced and self.scene.steps > steps)
            self._run_again_if_failed()
        replayed = 0 if resumed_from is None else max(0, steps - resumed_from)
        self.rows.append(Row(name, moment, kill, recovered, time.monotonic() - started, replayed))

    def fill_and_damage(self) -> None:
        """A full disk, a read-only one, and five kinds of damage to the newest checkpoint."""
        if self._disk.mounted:
            self._outage("full", self._disk.fill, self._disk.empty)
            self._outage("read-only", lambda: self._disk.set_writable(False), lambda: self._disk.set_writable(True))
        for moment, damage in DAMAGES:
            self._progress()
            trainer = self.scene.trainer()
            if trainer is None:
                raise RuntimeError(f"the run ended before its checkpoint could get a {moment}: give it more steps")
            steps, started = self.scene.steps, time.monotonic()
            trainer.suspend()  # nothing is committed between the damage and the kill
            damage(self.scene.run_dir / "checkpoints" / f"step-{self.scene.committed:06d}")
            trainer.kill()
            self._record("newest checkpoint", moment, started, steps, trainer, kill=False)

    def _outage(self, moment: str, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Until a trainer has failed on it and another was started."""
        self._progress()
        steps, trainer = self.scene.steps, self.scene.trainer()
        begin()
        deadline = time.monotonic() + 60
        while self.scene.trainer() == trainer and time.monotonic() < deadline:
            time.sleep(_QUIET_SECONDS)
        end()
        self._record("disk of the checkpoints", moment, time.monotonic(), steps, trainer, kill=False)

    def finish(self) -> None:
        """Let the run come to its end."""
        deadline = time.monotonic() + 600
        while not self._done():
            self._run_again_if_failed()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run did not end; see {self.data_dir / 'command.log'}")
            time.sleep(_QUIET_SECONDS)

    def _progress(self) -> None:
        """Wait until something new is committed, so that no retry is without progress."""
        before, deadline = self.scene.committed, time.monotonic() + _RECOVERY_SECONDS
        while not (self.scene.committed > before and self.scene.trainer()):
            if self._done():
                raise RuntimeError("the run ended before all was done to it: give it more steps")
            self._run_again_if_failed()
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing new is committed; see {self.data_dir / 'command.log'}")
            time.sleep(_QUIET_SECONDS)

    def _done(self) -> bool:
        return self._command is not None and self._command.poll() == 0

    def _run(self) -> None:
        login = login_of(Settings(data_dir=self.data_dir))
        environment = _environment(
            self.data_dir,
            PREFECT_API_URL=f"{self._prefect.address}/api",
            RLFLOW_MLFLOW_URI=self._mlflow.address,
            **login.for_prefect(),
            **login.for_mlflow(),
        )
        with (self.data_dir / "command.log").open("ab") as log:
            self._command = subprocess.Popen(self._arguments, env=environment, stdout=log, stderr=log)

    def _run_again_if_failed(self) -> None:
        if self._command is not None and self._command.poll() not in (None, 0):
            self._run()

    def weights(self) -> str:
        return self._found

    def missing_steps(self) -> list[int]:
        return self._missing

    def duplicate_steps(self) -> list[int]:
        return self._duplicates

    def _ask_mlflow(self) -> tuple[list[int], list[int]]:
        """Steps of the journal that MLflow lacks, and those it holds more than once."""
        os.environ.update(login_of(Settings(data_dir=self.data_dir)).for_mlflow())
        client = MlflowClient(tracking_uri=self._mlflow.address)
        run = json.loads((self.scene.run_dir / "mlflow.json").read_text())["mlflow_run_id"]
        missing: set[int] = set()
        twice: set[int] = set()
        expected = range(1, self.scene.steps + 1)
        records = read_journal(self.scene.run_dir / "journal.jsonl")
        if not any(record.metrics["optim/grad_norm"] for record in records):
            raise ValueError("no step of the run had a gradient: equal weights would prove nothing")
        for metric in ("reward/mean", "optim/grad_norm", "time/step"):
            if metric not in records[-1].metrics:
                raise KeyError(f"the journal has no metric {metric}")
            counted = Counter(point.step for point in client.get_metric_history(run, metric))
            missing |= {step for step in expected if step not in counted}
            twice |= {step for step, times in counted.items() if times > 1 or step not in expected}
        return sorted(missing), sorted(twice)

    def orphans(self) -> list[str]:
        """Processes of the run that still live."""
        marker, found = str(self.data_dir), []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and process.environ().get("RLFLOW_DATA_DIR") == marker:
                    found.append(f"{process.pid} {command(process)[:80]}")
        return found

    def stray_files(self) -> list[str]:
        """What a whole run does not leave: parts of checkpoints, files written aside."""
        run_dir = self.scene.run_dir
        parts = (".staging-", ".trash-")
        return [
            str(path.relative_to(run_dir))
            for path in run_dir.rglob(".*")
            if path.name.startswith(parts) or path.suffix in (".tmp", ".new")
        ]
