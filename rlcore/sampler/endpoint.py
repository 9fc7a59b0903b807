"""Samples from a model behind an OpenAI-compatible server: POST {url}/chat/completions. No torch.

The server knows neither the policy's tokens nor its log-probs, so a completion has as many unknown tokens as the server
counted.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.artifacts import EndpointRef
from rlcore.config import ExperimentConfig
from rlcore.data.messages import MessageBuilder
from rlcore.data.pixels import MARKERS, ImageStore, frames_in
from rlcore.endpoint import Answered, Away, Denied, Endpoint, Failed, Refused, delay_before, key_in
from rlcore.errors import ModelError, ServerError
from rlcore.types import Completion, ImageRef, SampledGroup, SampleRequest

if TYPE_CHECKING:
    from PIL import Image

UNKNOWN_TOKEN = -1
RETRIES = 9  # of one request; together they wait for about a minute
_TIMEOUT_SECONDS = 1800.0  # a long completion of a busy server takes minutes
_MAX_LOGGED = 10  # failures of one evaluation

logger = logging.getLogger(__name__)


class EndpointSampler:
    """Implements ``types.Sampler`` for an evaluation: every request has one completion and its own decoding.

    Args:
        images: of the dataset that the problems come from.

    Raises:
        ConfigError: as ``MessageBuilder``, or the key cannot be sent.
    """

    def __init__(
        self, endpoint: EndpointRef, config: ExperimentConfig, images: ImageStore, retries: int = RETRIES
    ) -> None:
        self._ref, self._images, self._retries = endpoint, images, retries
        self._max_tokens = config.rollout.max_completion_tokens
        self._max_failed_share = config.reward.max_ungraded_share
        self._messages = MessageBuilder(config.data)
        self._key = key_in(endpoint.key_variable)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    async def _open(self) -> None:
        concurrency = self._ref.concurrency
        self._endpoint = Endpoint(self._ref.url, self._key, timeout_seconds=_TIMEOUT_SECONDS, concurrency=concurrency)
        self._slots = asyncio.Semaphore(concurrency)

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        """Yields each group as it comes (``types.Sampler``); at most ``concurrency`` requests run at a time. The group
        of a request that the server refuses has a ``failure`` and no completion.

        Raises:
            ModelError: the server refuses the key, the address or the model, or it fails more than
                ``reward.max_ungraded_share`` of the requests.
            ServerError: the server does not answer, also after all retries.
        """
        results: SimpleQueue[tuple[int, Completion | str | Exception]] = SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._sample_all(requests, results), self._loop)
        failed = 0
        try:
            for _ in requests:
                index, result = results.get()
                if isinstance(result, Exception):
                    raise result
                if isinstance(result, str):
                    failed += 1
                    self._note_failure(requests[index].problem.problem_id, result, failed, len(requests))
                    yield {index: SampledGroup(np.zeros(0, np.int32), (), result)}
                else:
                    yield {index: SampledGroup(np.zeros(0, np.int32), (result,))}
        finally:
            work.cancel()
        if failed:
            logger.warning("%d of %d requests failed; they count as ungraded", failed, len(requests))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._endpoint.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _note_failure(self, problem_id: str, why: str, failed: int, requests: int) -> None:
        """
        Raises:
            ModelError: too many requests have failed.
        """
        if failed <= _MAX_LOGGED:
            logger.warning("problem %s has no completion: %s", problem_id, why)
        if failed > self._max_failed_share * requests:
            raise ModelError(
                f"{self._ref.url} failed {failed} of {requests} requests for the model {self._ref.model!r}, allowed is "
                f"a share of {self._max_failed_share:g} (reward.max_ungraded_share). The last one: {why}. Check the "
                "address, the model's name and the server's limits."
            )

    async def _sample_all(
        self, requests: Sequence[SampleRequest], results: SimpleQueue[tuple[int, Completion | str | Exception]]
    ) -> None:
        async def sample(index: int, request: SampleRequest) -> None:
            try:
                async with self._slots:
                    results.put((index, await self._sample(request)))
            except Exception as error:  # noqa: BLE001 - generate raises it
                results.put((index, error))

        await asyncio.gather(*(sample(index, request) for index, request in enumerate(requests)))

    async def _sample(self, request: SampleRequest) -> Completion | str:
        """The completion, or why there is none.

        Raises:
            ModelError: the server refuses the key, the address or the model.
            ServerError: the server does not answer.
        """
        body = await asyncio.to_thread(self._body, request)
        why = ""
        for retry in range(self._retries + 1):
            pause = 0.0
            match outcome := await self._endpoint.ask(body):
                case Answered(flaw=""):
                    return _completion(outcome)
                case Answered(flaw=flaw):
                    return f"the answer is {flaw}"
                case Refused(why=why):
                    return why
                case Denied(why=why):
                    raise ModelError(
                        f"{self._ref.url} refuses a request for the model {self._ref.model!r}: {why}. Check the "
                        f"address, the model's name, the key in ${self._ref.key_variable}, and the server's limits."
                    )
                case Away(why=why, seconds=pause):
                    pass
                case Failed(why=why):
                    pass
            if retry < self._retries:
                await asyncio.sleep(max(pause, delay_before(retry)))
        if isinstance(outcome, Failed):
            return why
        raise ServerError(f"{self._ref.url} does not answer after {self._retries + 1} tries: {why}. Check the server.")

    def _body(self, request: SampleRequest) -> bytes:
        decoding = {} if request.decoding is None else asdict(request.decoding)
        own = dict(request.problem.chat_template_arguments)
        return json.dumps(
            {
                "model": self._ref.model,
                "messages": self._chat(request),
                "max_tokens": self._max_tokens,
                "seed": request.seed,
                **decoding,
                **({"chat_template_kwargs": own} if own else {}),  # as vLLM's server calls them
            }
        ).encode()

    def _chat(self, request: SampleRequest) -> list[dict[str, Any]]:
        problem = request.problem
        images = iter(problem.images)
        return [
            {"role": message.role, "content": self._content(message.text, images)}
            for message in self._messages.messages(problem.question, problem.context, problem.source_name)
        ]

    def _content(self, text: str, images: Iterator[ImageRef]) -> str | list[dict[str, Any]]:
        """A video becomes one picture per frame: not every server takes videos, and none takes chosen frames."""
        pieces = MARKERS.split(text)
        if len(pieces) == 1:
            return text
        parts: list[dict[str, Any]] = []
        for number, piece in enumerate(pieces):
            if number % 2 == 0:
                parts += [{"type": "text", "text": piece}] if piece else []
                continue
            image = next(images)
            frames = frames_in(self._images.read(image), image)
            parts += [{"type": "image_url", "image_url": {"url": _data_url(frame)}} for frame in frames]
        return parts


def _data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _completion(answer: Answered) -> Completion:
    count = answer.completion_tokens
    tokens = np.full(count, UNKNOWN_TOKEN, np.int32)
    return Completion.one_turn(tokens, np.zeros(count, np.float32), answer.text, "length" if answer.cut else "stop", 0)
