"""Messages to servers, sent by a thread of their own: a server that hangs holds up nobody."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

import httpx
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from infra.errors import ServerError, ServerRefusedError
from infra.logs import get_logger

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
        """Have ``send`` called with the Prefect run and settings of the caller. An exception that it raises is logged;
        the next message is sent all the same."""
        context = contextvars.copy_context()
        with self._changed:
            self._waiting[key] = lambda: context.run(send)
            self._changed.notify_all()

    def flush(self, wait_seconds: float | None = None) -> None:
        """Wait until everything is sent, at most ``wait_seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._sending, wait_seconds)

    def close(self, wait_seconds: float | None = None) -> None:
        """Send what waits and end the thread. After ``wait_seconds`` the rest is dropped; None: wait for all of it."""
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
            except Exception:  # noqa: BLE001 - one message that fails must not end the thread for all others
                get_logger().warning("%s was not sent", key, exc_info=True)


@contextmanager
def prefect_asked_once() -> Iterator[None]:
    """Prefect's client fails at the first error in here. By default it asks again for up to 45 minutes."""
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        yield


@contextmanager
def prefect_outage_named() -> Iterator[None]:
    """
    Raises:
        ServerRefusedError: Prefect's server said no.
        ServerError: it failed or did not answer.
    """
    try:
        with prefect_asked_once():
            yield
    except PREFECT_ERRORS as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise ServerRefusedError(f"Prefect refuses ({said}).") from error
        raise ServerError(f"Prefect does not answer ({said}). Start its server.") from error
