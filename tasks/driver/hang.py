"""A trainer that makes no progress: find out, keep the stacks of all its processes, end it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil

from infra import processes
from rlcore.errors import HangError
from rlcore.process import SIGNAL, innermost, pid_of
from rlcore.segment.lease import Lease, Unchanged

_DUMP_SECONDS = 5.0


class HangWatch:
    """Progress is what the trainer counts in its lease: a finished phase of a step, bytes of a checkpoint, a look at
    what its driver wants."""

    def __init__(self, lease: Path, minutes: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._lease = Lease(lease)
        self._deadline = 60 * minutes
        self._unchanged = Unchanged(now)

    def stuck(self) -> bool:
        info = self._lease.read()
        return self._unchanged.seconds(None if info is None else (info.token, info.progress)) > self._deadline


def end_stuck_trainer(run_dir: Path, mark: str, minutes: float) -> HangError:
    """Keep the stacks under ``stacks/hang-N``, kill everything that carries ``mark``; returns what to raise."""
    live = run_dir / "stacks" / "live"
    kept = _next_folder(run_dir / "stacks")
    _dump(live, mark)
    processes.kill(mark)
    frames: list[str] = []
    for dump in sorted(live.glob("*.txt")):
        text = dump.read_text(errors="replace")
        found = innermost(text) or ["it did not answer"]
        frames.append(f"{dump.stem}:\n    " + "\n    ".join(found))
        dump.rename(kept / dump.name)
    where = "\n".join(frames) or "no process had come as far as to tell its stacks"
    return HangError(
        f"no progress for {minutes:g} minutes (segment.hang_minutes). The innermost frames of the main threads:\n"
        f"{where}\nThe stacks of all threads: {kept}. Everything of the trainer has been killed."
    )


def _dump(live: Path, mark: str) -> None:
    """Have every process of the trainer that can write its stacks do so. The signal would kill any other one."""
    running = {process.pid: process for process in processes.family(mark)}
    dumps = [dump for dump in live.glob("*.txt") if pid_of(dump) in running]
    for dump in dumps:
        try:
            running[pid_of(dump)].send_signal(SIGNAL)
        except psutil.NoSuchProcess:
            continue
    deadline = time.monotonic() + _DUMP_SECONDS
    sizes: list[int] = []
    while time.monotonic() < deadline:
        before, sizes = sizes, [dump.stat().st_size for dump in dumps]
        if all(sizes) and sizes == before:
            return
        time.sleep(0.2)


def _next_folder(stacks: Path) -> Path:
    number = 1
    while (folder := stacks / f"hang-{number}").exists():
        number += 1
    folder.mkdir(parents=True)
    return folder
