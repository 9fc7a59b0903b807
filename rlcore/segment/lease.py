"""Which process trains a run (``Lease``), and what its driver wants (``Control``): two small JSON files. No torch.

A run never has two trainers: acquiring is exclusive, and a trainer that finds another token on ``renew`` stops. No
trainer outlives its driver for long: the driver's heartbeat is in the control file.

Clocks of two hosts may differ by minutes, so a timestamp of another process is never compared with the local clock. A
process counts as silent when its file has not changed for the deadline, measured by the reader's monotonic clock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from rlcore.errors import LeaseLostError, StorageError
from rlcore.files import write_json_atomically

logger = logging.getLogger(__name__)
DEADLINE_SECONDS = 120.0
_LOOK_SECONDS = 1.0
M = TypeVar("M", bound=BaseModel)


class LeaseInfo(BaseModel):
    """The process that holds a run. Its start time distinguishes it from a later process with the same pid."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str  # unique per trainer process
    pid: int
    started: float  # seconds after boot, which changes of the wall clock do not affect
    host: str  # name, boot and process namespace: in another one the same pid is another process
    renewed_at: float  # seconds since the epoch by the holder's clock; changes with every renewal
    progress: int = 0  # grows when the trainer completes something, so not with every renewal

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this host."""
        return self.host == _host()

    def __str__(self) -> str:
        if self.is_here:
            renewed = f"{time.time() - self.renewed_at:.0f} s ago"
        else:
            renewed = f"at {datetime.fromtimestamp(self.renewed_at, UTC):%H:%M:%S} UTC by its own clock"
        return f"pid {self.pid} on {self.host} (token {self.token}, renewed {renewed})"


class Unchanged:
    """Measures how long a value has not changed, by this process's monotonic clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._since = now()
        self._value: object = None

    def seconds(self, value: object) -> float:
        """Seconds since a call first passed this value, or since the start while every call passed None."""
        if value != self._value:
            self._value, self._since = value, self._now()
        return self._now() - self._since


class Lease:
    """The lease file of one run.

    ``deadline``: a holder on another host counts as dead once the file has not changed for this many seconds while
    this object looked at it. A holder on this host is looked up among the processes instead.
    """

    def __init__(
        self,
        path: Path,
        deadline: float = DEADLINE_SECONDS,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path = path
        self._deadline = deadline
        self._sleep = sleep
        self._foreign = Unchanged(now)
        self._mine: LeaseInfo | None = None

    def acquire(self, token: str) -> LeaseInfo:
        """Become the holder, or take over from a dead holder. If that was on another host, wait for up to the deadline.

        Raises:
            LeaseLostError: another process holds the lease; the message names it.
        """
        self._wait_for_a_renewal_elsewhere()
        mine = LeaseInfo(
            token=token, pid=os.getpid(), started=_started(os.getpid()), host=_host(), renewed_at=time.time()
        )
        with self._locked():
            holder = self.read()
            if holder is not None and self._is_alive(holder):
                raise LeaseLostError(
                    f"the run of {self._path} is held by {holder}. Attach to that trainer, or stop it first."
                )
            for left in self._path.parent.glob(f".{self._path.name}.*"):  # whoever writes these holds the file lock
                left.unlink(missing_ok=True)
            if holder is None:
                self._create(mine)
            else:
                write_json_atomically(self._path, mine.model_dump_json())
        self._mine = mine
        # On a file system without locks between hosts the last writer wins, and the other one notices here.
        self._require_mine()
        return mine

    def renew(self, *, progress: bool = True) -> None:
        """Record that this trainer is alive and, with ``progress``, that it completed something since the last renewal.

        Raises:
            LeaseLostError: the file is gone or has another token: this trainer must stop without writing.
        """
        with self._locked():
            mine = self._require_mine()
            mine = mine.model_copy(update={"renewed_at": time.time(), "progress": mine.progress + progress})
            write_json_atomically(self._path, mine.model_dump_json())
            self._mine = mine

    def release(self) -> None:
        """Give the lease up. A lease that another trainer has taken over is left alone."""
        with self._locked():
            holder = self.read()
            if holder is not None and self._mine is not None and holder.token == self._mine.token:
                self._path.unlink()
            self._mine = None

    def read(self) -> LeaseInfo | None:
        return _read(LeaseInfo, self._path)

    def holder(self) -> LeaseInfo | None:
        """The living holder, this process or another, or None."""
        holder = self.read()
        return holder if holder is not None and self._is_alive(holder) else None

    def remove_dead(self) -> None:
        """Remove the lease of a dead holder, so that the next trainer need not wait for the deadline."""
        with self._locked():
            if self.holder() is None:
                self._path.unlink(missing_ok=True)

    def _is_alive(self, holder: LeaseInfo) -> bool:
        if not holder.is_here:
            return self._foreign.seconds((holder.token, holder.renewed_at)) <= self._deadline
        try:
            # A killed trainer stays a zombie until the task that started it collects it.
            running = psutil.Process(holder.pid).status() != psutil.STATUS_ZOMBIE
            return running and abs(_started(holder.pid) - holder.started) < 1.5
        except psutil.NoSuchProcess:
            return False

    def _wait_for_a_renewal_elsewhere(self) -> None:
        """Wait without the file lock, because the holder needs the lock to renew its lease."""
        first = self.holder()
        if first is None or first.is_here:
            return
        logger.warning(
            "the run is held by %s. This trainer takes over if that lease is not renewed for %.0f s",
            first, self._deadline,
        )  # fmt: skip
        while self.holder() == first:
            self._sleep(_LOOK_SECONDS)

    def _create(self, mine: LeaseInfo) -> None:
        # A hard link fails if the name exists, also between hosts on a shared filesystem.
        aside = self._path.with_name(f".{self._path.name}.{mine.token}.new")
        write_json_atomically(aside, mine.model_dump_json())
        try:
            os.link(aside, self._path)
        except FileExistsError:
            raise LeaseLostError(
                f"the run of {self._path} was just taken by {self.read()}. Attach to that trainer."
            ) from None
        finally:
            aside.unlink()

    def _require_mine(self) -> LeaseInfo:
        if self._mine is None:
            raise LeaseLostError(f"this process does not hold the lease {self._path}. Call acquire(token) first.")
        holder = self.read()
        if holder is None or holder.token != self._mine.token:
            raise LeaseLostError(
                f"{self._path} is now held by {holder or 'nobody'}, expected token {self._mine.token}. This "
                "trainer must stop; the other one goes on from the last committed checkpoint."
            )
        return self._mine

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Serialises read-decide-write. The kernel drops the lock with the process: a kill leaves none.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_name(f"{self._path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


_LEASES: dict[Path, Lease] = {}  # by path: only repeated reads show whether a lease on another host is renewed


def lease_at(path: Path) -> Lease:
    """The one ``Lease`` object of this process for ``path``."""
    return _LEASES.setdefault(path, Lease(path))


def holder_alive(path: Path) -> LeaseInfo | None:
    """The living holder of the lease at ``path``, or None. One on another host counts as alive at the first look, and
    as dead when this process looks again after the deadline and finds the lease unchanged."""
    return lease_at(path).holder()


class ControlState(BaseModel):
    """The last message of the driver."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    through_segment: int  # the trainer goes on by itself up to and including this segment
    heartbeat: float  # seconds since the epoch by the driver's clock; changes with every beat
    stop: bool  # commit and stop at the next step


class Control:
    """The control file of one run: written by the driver, read by the trainer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def beat(self, through_segment: int, *, stop: bool = False) -> ControlState:
        """Record that the driver is alive and what it wants. Replaces the file atomically."""
        state = ControlState(through_segment=through_segment, heartbeat=time.time(), stop=stop)
        write_json_atomically(self._path, state.model_dump_json())
        return state

    def read(self) -> ControlState | None:
        """The last beat, or None before the first."""
        return _read(ControlState, self._path)


def _read(model: type[M], path: Path) -> M | None:
    try:
        return model.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        # Both files are replaced atomically, so this is not an unfinished write.
        raise StorageError(f"{path} is damaged: {error}. Remove it if no trainer of this run is alive.") from None


def _started(pid: int) -> float:
    # psutil adds the boot time, which changes when the wall clock is set; seconds since boot do not.
    return float(psutil.Process(pid).create_time() - psutil.boot_time())


def _host() -> str:
    # Containers of one machine may share its name, but have pids of their own.
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")  # absent outside Linux
    namespace = f"/{pids.stat().st_ino}" if pids.exists() else ""
    return f"{socket.gethostname()}/{boot.read_text()[:8] if boot.exists() else ''}{namespace}"
