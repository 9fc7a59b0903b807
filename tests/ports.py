"""Ports for servers that have to be told theirs, and a port at which nobody answers."""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_PORTS = range(20_000, 30_000)  # the kernel gives none of these to a socket that asks for any
_LOCKS = Path(tempfile.gettempdir()) / "rlflow-test-ports"
_HELD: list[IO[str]] = []  # until this process ends


def reserved_port() -> int:
    """A free port of 127.0.0.1 that no other test gets while this process runs, even where a server on it stops."""
    _LOCKS.mkdir(exist_ok=True)
    for port in random.sample(_PORTS, len(_PORTS)):
        lock = (_LOCKS / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        _HELD.append(lock)
        return port
    raise OSError(f"none of the ports {_PORTS.start} to {_PORTS.stop - 1} is free")


@contextmanager
def refusing() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses connections all the while: bound, and nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
