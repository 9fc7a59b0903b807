"""One flow of a kind at a data folder at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from infra.logs import get_logger
from infra.settings import Settings


@contextmanager
def alone(settings: Settings, name: str) -> Iterator[bool]:
    """Whether no other flow ``name`` is at this data folder; the lock goes with the process, however it ends."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with (settings.data_dir / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            get_logger().info("%s: another one is at %s", name, settings.data_dir)
            yield False
            return
        yield True
