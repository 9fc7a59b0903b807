"""Processes: a quick start with torch and vLLM, stack traces on a signal, kills for memory, work in a thread, seconds
per phase."""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TypeVar


@contextmanager
def making_what_stays() -> Iterator[None]:
    """Imports and engine starts make millions of objects that stay: looking through them again and again is a third of
    the start-up time. Those made inside are not looked at later either."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def leaving_out(*packages: str) -> Iterator[None]:
    """Imports inside find these packages not installed, unless they have been imported before."""
    absent = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: no such module
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def make_transformers_lean() -> None:
    """To be called before transformers is imported. It imports scikit-learn and SciPy, where they are installed, for
    assisted decoding and for losses of object detection: a fifth of the time that importing it takes."""
    with leaving_out("sklearn", "scipy"):
        from transformers import utils

        utils.is_sklearn_available()  # it remembers the answer
        utils.is_scipy_available()


@contextmanager
def importing_vllm() -> Iterator[None]:
    """It imports SciPy, where it is installed, for sound: a third of the time that importing it takes."""
    make_transformers_lean()
    from transformers import utils

    asked_before = utils.is_sklearn_available() or utils.is_scipy_available()  # and it would miss them now
    with leaving_out(*(() if asked_before else ("scipy",))):
        yield


# This control group's own count where it has one (version 2, version 1), else the machine's.
_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")


def oom_kills(counters: tuple[str, ...] = _COUNTERS) -> int:
    """Kills so far: compare two counts. 0 where the kernel does not say."""
    for path in counters:
        if not Path(path).exists():
            continue
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


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


T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """What ``work`` returns or raises. Its thread keeps no process alive that is on its way out."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            future.set_exception(error)

    Thread(target=run, daemon=True, name="beside the training").start()
    return future


class Clock:
    """``with clock("generate"): ...`` adds to ``seconds["generate"]``; ``seconds["step"]`` counts from construction."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.note(phase, time.perf_counter() - start)

    def note(self, phase: str, seconds: float) -> None:
        """Add seconds that a phase took beside the others."""
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds

    def move(self, seconds: float, phase: str, to: str) -> None:
        """Count seconds of one phase as another's."""
        self.note(phase, -seconds)
        self.note(to, seconds)

    @property
    def seconds(self) -> dict[str, float]:
        return {**self._phases, "step": time.perf_counter() - self._start}
