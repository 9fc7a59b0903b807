"""Threads that talk to servers and to the trainer, so that the driver never blocks on them."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import httpx
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from infra.errors import ServerError, ServerRefusedError
from infra.logs import get_logger
from rlcore.segment.lease import Control

PREFECT_ERRORS = (httpx.HTTPError, PrefectException)
"""What Prefect's client raises when its server refuses, fails or does not answer."""


class Outbox:
    """Sends messages one after the other in a daemon thread.

    A message replaces an older one with the same key that has not been sent yet, so a server that was away gets the
    newest state and not the whole history.
    """

    def __init__(self, name: str) -> None:
        self._waiting: dict[str, Callable[[], object]] = {}
        self._sending = False
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._send_all, name=f"outbox-{name}", daemon=True)
        self._thread.start()

    def put(self, key: str, send: Callable[[], object]) -> None:
        """Call ``send`` in the thread, with the caller's Prefect run and settings. Its errors are logged."""
        context = contextvars.copy_context()
        with self._changed:
            self._waiting[key] = lambda: context.run(send)
            self._changed.notify_all()

    def flush(self, wait_seconds: float | None = None) -> None:
        """Wait until everything is sent, at most ``wait_seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._sending, wait_seconds)

    def close(self, wait_seconds: float | None = None) -> None:
        """Send the waiting messages and end the thread. After ``wait_seconds`` the rest is dropped; None: no limit."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(wait_seconds)
        with self._changed:
            self._waiting.clear()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                key = next(iter(self._waiting))
                send = self._waiting.pop(key)
                self._sending = True
            try:
                send()
            except Exception:  # noqa: BLE001 - a failed message must not stop the others
                get_logger().warning("%s was not sent", key, exc_info=True)


@contextmanager
def ending(end: Callable[[float | None], None]) -> Iterator[None]:
    """End threads however the block ends: ``end`` gets the seconds that it may wait for them, None: no limit."""
    try:
        yield
    except Exception:
        end(None)
        raise
    except BaseException:  # a person waits, or Prefect kills the flow soon
        end(0.0)
        raise
    end(None)


@contextmanager
def prefect_asked_once() -> Iterator[None]:
    """Prefect's client fails at the first error inside; by default it retries for up to 45 minutes."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        yield


@contextmanager
def prefect_outage_named() -> Iterator[None]:
    """
    Raises:
        ServerRefusedError: Prefect's server refused the request.
        ServerError: the server failed or did not answer.
    """
    try:
        with prefect_asked_once():
            yield
    except PREFECT_ERRORS as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise ServerRefusedError(f"Prefect refuses ({said}).") from error
        raise ServerError(f"Prefect does not answer ({said}). Start its server.") from error


_BEAT_SECONDS = 1.0


class Heartbeat:
    """Tells the trainer once a second that its driver lives, and which segment the driver wants."""

    def __init__(self, control: Path) -> None:
        self._control = Control(control)
        self._wanted: tuple[int, bool] | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="heartbeat", daemon=True)
        self._thread.start()

    def want(self, through_segment: int, *, stop: bool = False) -> None:
        """Tell the trainer at once, and repeat it until the next call."""
        with self._lock:
            self._wanted = (through_segment, stop)
            self._control.beat(through_segment, stop=stop)

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            with self._lock:
                if self._wanted is None:
                    continue
                try:
                    self._control.beat(self._wanted[0], stop=self._wanted[1])
                except OSError as error:  # a full disk, for which the trainer fails with a better message
                    get_logger().warning("train: the heartbeat to the trainer could not be written: %s", error)
