"""Process helpers: faster imports, stack traces on a signal, counts of out-of-memory kills, a background thread, a free
port, and seconds per phase."""

from __future__ import annotations

import faulthandler
import gc
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TypeVar

# A process may listen seconds after it got its port. Linux gives no port of this range to a connection meanwhile.
_PORTS = range(20_000, 30_000)


@contextmanager
def making_what_stays() -> Iterator[None]:
    """Pause the garbage collector, and exclude the objects made inside the block from later collections.

    Imports and engine starts make millions of permanent objects. Scanning them repeatedly is a third of the start-up.
    Inside another such block, or where the collector is off, this one changes nothing.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def leaving_out(*packages: str) -> Iterator[None]:
    """Make these packages look uninstalled inside the block, unless they are already imported."""
    absent = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def make_transformers_lean() -> None:
    """Call this before the first import of transformers, which then takes a fifth less time: it imports scikit-learn
    and SciPy, if installed, for assisted decoding and object detection only."""
    with leaving_out("sklearn", "scipy"):
        from transformers.utils import import_utils

        import_utils.is_sklearn_available()  # transformers caches the answers
        import_utils.is_scipy_available()


@contextmanager
def importing_vllm() -> Iterator[None]:
    """Import vLLM inside the block, in a third less time: without SciPy, which it imports, if installed, for audio."""
    make_transformers_lean()
    from transformers.utils import import_utils

    in_use = import_utils.is_sklearn_available() or import_utils.is_scipy_available()
    with leaving_out(*(() if in_use else ("scipy",))):
        yield


# The count of this control group (version 2, version 1), else of the machine.
_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")


def oom_kills(counters: tuple[str, ...] = _COUNTERS) -> int:
    """Out-of-memory kills since boot, to compare two counts; 0 if the kernel does not count them."""
    for path in counters:
        if not Path(path).exists():
            continue
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


SIGNAL = signal.SIGUSR1
_FRAMES_SHOWN = 8  # enough to name the caller that waits, even while it renews the lease


def dump_on_signal(folder: Path, name: str, pid: int) -> None:
    """On SIGUSR1, this process appends its stacks to ``folder/NAME-PID.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{name}-{pid}.txt").open("w")
    faulthandler.register(SIGNAL, file=file, all_threads=True)  # keeps the file open


def pid_of(dump: Path) -> int:
    return int(dump.stem.rpartition("-")[2])


def innermost(dump: str, frames: int = _FRAMES_SHOWN) -> list[str]:
    """The innermost frames of the main thread, from faulthandler's output. The main thread handles the signal, so it is
    the current thread; otherwise faulthandler prints it last."""
    blocks = [block for block in dump.split("\n\n") if "(most recent call first)" in block]
    if not blocks:
        return []
    current = next((block for block in blocks if block.lstrip().startswith("Current thread")), blocks[-1])
    return [line.strip() for line in current.splitlines() if line.startswith("  File ")][:frames]


T = TypeVar("T")


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a daemon thread; the future has its result or exception."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by future.result()
            future.set_exception(error)

    Thread(target=run, daemon=True, name="background").start()
    return future


def free_ports(count: int) -> list[int]:
    """Different ports of this machine that nothing uses at the moment.

    Raises:
        OSError: fewer are free.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{len(found)} of the ports {_PORTS.start} to {_PORTS.stop - 1} are free, and {count} are needed")


def free_port() -> int:
    """A port of this machine that nothing uses at the moment."""
    return free_ports(1)[0]


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
        """Add to the seconds of a phase."""
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds

    def move(self, seconds: float, phase: str, to: str) -> None:
        """Move seconds from one phase to another."""
        self.note(phase, -seconds)
        self.note(to, seconds)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase so far."""
        return dict(self._phases)

    @property
    def seconds(self) -> dict[str, float]:
        return {**self._phases, "step": time.perf_counter() - self._start}
