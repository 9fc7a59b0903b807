"""Whom to kill, and when: finds the processes of a run, and waits for the moments that hurt most."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from rlcore.segment.journal import read_journal
from rlcore.segment.lease import holder_alive

_POLL_SECONDS = 0.003


@dataclass(frozen=True, slots=True)
class Scene:
    """What there is to see of a run while it is trained."""

    data_dir: Path
    run_dir: Path

    @property
    def steps(self) -> int:
        """Steps in the journal."""
        records = read_journal(self.run_dir / "journal.jsonl")
        return records[-1].step if records else 0

    @property
    def committed(self) -> int:
        """The newest checkpoint's step."""
        found = [int(path.name.removeprefix("step-")) for path in (self.run_dir / "checkpoints").glob("step-*[0-9]")]
        return max(found, default=0)

    def trainer(self) -> psutil.Process | None:
        holder = holder_alive(self.run_dir / "lease.json")
        with contextlib.suppress(psutil.NoSuchProcess):
            return None if holder is None else psutil.Process(holder.pid)
        return None

    def below_trainer(self, *words: str) -> list[psutil.Process]:
        """Live descendants of the trainer whose command line has one of ``words``."""
        trainer = self.trainer()
        if trainer is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [p for p in trainer.children(recursive=True) if any(word in command(p) for word in words)]
        return []


def command(process: psutil.Process) -> str:
    """Empty for one that has ended, zombies included."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@dataclass(frozen=True, slots=True)
class Victim:
    """Something to kill with SIGKILL."""

    name: str
    moment: str
    find: Callable[[Scene], list[psutil.Process]]  # one of these, at random
    wait: Callable[[Scene, random.Random], bool]  # for the moment; False: it did not come
    restarts_trainer: bool = True


def at_random(scene: Scene, chance: random.Random) -> bool:
    """Anywhere within the next step or two."""
    time.sleep(chance.uniform(0.0, 1.5))
    return True


def checkpoint_under_way(scene: Scene, chance: random.Random) -> bool:
    return _seen(lambda: any((scene.run_dir / "checkpoints").glob(".staging-*")), chance, later=0.05)


def weight_sync(scene: Scene, chance: random.Random) -> bool:
    """By the clock: a step is journaled right after its sync, and steps take equally long."""
    before = scene.steps
    if not _seen(lambda: scene.steps > before, chance, later=0.0):
        return False
    times = read_journal(scene.run_dir / "journal.jsonl")[-1].metrics
    time.sleep(max(0.0, times["time/step"] - chance.uniform(0.0, 1.5) * times["time/weight_sync"]))
    return True


def metrics_due(scene: Scene, chance: random.Random) -> bool:
    """Right after a commit: the driver publishes its steps at its next look, within a second."""
    before = scene.committed
    return _seen(lambda: scene.committed > before, chance, later=1.1)


def _seen(what: Callable[[], bool], chance: random.Random, *, later: float) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if what():
            time.sleep(chance.uniform(0.0, later))
            return True
        time.sleep(_POLL_SECONDS)
    return False


def trainer_process(scene: Scene) -> list[psutil.Process]:
    return [process for process in [scene.trainer()] if process is not None]


def workers(scene: Scene) -> list[psutil.Process]:
    return scene.below_trainer("ray::WorkerActor")


def graders(scene: Scene) -> list[psutil.Process]:
    return scene.below_trainer("rlcore.rewards.worker")


_WORKER = "worker actor (policy and vLLM engine)"
TRAINER_SIDE = (
    Victim(_WORKER, "any", workers, at_random),
    Victim("trainer", "checkpoint write", trainer_process, checkpoint_under_way),
    Victim("Ray head (gcs)", "any", lambda scene: scene.below_trainer("gcs_server"), at_random),
    Victim(_WORKER, "weight sync", workers, weight_sync),
    Victim("grading process", "any", graders, at_random, restarts_trainer=False),
    Victim(_WORKER, "checkpoint write", workers, checkpoint_under_way),
    Victim("Ray node (raylet)", "any", lambda scene: scene.below_trainer("raylet/raylet"), at_random),
    Victim("trainer", "any", trainer_process, at_random),
)
