"""``rlflow chat``: questions to a model in a terminal, with pictures, through the engine of ``rlflow serve``."""

from __future__ import annotations

import json
import os
import secrets
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from infra import environment, processes
from infra.logs import get_logger
from infra.settings import Settings
from infra.stack.servers import answers, end_of, free_port
from rlcore.data.pixels import IMAGE_MARKER, load_rgb
from rlcore.data.rejects import Unusable
from rlcore.errors import DataError, TrainerFailedError
from rlcore.files import write_json_atomically
from tasks.pictures import png_url
from tasks.serve import serve_spec

_KEY = "RLFLOW_CHAT_KEY"
_START_SECONDS = 1800.0  # a large model loads for minutes
_ANSWER_SECONDS = 600.0  # between two pieces of an answer
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.2
_DATA = "data: "


@dataclass(frozen=True, slots=True)
class Chat:
    """A model behind an OpenAI-compatible address."""

    address: str
    model: str
    key: str
    temperature: float = 0.0

    def ask(self, question: str, pictures: Sequence[Path] = ()) -> Iterator[str]:
        """The answer, piece by piece.

        Raises:
            DataError: the server refuses the question, such as one that is too long.
        """
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content_of(question, pictures)}],
            "temperature": self.temperature,
            "stream": True,
        }
        request = urllib.request.Request(
            f"{self.address}/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as reply:
                yield from pieces(reply)
        except urllib.error.HTTPError as error:
            raise DataError(f"the server refuses the question: {error.read().decode(errors='replace')[:500]}") from None


def pieces(lines: Iterator[bytes]) -> Iterator[str]:
    """The texts of a streamed completion."""
    for line in lines:
        text = line.decode().strip()
        if not text.startswith(_DATA) or text == f"{_DATA}[DONE]":
            continue
        choices = json.loads(text.removeprefix(_DATA))["choices"]
        if choices and (piece := choices[0]["delta"].get("content")):
            yield piece


def content_of(question: str, pictures: Sequence[Path]) -> list[dict[str, Any]]:
    """The parts of a message: pictures where the question has ``<image>``, else before it.

    Raises:
        DataError: the numbers of pictures and markers differ, or a picture cannot be read.
    """
    if pictures and IMAGE_MARKER not in question:
        question = IMAGE_MARKER * len(pictures) + question
    first, *others = question.split(IMAGE_MARKER)
    if len(others) != len(pictures):
        raise DataError(
            f"the question has {len(others)} times {IMAGE_MARKER}, and there are {len(pictures)} pictures. Write one "
            "for each picture, or none."
        )
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for picture, text in zip(pictures, others, strict=True):
        url = png_url(open_picture(picture))
        parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text") != ""]


def open_picture(path: Path) -> Image.Image:
    """
    Raises:
        DataError: it is not there, or no picture.
    """
    try:
        return load_rgb(path.read_bytes())
    except (OSError, Unusable) as error:
        raise DataError(f"the picture {path} cannot be used: {error}. Give another file.") from None


def half_blocks(image: Image.Image, columns: int, rows: int) -> str:
    """The picture in colours of a terminal, within so many characters: each shows two pixels, one above the other."""
    scale = min(columns / image.width, 2 * rows / image.height, 1.0)
    width, height = max(1, round(image.width * scale)), max(1, round(image.height * scale / 2))
    small = image.convert("RGB").resize((width, 2 * height), Image.Resampling.BOX)
    pixel = small.getpixel
    lines = [
        "".join(_cell(pixel((column, 2 * row)), pixel((column, 2 * row + 1))) for column in range(width)) + "\x1b[0m"
        for row in range(height)
    ]
    return "\n".join(lines)


def _cell(upper: Any, lower: Any) -> str:
    return "\x1b[38;2;{};{};{}m\x1b[48;2;{};{};{}m▀".format(*upper, *lower)


@contextmanager
def chatting(model: str, settings: Settings, *, temperature: float, further: Sequence[str] = ()) -> Iterator[Chat]:
    """A server of the model on a free port, as long as the block lasts.

    Raises:
        TrainerFailedError: it did not start; the message has the end of its log.
        ConfigError: there is no such model.
    """
    key = secrets.token_urlsafe(24)
    os.environ[_KEY] = key
    spec = serve_spec(model, settings, port=free_port(), key_variable=_KEY, further=further)
    path, mark = spec.result.with_name("spec.json"), f"chat-{uuid.uuid4().hex[:12]}"
    write_json_atomically(path, spec.model_dump_json(indent=1))
    log = spec.result.with_name("job.log")
    get_logger().info("chat: %s starts (log: %s)", spec.model, log)
    with log.open("wb") as output:
        process = processes.start(
            [str(settings.trainer_python), "-m", "rlcore.jobs.serve", str(path)],
            env=environment.for_jobs(settings), mark=mark, output=output, ends_with_parent=True,
        )  # fmt: skip
    try:
        address = f"http://{spec.host}:{spec.port}"
        deadline = time.monotonic() + _START_SECONDS
        while not answers(f"{address}/health", timeout_seconds=10):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TrainerFailedError(f"the server of {spec.model} did not start. {end_of(log)}")
            time.sleep(_POLL_SECONDS)
        yield Chat(f"{address}/v1", spec.name, key, temperature)
    finally:
        processes.stop(mark, _STOP_SECONDS)
        process.wait()
