"""A run under fire: real Prefect and MLflow servers, the ordinary command, and SIGKILL."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.servers import mlflow_server, prefect_server
from tests.chaos.compare import weights_of
from tests.chaos.faults import DAMAGES, SmallDisk
from tests.chaos.report import DroppedFault, Row
from tests.chaos.victims import ComesBack, Kind, Scene, started
from tests.left import Traces, command_of, half_written, left_of
from tests.ports import reserved_port
from tests.shell import new_shell

EXPERIMENT = "grpo-gsm8k-tiny"
WHOLE, TRAINING = ("tasks.cli", "train"), ("tests.long.train_only",)
SMALL = (
    "model.tiny.warm_start_steps=200",
    "segment.steps=2",
    "training.problems_per_batch=8",
    "training.learning_rate=5.0e-5",
    "rollout.group_size=4",
    "data.synthetic_problems=256",
    "evaluation.problems=16",
    "evaluation.samples=1",
    "evaluation.every_steps=8",  # not at the ends of segments: the undisturbed run has only one
)
_PATIENCE_SECONDS = 300.0  # for a commit, a recovery
_END_SECONDS = 900.0  # for a moment that may lie behind all of the training, and for the end
_QUIET_SECONDS = 0.25
_POLL_SECONDS = 0.006  # at most, between two looks
_DISK, _CHECKPOINT = "disk of the checkpoints", "newest checkpoint"
_GONE_SECONDS = 20.0  # for processes that end by themselves once the command has ended


FAULTS = (
    *(f"{_DISK}: {moment}" for moment in ("full", "read-only")),
    *(f"{_CHECKPOINT}: {moment}" for moment, _ in DAMAGES),
)


class Server:
    """A server that can be killed and comes back on its port."""

    def __init__(self, name: str, serve: Callable[..., AbstractContextManager[str]], settings: Settings) -> None:
        self.name, self._serve, self._settings = name, serve, settings
        self._port = reserved_port()
        self._running = ExitStack()
        self.start()

    def start(self) -> None:
        self.address = self._running.enter_context(self._serve(self._settings, self._port))

    def kill(self) -> int:
        """Returns how many processes it had."""
        found = left_of(f"--port\0{self._port}")
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return len(found)

    def stop(self) -> None:
        self._running.close()


@dataclass(frozen=True, slots=True)
class Servers:
    """Prefect and MLflow with one login, for every run."""

    data_dir: Path
    prefect: Server
    mlflow: Server

    def variables(self) -> dict[str, str]:
        login = login_of(Settings(data_dir=self.data_dir))
        addresses = {"PREFECT_API_URL": f"{self.prefect.address}/api", "RLFLOW_MLFLOW_URI": self.mlflow.address}
        return {**addresses, **login.for_prefect(), **login.for_mlflow()}


@contextmanager
def servers(data_dir: Path) -> Iterator[Servers]:
    settings = Settings(data_dir=data_dir, mlflow_uri="")
    prefect = Server("Prefect server", prefect_server, settings)
    try:
        mlflow = Server("MLflow server", mlflow_server, settings)
        try:
            yield Servers(data_dir, prefect, mlflow)
        finally:
            mlflow.stop()
    finally:
        prefect.stop()


@dataclass(frozen=True, slots=True)
class Job:
    """One training run: what is typed, and where."""

    run_id: str
    data_dir: Path
    module: tuple[str, ...]
    settings: tuple[str, ...]
    servers: Servers
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.data_dir / "runs" / self.run_id

    @property
    def log(self) -> Path:
        return self.data_dir / f"{self.run_id}.log"

    def start(self) -> subprocess.Popen[bytes]:
        words = [word for setting in (*SMALL, *self.settings) for word in ("--set", setting)]
        command = [sys.executable, "-m", *self.module, EXPERIMENT, "--run-id", self.run_id, *words]
        # short delays: this is about what comes back, not about how politely it waits
        own = {"RLFLOW_DATA_DIR": str(self.data_dir), "RLFLOW_RETRY_DELAY_SCALE": "0.1", **self.variables}
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=new_shell({**self.servers.variables(), **own}), stdout=log, stderr=log)

    def run(self) -> None:
        """When nobody kills anything."""
        code = self.start().wait()
        if code != 0:
            raise RuntimeError(
                f"the undisturbed run ended with {code}; see {self.log}:\n{self.log.read_text()[-3000:]}"
            )


@dataclass(frozen=True, slots=True)
class Strike:
    """A kill, or a fault, that has been done."""

    victim: str
    moment: str
    kill: bool
    at: float  # time.monotonic()
    wall: float  # time.time()
    steps: int  # of the journal
    restarts_trainer: bool


class Chaos:
    """A job under fire; as a context manager it starts the command, and on leaving nothing of it is left."""

    def __init__(self, leg: str, job: Job, chance: random.Random, *, types_again: bool, small_disk: bool) -> None:
        """
        Args:
            types_again: the command, where it has ended before the run has. False: that is an error.
            small_disk: the checkpoints lie on a disk of their own, which can be filled.
        """
        self.leg, self.job, self._chance, self._types_again = leg, job, chance, types_again
        self.scene = Scene(job.run_dir, job.log, self._command_process)
        self.rows: list[Row] = []
        self.missed: list[str] = []
        self.dropped: list[DroppedFault] = []
        self.retyped = 0
        self._traces = Traces(str(job.data_dir))
        self._stack = ExitStack()
        self._disk = SmallDisk(job.run_dir / "checkpoints", "400m") if small_disk else None

    def __enter__(self) -> Chaos:
        if self._disk is not None:
            self._stack.callback(self._disk.close)
        self._stack.enter_context(self._traces.watched())
        self._command = self.job.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (psutil.Process(self._command.pid),) if self._command.poll() is None else ():
            process.terminate()
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(60)
        for process in self._traces.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._command.wait()
        self._stack.close()

    def disturb(self, *kinds: Kind, after_commit: bool = True) -> None:
        """Kill each, the next one without waiting for a step; then wait until the run has come back."""
        if after_commit and not self._progress():
            self._miss(*map(str, kinds))
            return
        strikes = []
        for kind in kinds:
            strike = self._strike(kind)
            if strike is None:
                self._miss(str(kind))
            else:
                strikes.append(strike)
        if strikes:
            self._record(strikes, kinds[-1].comes_back, kinds[-1])

    def kill_server(self, server: Server) -> None:
        if not self._progress():
            self._miss(f"{server.name}: any")
            return
        time.sleep(self._chance.uniform(0, 1))
        strike = self._struck(server.name, "any", kill=True, restarts_trainer=False)
        killed = server.kill()
        time.sleep(self._chance.uniform(1, 4))
        server.stop()
        server.start()
        if killed:
            self._record([strike], "published" if server is self.job.servers.mlflow else "step")
        else:
            self._miss(f"{server.name}: any")

    def fill_and_damage(self) -> None:
        """A full disk, a read-only one, and five kinds of damage to the newest checkpoint."""
        disk = self._disk
        if disk is not None and not disk.refused:
            self._outage("full", disk.fill, disk.empty)
            self._outage("read-only", lambda: disk.set_writable(False), lambda: disk.set_writable(True))
        else:
            reason = "no small disk" if disk is None else disk.refused
            self.dropped += [DroppedFault(f"{_DISK}: {moment}", reason) for moment in ("full", "read-only")]
        for moment, damage in DAMAGES:
            trainer = self.scene.trainer() if self._progress() else None
            if trainer is None:
                self._miss(f"{_CHECKPOINT}: {moment}")
                continue
            trainer.suspend()  # nothing is committed between the damage and the kill
            strike = self._struck(_CHECKPOINT, moment, kill=False, restarts_trainer=True)
            damage(self.scene.run_dir / "checkpoints" / f"step-{self.scene.committed:06d}")
            trainer.kill()
            self._record([strike])

    def finish(self) -> None:
        """Let the run come to its end, and see what it has left."""
        deadline = time.monotonic() + _END_SECONDS
        while not self._done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run did not end; see {self.job.log}")
            time.sleep(_QUIET_SECONDS)
        deadline = time.monotonic() + _GONE_SECONDS
        while (left := self._traces.processes()) and time.monotonic() < deadline:
            time.sleep(_QUIET_SECONDS)
        self.orphans = [f"{process.pid} {command_of(process)[:200]}" for process in left]
        self.stray = [str(path) for path in (*half_written(self.job.data_dir), *self._traces.files())]
        self.weights = weights_of(self.job.run_dir)

    def _miss(self, *kinds: str) -> None:
        self.missed += [f"{kind} ({self.leg})" for kind in kinds]
        sys.stderr.write(f"{self.leg}: MISSED {', '.join(kinds)}\n")

    def _strike(self, kind: Kind) -> Strike | None:
        """None: the run, or the time, ended before the moment was there."""
        deadline, has_waited = time.monotonic() + _END_SECONDS, False
        while time.monotonic() < deadline and not self._done() and not kind.is_past(self.scene):
            victims = kind.find(self.scene)
            if victims and not has_waited and (not kind.at_most or kind.holds(self.scene)):
                time.sleep(self._chance.uniform(0, kind.at_most))
                has_waited = True
            elif victims and has_waited and (strike := self._kill_if_it_holds(self._chance.choice(victims), kind)):
                return strike
            time.sleep(self._chance.uniform(0, _POLL_SECONDS))
        return None

    def _kill_if_it_holds(self, victim: psutil.Process, kind: Kind) -> Strike | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.suspend()
            if not kind.holds(self.scene):
                victim.resume()
                return None
            strike = self._struck(kind.victim, kind.moment, kill=True, restarts_trainer=kind.restarts_trainer)
            victim.kill()
            if victim.pid == self._command.pid:
                self._command.wait()
                self._type_again()
            return strike
        return None

    def _struck(self, victim: str, moment: str, *, kill: bool, restarts_trainer: bool) -> Strike:
        sys.stderr.write(f"{self.leg}: {victim}: {moment}, at step {self.scene.steps}\n")
        return Strike(victim, moment, kill, time.monotonic(), time.time(), self.scene.steps, restarts_trainer)

    def _record(self, strikes: list[Strike], comes_back: ComesBack = "step", kind: Kind | None = None) -> None:
        """Wait until the run has come back from the last strike, and note all of them."""
        last = strikes[-1]
        steps, resumed_from = last.steps, None
        deadline = time.monotonic() + _PATIENCE_SECONDS
        recovered = False
        while not recovered and time.monotonic() < deadline:
            time.sleep(_QUIET_SECONDS)
            if self._done():
                recovered = True
            elif comes_back == "process":
                recovered = kind is not None and any(map(_since(last.wall), kind.find(self.scene)))
            elif comes_back == "published":
                recovered = self.scene.published > last.steps
            elif comes_back == "step":
                now = self.scene.trainer()
                replaced = now is not None and (not last.restarts_trainer or _since(last.wall)(now))
                if replaced and last.restarts_trainer and resumed_from is None:
                    # without its Ray head, or its disk, the old one has gone on for some steps
                    resumed_from, steps = self.scene.committed, max(steps, self.scene.steps)
                recovered = replaced and self.scene.steps > steps
        replayed = 0 if resumed_from is None else max(0, steps - resumed_from)
        for strike in strikes:
            seconds = time.monotonic() - strike.at
            row = Row(self.leg, strike.victim, strike.moment, strike.kill, recovered, seconds, replayed)
            self.rows.append(row)
            sys.stderr.write(f"{row}\n")

    def _outage(self, moment: str, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Until a trainer has failed on it and another was started."""
        if not self._progress():
            self._miss(f"{_DISK}: {moment}")
            return
        trainer = self.scene.trainer()
        begin()
        deadline = time.monotonic() + 60
        while self.scene.trainer() == trainer and time.monotonic() < deadline:
            time.sleep(_QUIET_SECONDS)
        end()
        self._record([self._struck(_DISK, moment, kill=False, restarts_trainer=True)])

    def _progress(self) -> bool:
        """Wait until something new is committed, so that no retry is without progress. False: the run has ended."""
        before, deadline = self.scene.committed, time.monotonic() + _PATIENCE_SECONDS
        while not (self.scene.committed > before and self.scene.trainer()):
            if self._done():
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing new is committed; see {self.job.log}")
            time.sleep(_QUIET_SECONDS)
        return True

    def _command_process(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self._command.pid) if self._command.poll() is None else None
        return None

    def _done(self) -> bool:
        """Whether the command has ended well; one that has failed is typed again, where that is allowed."""
        code = self._command.poll()
        if code not in (None, 0):
            words = self.job.log.read_text()[-2000:]
            if not self._types_again:
                raise RuntimeError(
                    f"{self.leg}: the command ended with {code} and nothing may be typed again:\n{words}"
                )
            sys.stderr.write(f"{self.leg}: the command ended by itself with {code}:\n{words}\n")
            self._type_again()
        return code == 0

    def _type_again(self) -> None:
        self.retyped += 1
        self._command = self.job.start()


def _since(wall: float) -> Callable[[psutil.Process], bool]:
    def is_newer(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return started(process) > wall
        return False

    return is_newer
