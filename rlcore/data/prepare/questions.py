"""The texts of a problem, from any of the forms that sources use, with one ``<image>`` marker per image."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import cast

from rlcore.data.pixels import IMAGE_MARKER
from rlcore.data.rejects import Reason, Unusable
from rlcore.types import Message, Role

VIDEO_MARKER = "<video>"

ImageCell = bytes | Path | None  # encoded bytes or a file; None: anything else

_MARKERS = re.compile(f"({IMAGE_MARKER}|{VIDEO_MARKER})")


def plain_text(value: object, what: str, empty: Reason) -> str:
    """The text of a cell. Numbers become text.

    Raises:
        Unusable: ``empty``, or NOT_TEXT.
    """
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return str(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise Unusable(empty, f"the {what} is {value!r}")
    if not isinstance(value, str):
        raise Unusable(Reason.NOT_TEXT, f"the {what} is {type(value).__name__}: {str(value)[:80]}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Unusable(Reason.NOT_TEXT, f"the {what} has an unpaired surrogate: {error.reason}") from None
    return value


def conversation(value: object) -> tuple[Message, ...]:
    """The messages of a cell, the question last.

    A cell is text, or a chat: an optional system message, then turns of user and assistant. Images and videos inside a
    message become markers.

    Raises:
        Unusable: EMPTY_PROBLEM; NOT_TEXT, also for turns in another order.
    """
    if not _is_chat(value):
        return (Message("user", plain_text(value, "problem", Reason.EMPTY_PROBLEM)),)
    roles = [str(message["role"]) for message in value]  # type: ignore[attr-defined]
    system = roles[:1] == ["system"]
    turns = roles[system:]
    if len(turns) % 2 == 0 or turns != [("user", "assistant")[i % 2] for i in range(len(turns))]:
        raise Unusable(
            Reason.NOT_TEXT,
            f"the problem is a conversation of {', '.join(roles)}; allowed are an optional system message and then "
            "turns of user and assistant that begin and end with the user",
        )
    return tuple(_message(message) for message in value)  # type: ignore[attr-defined]


def place_images(
    texts: Sequence[str], images: Sequence[ImageCell], videos: Sequence[Sequence[ImageCell]]
) -> tuple[list[str], list[ImageCell]]:
    """Replace each video marker by one image marker per frame, and return the texts and all images in marker order.

    Raises:
        Unusable: MARKER_COUNT or VIDEO_MARKER_COUNT, if the numbers of markers and images (or videos) differ.
    """
    for marker, given, reason in (
        (IMAGE_MARKER, len(images), Reason.MARKER_COUNT),
        (VIDEO_MARKER, len(videos), Reason.VIDEO_MARKER_COUNT),
    ):
        if (markers := sum(text.count(marker) for text in texts)) != given:
            raise Unusable(reason, f"{markers} {marker} marker(s) for {given} {marker.strip('<>')}(s)")
    next_image, next_video = iter(images), iter(videos)
    results: list[str] = []
    placed: list[ImageCell] = []
    for text in texts:
        pieces: list[str] = []
        for piece in _MARKERS.split(text):
            if piece == VIDEO_MARKER:
                frames = next(next_video)
                pieces.append(IMAGE_MARKER * len(frames))
                placed += frames
            else:
                pieces.append(piece)
                placed += [next(next_image)] if piece == IMAGE_MARKER else []
        results.append("".join(pieces))
    return results, placed


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )


def _message(message: dict[str, object]) -> Message:
    role, content = cast(Role, message["role"]), message["content"]
    if isinstance(content, list):
        content = "".join(chain.from_iterable(_part_text(part, role) for part in content))
    if role == "system" and content == "":
        return Message(role, "")  # an empty message keeps a chat template from adding its default system text
    return Message(role, plain_text(content, "problem", Reason.EMPTY_PROBLEM))


def _part_text(part: object, role: Role) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict) and part.get("type") in ("image", "video"):
        yield f"<{part['type']}>"
    elif isinstance(part, dict) and isinstance(part.get("text"), str):
        yield part["text"]
    else:
        raise Unusable(Reason.NOT_TEXT, f"a part of the {role}'s message is {str(part)[:80]}")
