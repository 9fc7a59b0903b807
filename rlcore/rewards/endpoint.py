"""One call of a judge behind an OpenAI-compatible endpoint, and what its failure means.

The key is sent to the endpoint and goes nowhere else: every text that leaves this module has been searched for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx

from rlcore.config.reward import JudgeConfig
from rlcore.errors import JudgeAwayError, RewardError

PROBE_SECONDS = 10.0
_BUSY = {429, 502, 503, 504}  # too many requests, or a proxy without a server behind it
_REFUSED = {400, 413, 422}  # of this request, such as a text longer than the model's context
_MAX_DETAIL_CHARS = 300
_SILENT_SECONDS = 1.0  # without any answer, after which it is called an outage
_LOG_SECONDS = 60.0  # between two lines about one outage

logger = logging.getLogger(__name__)

logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs a line for every request


@dataclass(frozen=True, slots=True)
class Answered:
    """The model's text. ``tokens``: of prompt and answer, 0 if the endpoint does not say."""

    text: str
    tokens: int
    cut: bool = False  # at reward.judge.max_tokens


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


Outcome: TypeAlias = Answered | Away | Failed | Refused


def key_of(config: JudgeConfig) -> str | None:
    """The key in the environment variable that the config names.

    Raises:
        RewardError: the variable is not set, or holds what cannot be sent.
    """
    if config.key_variable is None:
        return None
    key = os.environ.get(config.key_variable, "").strip()
    if not key:
        raise RewardError(
            f"reward.judge.key_variable is {config.key_variable}, which is not set in this process's environment. "
            "Set it where flows and trainers run, or set key_variable to null."
        )
    if not key.isascii() or not key.isprintable() or " " in key:  # httpx would quote it in its error
        raise RewardError(f"the key in {config.key_variable} has blanks or unusual characters. Set it to the key only.")
    return key


class Endpoint:
    """Use it inside one event loop, and close it there."""

    def __init__(self, config: JudgeConfig, key: str | None) -> None:
        self._config = config
        self._key = key
        self._client = httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=config.timeout_seconds,
            limits=httpx.Limits(max_connections=config.concurrency + 1),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def models(self) -> list[str] | None:
        """Names of the models that the endpoint lists. None: it does not answer.

        Raises:
            RewardError: it refuses the key or the address.
        """
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                response = await self._client.get(f"{self._config.url}/models")
        except (httpx.TransportError, TimeoutError):
            return None
        if response.status_code >= 500 or response.status_code in _BUSY:
            return None
        self._require_access(response)
        listed = _json(response)
        rows = listed.get("data") if isinstance(listed, dict) else None
        return [str(row.get("id")) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    async def ask(self, body: bytes) -> Outcome:
        """Send one request for a chat completion.

        Raises:
            RewardError: the endpoint refuses the key or the address, which no later request would change.
        """
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                response = await self._client.post(
                    f"{self._config.url}/chat/completions",
                    content=body,
                    headers={"Content-Type": "application/json"},
                )
        except (TimeoutError, httpx.TimeoutException):
            return await self._failed(f"no answer within {self._config.timeout_seconds:g} s")
        except httpx.TransportError as error:
            return Away(self._clean(f"{type(error).__name__}: {error}"))
        status = response.status_code
        if status in _BUSY:
            return Away(self._detail(response), _retry_after(response))
        if status >= 500 or status == 408:
            return await self._failed(self._detail(response))
        if status in _REFUSED:
            return Refused(self._detail(response))
        self._require_access(response)
        return self._answer(_json(response))

    async def _failed(self, why: str) -> Away | Failed:
        """Only the list of models tells whether the endpoint is up."""
        return Away(why) if await self.models() is None else Failed(why)

    def _answer(self, tree: Any) -> Answered:
        """An answer of another form has an empty text, which is no valid verdict."""
        try:
            choice = tree["choices"][0]
            text, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
            usage = tree.get("usage") or {}
            tokens = int(usage.get("prompt_tokens") or 0) + int(usage.get("completion_tokens") or 0)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError):
            return Answered("", 0)
        return Answered(self._clean(text if isinstance(text, str) else "", None), tokens, cut)

    def _require_access(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            return
        raise RewardError(
            f"the judge at {self._config.url} refuses: {self._detail(response)}. Check reward.judge.url, "
            f"reward.judge.model ({self._config.model}) and the key in reward.judge.key_variable "
            f"({self._config.key_variable})."
        )

    def _detail(self, response: httpx.Response) -> str:
        return self._clean(f"HTTP {response.status_code}: {response.text}")

    def _clean(self, text: str, limit: int | None = _MAX_DETAIL_CHARS) -> str:
        """The text without the key, which some endpoints repeat in their errors."""
        return (text if self._key is None else text.replace(self._key, "***"))[:limit]


class Silence:
    """Times without any answer of the judge."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._since: float | None = None
        self._logged: float | None = None
        self._seconds = 0.0

    def note(self, why: str) -> None:
        """The judge has not answered.

        Raises:
            JudgeAwayError: for too long.
        """
        now = time.monotonic()
        self._since = self._since or now
        silent = now - self._since
        where = f"the judge at {self._config.url} has not answered for {silent:.0f} s ({why})"
        if silent > 60 * self._config.outage_minutes:
            raise JudgeAwayError(
                f"{where}, and reward.judge.outage_minutes allows {self._config.outage_minutes:g} minutes. All "
                "verdicts are in the journal. Start the judge again and continue the run, or raise outage_minutes."
            )
        if silent >= _SILENT_SECONDS and (self._logged is None or now - self._logged >= _LOG_SECONDS):
            self._logged = now
            logger.warning("%s. Training waits, for up to %g minutes.", where, self._config.outage_minutes)

    @property
    def lasts(self) -> bool:
        return self._since is not None

    def broken(self) -> None:
        """The judge has answered."""
        if self._logged is not None and self._since is not None:
            seconds = time.monotonic() - self._since
            self._seconds += seconds
            logger.warning("the judge answers again, after %.0f s", seconds)
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
