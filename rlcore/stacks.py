"""Stacks of all threads of a process that does not answer, on SIGUSR1: also of one that is stuck in C. No torch."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

SIGNAL = signal.SIGUSR1
_FRAMES_SHOWN = 4


def dump_on_signal(folder: Path, name: str, pid: int) -> None:
    """From now on SIGUSR1 makes this process append its stacks to ``folder/NAME-PID.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{name}-{pid}.txt").open("w")
    faulthandler.register(SIGNAL, file=file, all_threads=True)  # holds the file open from here on


def pid_of(dump: Path) -> int:
    return int(dump.stem.rpartition("-")[2])


def innermost(dump: str, frames: int = _FRAMES_SHOWN) -> list[str]:
    """The innermost frames of the main thread in what faulthandler wrote: it takes the signal, so it is the current
    one; faulthandler prints it last where it is not."""
    blocks = [block for block in dump.split("\n\n") if "(most recent call first)" in block]
    if not blocks:
        return []
    current = next((block for block in blocks if block.lstrip().startswith("Current thread")), blocks[-1])
    return [line.strip() for line in current.splitlines() if line.startswith("  File ")][:frames]
