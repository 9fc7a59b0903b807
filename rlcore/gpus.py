"""The GPUs of this machine, which several runs share. A process claims as many as it uses; others wait until it ends.

A claim is a lock on a file that stands for one GPU. The kernel releases it when the process ends, however it ends.
Within a Ray cluster Ray divides the GPUs, and nothing is claimed here.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)
SHARE = "RLFLOW_SHARE_GPUS"
FOLDER = Path("/tmp/rlflow-gpus")  # not in TMPDIR: each trainer has one of its own
_VISIBLE, _ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"
_POLL_SECONDS, _TELL_SECONDS = 1.0, 60.0
_claimed: dict[str, int] = {}  # open files by GPU: their locks last as long as this process


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Does not initialize CUDA, which would
    make a later change of that variable void."""
    named = os.environ.get(_VISIBLE)
    if named is None:
        return [str(index) for index in range(_count())]
    return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]


def free_gpus() -> list[str]:
    """Those of ``visible_gpus`` that nobody has claimed."""
    with _alone(), _locked(visible_gpus()) as locks:
        return list(locks)


def shortage(count: int) -> str:
    """In words, if a process that claims so many GPUs now would have to wait; empty: it would not."""
    visible, free = len(visible_gpus()), len(free_gpus())
    return "" if free >= count or visible < count else f"{free} of {visible} GPU(s) are free"


def claim_gpus(count: int, *, waiting: Callable[[], None] = lambda: None, inherited: bool = False) -> None:
    """Claim ``count`` GPUs for the rest of this process, and hide the others from CUDA. Waits until they are free.

    Call this before CUDA is initialized. Does nothing if this process has claimed as many before, or if fewer are
    visible: whoever needs more says so with an error of its own. Does nothing either where RLFLOW_SHARE_GPUS is 1.

    Args:
        waiting: called every second of a wait. It may raise to end the wait.
        inherited: programs that this process starts, or becomes, hold the claim as well.
    """
    visible, told = visible_gpus(), -_TELL_SECONDS
    if len(visible) < count or len(_claimed) >= count or os.environ.get(SHARE) == "1":
        return
    while (taken := _take(visible, count, inherited)) is None:
        if time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            logger.info("waits for %d GPU(s) of this machine: %d of %d are free", count, len(free_gpus()), len(visible))
        waiting()
        time.sleep(_POLL_SECONDS)
    if len(taken) < len(visible):
        os.environ.setdefault(_ORDER, "PCI_BUS_ID")  # the order in which the driver numbers them
        os.environ[_VISIBLE] = ",".join(taken)


def _take(visible: Sequence[str], count: int, inherited: bool) -> list[str] | None:
    """The names of ``count`` GPUs that are now claimed; None: fewer are free, and none is claimed."""
    with _alone(), _locked(visible) as locks:
        if len(locks) < count:
            return None
        names = list(locks)[:count]
        for name in names:
            _claimed[name] = locks.pop(name)
            os.set_inheritable(_claimed[name], inherited)
        return names


@contextmanager
def _alone() -> Iterator[None]:
    """One process at a time looks at the locks, so that each gets all that it needs or nothing."""
    file = _open("look")
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


@contextmanager
def _locked(names: Sequence[str]) -> Iterator[dict[str, int]]:
    """Locked files of the free GPUs among ``names``. At the end those that are still in the dictionary are released."""
    locks: dict[str, int] = {}
    try:
        for name in names:
            file = _open(f"gpu-{name}")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
            else:
                locks[name] = file
        yield locks
    finally:
        for file in locks.values():
            os.close(file)


def _open(name: str) -> int:
    """An open file of this name, the same one for all users of the machine."""
    with suppress(FileExistsError):
        FOLDER.mkdir()
        FOLDER.chmod(stat.S_ISVTX | 0o777)
    path = FOLDER / name.replace("/", "-")
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with suppress(FileExistsError):  # another process has just created it
            file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            os.fchmod(file, 0o644)  # whatever the umask: a lock needs no more than the right to read
            return file


def _count() -> int:
    """How many GPUs NVIDIA's driver shows to this process; 0 without one."""
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if driver.nvmlInit_v2() != 0:
        return 0
    number = ctypes.c_uint()
    found: int = driver.nvmlDeviceGetCount_v2(ctypes.byref(number))
    driver.nvmlShutdown()
    return number.value if found == 0 else 0
