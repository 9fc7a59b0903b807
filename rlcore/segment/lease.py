"""Who trains a run (``Lease``) and what its driver wants (``Control``): two small JSON files. No torch.

Never two trainers: acquiring is exclusive, and a trainer that finds another token on ``renew`` stops.
Never a forgotten one: the driver's heartbeat is in the control file.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from rlcore.errors import LeaseLostError, StorageError
from rlcore.job import write_json_atomically

DEADLINE_SECONDS = 120.0
M = TypeVar("M", bound=BaseModel)


class LeaseInfo(BaseModel):
    """The holder of a run: a process, told apart from a later one with the same pid by its start."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: str  # unique per trainer process
    pid: int
    started: float  # of the process, seconds after boot: steps of the wall clock do not move it
    host: str  # name and boot, so that a rebooted host counts as another one
    renewed_at: float  # seconds since the epoch

    def __str__(self) -> str:
        age = time.time() - self.renewed_at
        return f"pid {self.pid} on {self.host} (token {self.token}, renewed {age:.0f} s ago)"


class Lease:
    """The lease file of one run, as a trainer uses it.

    ``deadline``: seconds without renewal after which a holder on another host counts as dead. On this host
    its process is looked up instead.
    """

    def __init__(self, path: Path, deadline: float = DEADLINE_SECONDS) -> None:
        self._path = path
        self._deadline = deadline
        self._mine: LeaseInfo | None = None

    def acquire(self, token: str) -> LeaseInfo:
        """Become the holder, taking over from a dead one.

        Raises:
            LeaseLostError: a living holder is there; the message names it.
        """
        mine = LeaseInfo(
            token=token, pid=os.getpid(), started=_started(os.getpid()), host=_host(), renewed_at=time.time()
        )
        with self._locked():
            holder = self.read()
            if holder is not None and _alive(holder, self._deadline):
                raise LeaseLostError(
                    f"the run of {self._path} is held by {holder}. Attach to that trainer, or stop it first."
                )
            if holder is None:
                self._create(mine)
            else:
                write_json_atomically(self._path, mine.model_dump_json())
        self._mine = mine
        # Where the filesystem carries no locks between hosts, the last writer wins; the other sees it here.
        self._require_mine()
        return mine

    def renew(self) -> None:
        """Say that this trainer is alive.

        Raises:
            LeaseLostError: another token is in the file, or none: this trainer must stop without writing.
        """
        with self._locked():
            mine = self._require_mine().model_copy(update={"renewed_at": time.time()})
            write_json_atomically(self._path, mine.model_dump_json())
            self._mine = mine

    def release(self) -> None:
        """Give the lease up. A lease that was lost to another trainer is left alone."""
        with self._locked():
            holder = self.read()
            if holder is not None and self._mine is not None and holder.token == self._mine.token:
                self._path.unlink()
            self._mine = None

    def read(self) -> LeaseInfo | None:
        return _read_lease(self._path)

    def is_alive(self) -> bool:
        """Whether a living holder has the lease, be it this one or another."""
        return holder_alive(self._path, self._deadline) is not None

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
                " trainer must stop; the other one goes on from the last committed checkpoint."
            )
        return self._mine

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # Serialises read-decide-write. The kernel drops the lock with the process: a kill leaves none.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_name(f"{self._path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def holder_alive(path: Path, deadline: float = DEADLINE_SECONDS) -> LeaseInfo | None:
    """The living holder of the lease at ``path``, or None."""
    holder = _read_lease(path)
    return holder if holder is not None and _alive(holder, deadline) else None


class ControlState(BaseModel):
    """What the driver last said."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    through_segment: int  # the trainer goes on by itself up to and including this segment
    heartbeat: float  # seconds since the epoch
    stop: bool  # commit and stop at the next step


class Control:
    """The control file of one run: written by the driver, read by the trainer."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def beat(self, through_segment: int, *, stop: bool = False) -> ControlState:
        """Say what is wanted and that the driver is alive; replaces the file in one step."""
        state = ControlState(through_segment=through_segment, heartbeat=time.time(), stop=stop)
        write_json_atomically(self._path, state.model_dump_json())
        return state

    def read(self) -> ControlState | None:
        """The last beat, or None before the first."""
        text = _read_text(self._path)
        return None if text is None else _parsed(ControlState, self._path, text)


def _read_lease(path: Path) -> LeaseInfo | None:
    text = _read_text(path)
    return None if text is None else _parsed(LeaseInfo, path, text)


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def _parsed(model: type[M], path: Path, text: str) -> M:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        # Both files are replaced in one step, so this is not a write under way.
        raise StorageError(f"{path} is damaged: {error}. Remove it if no trainer of this run is alive.") from None


def _alive(holder: LeaseInfo, deadline: float) -> bool:
    if holder.host != _host():
        return time.time() - holder.renewed_at <= deadline
    try:
        # A killed trainer stays a zombie until the task that started it collects it.
        running = psutil.Process(holder.pid).status() != psutil.STATUS_ZOMBIE
        return running and abs(_started(holder.pid) - holder.started) < 1.5
    except psutil.NoSuchProcess:
        return False


def _started(pid: int) -> float:
    # psutil adds the boot time, which moves when the wall clock is set; the kernel's own count does not.
    return float(psutil.Process(pid).create_time() - psutil.boot_time())


def _host() -> str:
    boot = _read_text(Path("/proc/sys/kernel/random/boot_id")) or ""  # absent outside Linux
    return f"{socket.gethostname()}/{boot[:8]}"
