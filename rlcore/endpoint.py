"""The client of OpenAI-compatible endpoints: one request for a chat completion, and what its failure means. No torch.

The key is sent to the endpoint and goes nowhere else: every text that leaves this module has been searched for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx

from rlcore.errors import ConfigError

FIRST_DELAY = 0.5  # seconds before the first retry; doubled for each further one
LONGEST_DELAY = 10.0
PROBE_SECONDS = 10.0
SILENT_SECONDS = 1.0  # without any answer, after which it is called an outage
_CONNECT_SECONDS = 20.0
_BUSY = {409, 425, 429, 502, 503, 504}  # too many requests, or a proxy without a server behind it
_REFUSED = {400, 413, 422}  # of this request, such as a text longer than the model's context
_MAX_DETAIL_CHARS = 500
_LOG_SECONDS = 60.0  # between two lines about one outage

logger = logging.getLogger(__name__)

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for every request


@dataclass(frozen=True, slots=True)
class Answered:
    """The model's text. An answer that is no chat completion has a ``flaw`` and no text."""

    text: str
    prompt_tokens: int = 0  # 0 if the endpoint does not say
    completion_tokens: int = 0
    cut: bool = False  # at the limit of tokens
    flaw: str = ""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Away:
    """The endpoint does not answer, or wants to be left alone for ``seconds``: ask again later."""

    why: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The endpoint is up, and this call failed: another try may succeed."""

    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The endpoint will never answer this request."""

    why: str


@dataclass(frozen=True, slots=True)
class Denied:
    """The endpoint refuses the key, the address or the model: it will answer no request."""

    why: str


Outcome: TypeAlias = Answered | Away | Failed | Refused | Denied


def key_in(variable: str) -> str | None:
    """The key in this environment variable. None: it is not set.

    Raises:
        ConfigError: it holds what cannot be sent.
    """
    key = os.environ.get(variable, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:  # httpx would quote it in its error
        raise ConfigError(f"the key in {variable} has blanks or unusual characters. Set it to the key only.")
    return key or None


def delay_before(retry: int) -> float:
    """Seconds before a retry, counted from 0: doubled each time. A random factor keeps requests from coming at the same
    time."""
    return float(min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(retry, 10)) * random.uniform(0.5, 1.0))


class Endpoint:
    """Use it inside one event loop, and close it there.

    Args:
        url: up to the version, such as http://judge:8000/v1.
        timeout_seconds: of one request for a completion.
        concurrency: requests at the same time.
    """

    def __init__(self, url: str, key: str | None, *, timeout_seconds: float, concurrency: int) -> None:
        self._url, self._key, self._timeout = url.rstrip("/"), key, timeout_seconds
        self._client = httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_seconds, connect=min(timeout_seconds, _CONNECT_SECONDS)),
            limits=httpx.Limits(max_connections=concurrency + 1),
            trust_env=False,  # neither a proxy nor .netrc gets to see the key
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def models(self) -> list[str] | Away | Denied:
        """Names of the models that the endpoint lists."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                response = await self._client.get(f"{self._url}/models")
        except (httpx.TransportError, TimeoutError) as error:
            return Away(self._clean(f"{type(error).__name__}: {error}"))
        if response.status_code >= 500 or response.status_code in _BUSY:
            return Away(self._detail(response))
        if response.status_code != 200:
            return Denied(self._detail(response))
        listed = _json(response)
        rows = listed.get("data") if isinstance(listed, dict) else None
        return [str(row.get("id")) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    async def ask(self, body: bytes) -> Outcome:
        """Send one request for a chat completion; ``body`` is its JSON."""
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.post(
                    f"{self._url}/chat/completions", content=body, headers={"Content-Type": "application/json"}
                )
        except httpx.ConnectTimeout as error:
            return Away(self._clean(f"{type(error).__name__}: {error}"))
        except (TimeoutError, httpx.TimeoutException):
            return await self._failed(f"no answer within {self._timeout:g} s")
        except httpx.TransportError as error:
            return Away(self._clean(f"{type(error).__name__}: {error}"))
        status = response.status_code
        if status in _BUSY:
            return Away(self._detail(response), _retry_after(response))
        if status >= 500 or status == 408:
            return await self._failed(self._detail(response))
        if status in _REFUSED:
            return Refused(self._detail(response))
        return self._answer(response) if status == 200 else Denied(self._detail(response))

    async def _failed(self, why: str) -> Away | Failed:
        """Only the list of models tells whether the endpoint is up."""
        return Away(why) if isinstance(await self.models(), Away) else Failed(why)

    def _answer(self, response: httpx.Response) -> Answered:
        tree = _json(response)
        try:
            (choice,) = tree["choices"]
            text, cut = choice["message"].get("content") or "", choice.get("finish_reason") == "length"
            usage = tree.get("usage") or {}
            asked, given = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
        except (KeyError, TypeError, AttributeError, ValueError):
            return Answered("", flaw=f"{self._clean(response.text)!r}, which is no chat completion with one choice")
        if not isinstance(text, str):
            return Answered("", asked, given, flaw=f"{self._clean(response.text)!r}, whose content is no text")
        return Answered(self._clean(text, None), asked, given, cut)

    def _detail(self, response: httpx.Response) -> str:
        return self._clean(f"HTTP {response.status_code}: {response.text}")

    def _clean(self, text: str, limit: int | None = _MAX_DETAIL_CHARS) -> str:
        """The text without the key, which some endpoints repeat in their errors."""
        return (text if self._key is None else text.replace(self._key, "***"))[:limit]


class Silence:
    """Times without any answer of an endpoint.

    Args:
        who: the endpoint, in messages.
        too_long: the error of an outage, from the beginning of its message.
        waits: what waits for how long, in messages.
    """

    def __init__(self, who: str, minutes: float, too_long: Callable[[str], Exception], waits: str) -> None:
        self._who, self._minutes, self._too_long, self._waits = who, minutes, too_long, waits
        self._since: float | None = None
        self._logged: float | None = None
        self._seconds = 0.0

    @property
    def lasts(self) -> bool:
        return self._since is not None

    def note(self, why: str) -> None:
        """The endpoint has not answered. Raises the error of an outage if that lasts too long."""
        now = time.monotonic()
        self._since = self._since or now
        silent = now - self._since
        where = f"{self._who} has not answered for {silent:.0f} s ({why})"
        if silent > 60 * self._minutes:
            raise self._too_long(where)
        if silent >= SILENT_SECONDS and (self._logged is None or now - self._logged >= _LOG_SECONDS):
            self._logged = now
            logger.warning("%s. %s, for up to %g minutes.", where, self._waits, self._minutes)

    def broken(self) -> None:
        """The endpoint has answered."""
        if self._logged is not None and self._since is not None:
            seconds = time.monotonic() - self._since
            self._seconds += seconds
            logger.warning("%s answers again, after %.0f s", self._who, seconds)
        self._since = self._logged = None

    def take_seconds(self) -> float:
        """Seconds of outages that have ended since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the endpoint wants to be left alone; 0 if it names none, or a date."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "")))
    except ValueError:
        return 0.0
