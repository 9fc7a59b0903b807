"""Whom to kill, and when: the processes of a run, and how to see that a moment is there."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from rlcore.process import SIGNAL, innermost
from rlcore.segment.journal import StepRecord, read_journal
from rlcore.segment.lease import holder_alive
from tests.left import command_of

_DUMP_SECONDS, _DUMP_QUIET_SECONDS = 0.5, 0.005
_HANDLER_SECONDS = 0.2  # from the dump's file to the signal's handler: before it the signal would end the trainer


ComesBack = Literal["step", "published", "process", "end"]
"""What shows that a run has come back: its next step, MLflow's next step, another such process, or its end."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What can be seen of a run from outside."""

    run_dir: Path
    command_log: Path
    command: Callable[[], psutil.Process | None]  # the flow's process, if it lives

    @property
    def journal(self) -> list[StepRecord]:
        return read_journal(self.run_dir / "journal.jsonl")

    @property
    def steps(self) -> int:
        records = self.journal
        return records[-1].step if records else 0

    @property
    def committed(self) -> int:
        """The newest checkpoint's step."""
        found = [int(path.name.removeprefix("step-")) for path in (self.run_dir / "checkpoints").glob("step-*[0-9]")]
        return max(found, default=0)

    @property
    def published(self) -> int:
        """The last step that MLflow has acknowledged."""
        noted = self.run_dir / "mlflow.json"
        return int(json.loads(noted.read_text())["published_step"]) if noted.exists() else 0

    def trainer(self) -> psutil.Process | None:
        """The holder of the lease."""
        holder = holder_alive(self.run_dir / "lease.json")
        with contextlib.suppress(psutil.NoSuchProcess):
            return None if holder is None else psutil.Process(holder.pid)
        return None

    def starting_trainer(self) -> psutil.Process | None:
        """The trainer that has not taken a step yet, with the lease or still without."""
        spec = f"rlcore.jobs.segment {self.run_dir / 'spec.json'}"
        for process in psutil.process_iter():
            if spec in command_of(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    records = self.journal
                    stepped = records and records[-1].timestamp_ms / 1000 >= started(process)
                    return None if stepped else process
        return None

    def trainer_frames(self) -> list[str]:
        """The stack of the trainer's main thread, the innermost frame first; empty if it does not tell.

        It is the dump that a trainer writes on SIGUSR1 for the hang watch.
        """
        trainer = self.trainer()
        if trainer is None:
            return []
        dump = self.run_dir / "stacks" / "live" / f"trainer-{trainer.pid}.txt"
        if not dump.exists():
            return []
        before = size = dump.stat().st_size
        if not before and time.time() - dump.stat().st_ctime < _HANDLER_SECONDS:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            trainer.send_signal(SIGNAL)
        deadline = time.monotonic() + _DUMP_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_DUMP_QUIET_SECONDS)
            last, size = size, dump.stat().st_size
            if size == last != before:
                break
        return innermost(dump.read_bytes()[before:].decode(errors="replace"), 100)


def started(process: psutil.Process) -> float:
    """When it started, in seconds since the epoch. psutil's own time is up to a second early: the kernel tells the time
    of its boot in whole seconds."""
    now = psutil.boot_time() + time.clock_gettime(time.CLOCK_BOOTTIME)
    return process.create_time() + time.time() - now


def below(process: psutil.Process | None, *words: str) -> list[psutil.Process]:
    """Live descendants whose command line has one of ``words``."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process is not None:
            return [p for p in process.children(recursive=True) if any(word in command_of(p) for word in words)]
    return []


@dataclass(frozen=True, slots=True)
class Kind:
    """A victim at a moment. ``find`` returns whom to choose from, none if there is nobody yet; ``holds`` is asked while
    the victim is stopped by SIGSTOP, so that what it sees is so at the kill."""

    victim: str
    moment: str
    find: Callable[[Scene], list[psutil.Process]]
    holds: Callable[[Scene], bool]
    at_most: float  # seconds of a random delay before the kill, once victim and moment are there
    restarts_trainer: bool = True
    comes_back: ComesBack = "step"
    is_past: Callable[[Scene], bool] = lambda _: False  # the moment will not come again

    def __str__(self) -> str:
        return f"{self.victim}: {self.moment}"


def _one(process: psutil.Process | None) -> list[psutil.Process]:
    return [] if process is None else [process]


def _trainer(scene: Scene) -> list[psutil.Process]:
    return _one(scene.trainer())


def _workers(scene: Scene) -> list[psutil.Process]:
    return below(scene.trainer(), "ray::WorkerActor")


def _command(scene: Scene) -> list[psutil.Process]:
    return _one(scene.command())


def _job(module: str) -> Callable[[Scene], list[psutil.Process]]:
    """The job of the flow, its Ray and its workers."""
    return lambda scene: [
        process
        for job in below(scene.command(), f"-m {module} ")
        for process in (job, *below(job, "ray::", "raylet/raylet", "gcs_server"))
    ]


def _always(scene: Scene) -> bool:
    return True


def _writes_checkpoint(scene: Scene) -> bool:
    """This trainer does: a dead one leaves its part until the next commit."""
    trainer = scene.trainer()
    parts = (scene.run_dir / "checkpoints").glob(".staging-*")
    return trainer is not None and any(part.stat().st_ctime > started(trainer) for part in parts)


def _sends_checkpoint(scene: Scene) -> bool:
    return any((scene.run_dir / "checkpoints").glob(".sending-*"))


def _syncs_in_loop(scene: Scene) -> bool:
    frames = " ".join(scene.trainer_frames())
    return "in sync_weights" in frames and "training/loop.py" in frames


def _syncs_first(scene: Scene) -> bool:
    frames = " ".join(scene.trainer_frames())
    return "in sync_weights" in frames and "training/loop.py" not in frames


def _metrics_are_due(scene: Scene) -> bool:
    return scene.published < scene.committed


def _starts(scene: Scene) -> bool:
    return scene.steps == 0


def _stepped(scene: Scene) -> bool:
    return scene.steps > 0


def _restarts(scene: Scene) -> bool:
    return scene.starting_trainer() is not None and scene.committed > 0


def _registers(scene: Scene) -> bool:
    """The merge job has written its verified model, and the log does not say that it is registered. Only files are
    read: all this lasts about a second."""
    merged = any(scene.run_dir.parents[1].glob("jobs/merge-*/result.json"))
    return merged and "model: registered" not in scene.command_log.read_text()


_WORKER = "worker actor (policy and vLLM engine)"
COMMAND_STARTS = Kind("flow run", "start", _command, _starts, 8.0, False)
COMMAND_PUBLISHES = Kind("flow run", "metric upload", _command, _metrics_are_due, 0.0, False, "published")
COMMAND_SENDS = Kind("flow run", "checkpoint upload", _command, _sends_checkpoint, 0.0, False, "published")
COMMAND_REGISTERS = Kind("flow run", "register", _command, _registers, 0.2, False, "end")
TRAINER_STARTS = Kind("trainer", "start", lambda scene: _one(scene.starting_trainer()), _starts, 8.0)
TRAINER_RESUMES = Kind("trainer", "resume", lambda scene: _one(scene.starting_trainer()), _restarts, 8.0)
FIRST_SYNC = Kind(_WORKER, "first sync", _workers, _syncs_first, 0.0, is_past=_stepped)
GRADER = Kind(
    "grading process", "any", lambda scene: below(scene.trainer(), "rlcore.rewards.worker"), _always, 1.5, False
)
EVALUATION = Kind("evaluation", "evaluation", _job("rlcore.jobs.evaluate"), _always, 4.0, False, "process")
MERGE = Kind("merge", "merge", _job("rlcore.jobs.merge"), _always, 4.0, False, "process")
RESTARTING = (
    Kind(_WORKER, "any", _workers, _always, 1.5),
    Kind(_WORKER, "checkpoint write", _workers, _writes_checkpoint, 0.03),
    Kind(_WORKER, "weight sync", _workers, _syncs_in_loop, 0.0),
    Kind("trainer", "any", _trainer, _always, 1.5),
    Kind("trainer", "checkpoint write", _trainer, _writes_checkpoint, 0.03),
    Kind("Ray head (gcs)", "any", lambda scene: below(scene.trainer(), "gcs_server"), _always, 1.5),
    Kind("Ray node (raylet)", "any", lambda scene: below(scene.trainer(), "raylet/raylet"), _always, 1.5),
)
"""Each ends the trainer; Prefect's retry starts another."""
