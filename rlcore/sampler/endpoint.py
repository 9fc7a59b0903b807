"""Samples from a model behind an OpenAI-compatible server: POST {url}/chat/completions. No torch.

The server knows neither the policy's tokens nor its log-probs, so a completion has as many unknown tokens as the server
counted.
"""

from __future__ import annotations

import base64
import io
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

import httpx
import numpy as np

from rlcore.artifacts import EndpointRef
from rlcore.config import ExperimentConfig
from rlcore.data.pixels import IMAGE_MARKER, ImageStore
from rlcore.data.prompts import MessageBuilder
from rlcore.errors import ModelError, ServerError
from rlcore.types import Completion, FinishReason, ImageRef, SampledGroup, SampleRequest

UNKNOWN_TOKEN = -1
DELAYS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds before each retry, times 1 to 1.5
_TIMEOUT = httpx.Timeout(1800.0, connect=20.0)  # a long completion of a busy server takes minutes
_PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
_MAX_SHOWN = 500  # characters of a server's answer in an error


class EndpointSampler:
    """Implements ``types.Sampler`` for an evaluation: every request has one completion and its own decoding.

    Args:
        images: of the dataset that the problems come from.

    Raises:
        ConfigError: as ``MessageBuilder``.
    """

    def __init__(
        self, endpoint: EndpointRef, config: ExperimentConfig, images: ImageStore, delays: Sequence[float] = DELAYS
    ) -> None:
        self._endpoint, self._images, self._delays = endpoint, images, delays
        self._max_tokens = config.rollout.max_completion_tokens
        self._messages = MessageBuilder(config.data)
        self._key = os.environ.get(endpoint.key_variable, "")
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=endpoint.concurrency)
        # trust_env=False: neither a proxy nor .netrc gets to see the key
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT, limits=limits, trust_env=False)

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        """Yields each group as it comes (``types.Sampler``); at most ``concurrency`` requests run at a time.

        Raises:
            ModelError: the server refuses a request.
            ServerError: the server does not answer, also after all retries.
        """
        pool = ThreadPoolExecutor(self._endpoint.concurrency)
        try:
            places = {pool.submit(self._sample, request): index for index, request in enumerate(requests)}
            for ended in as_completed(places):
                yield {places[ended]: SampledGroup(np.zeros(0, np.int32), (ended.result(),))}
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self._client.close()

    def _sample(self, request: SampleRequest) -> Completion:
        decoding = {} if request.decoding is None else asdict(request.decoding)
        answer = self._post(
            {
                "model": self._endpoint.model,
                "messages": self._chat(request),
                "max_tokens": self._max_tokens,
                "seed": request.seed,
                **decoding,
            }
        )
        try:
            (choice,) = answer["choices"]
            text = choice["message"].get("content") or ""
            count = int((answer.get("usage") or {}).get("completion_tokens") or 0)
            reason: FinishReason = "length" if choice.get("finish_reason") == "length" else "stop"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{self._endpoint.url} answered {self._shown(str(answer))!r}, which is no chat completion with one "
                "choice. Check that the address ends where /chat/completions begins."
            ) from error
        tokens = np.full(count, UNKNOWN_TOKEN, np.int32)
        return Completion.one_turn(tokens, np.zeros(count, np.float32), text, reason, 0)

    def _chat(self, request: SampleRequest) -> list[dict[str, Any]]:
        problem = request.problem
        images = iter(problem.images)
        return [
            {"role": message.role, "content": self._content(message.text, images)}
            for message in self._messages.messages(problem.question, problem.context, problem.source_name)
        ]

    def _content(self, text: str, images: Iterator[ImageRef]) -> str | list[dict[str, Any]]:
        first, *others = text.split(IMAGE_MARKER)
        if not others:
            return text
        parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
        for piece in others:
            parts += [{"type": "image_url", "image_url": {"url": self._data_url(next(images))}}]
            parts += [{"type": "text", "text": piece}]
        return [part for part in parts if part.get("text") != ""]

    def _data_url(self, image: ImageRef) -> str:
        buffer = io.BytesIO()
        self._images.read(image).save(buffer, "PNG")
        return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"

    def _post(self, body: dict[str, Any]) -> Any:
        url, variable = f"{self._endpoint.url.rstrip('/')}/chat/completions", self._endpoint.key_variable
        problem = ""
        for delay in (*self._delays, None):
            try:
                answer = self._client.post(url, json=body)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.is_success:
                    return self._json(answer, url)
                problem = f"HTTP {answer.status_code}: {self._shown(answer.text)}"
                if answer.status_code < HTTPStatus.INTERNAL_SERVER_ERROR and answer.status_code not in _PASSING:
                    raise ModelError(
                        f"{url} refuses a request for the model {self._endpoint.model!r}: {problem}. Check the "
                        f"address, the model's name, the key in ${variable}, and the server's limits."
                    )
            if delay is not None:
                time.sleep(delay * random.uniform(1, 1.5))
        raise ServerError(f"{url} does not answer after {len(self._delays) + 1} tries: {problem}. Check the server.")

    def _json(self, answer: httpx.Response, url: str) -> Any:
        try:
            return answer.json()
        except ValueError:
            raise ModelError(f"{url} answered {self._shown(answer.text)!r}, which is not JSON.") from None

    def _shown(self, text: str) -> str:
        """The beginning of an answer, without the key, which some servers repeat in their errors."""
        return (text.replace(self._key, "***") if self._key else text)[:_MAX_SHOWN]
