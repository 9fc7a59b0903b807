"""The text of a problem, however a source writes it, with one ``<image>`` marker per image in the end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path

from rlcore.data.rejects import Reason, Unusable

IMAGE_MARKER = "<image>"
VIDEO_MARKER = "<video>"

ImageCell = bytes | Path | None  # encoded bytes or a file; None: neither was found

_MARKERS = re.compile(f"({IMAGE_MARKER}|{VIDEO_MARKER})")


def plain_text(value: object, what: str, empty: Reason) -> str:
    """The text of a cell; numbers as they are written.

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
        raise Unusable(Reason.NOT_TEXT, f"the {what} holds half a character: {error.reason}") from None
    return value


def question_text(value: object) -> str:
    """The question of a cell: text, or chat messages of which the one of the user counts.

    A system message is left out: how to answer is the template's to say. Parts of a message that are images or videos
    become their markers.

    Raises:
        Unusable: EMPTY_PROBLEM; NOT_TEXT, also for messages that hold more than one turn.
    """
    if _is_chat(value):
        value = _user_text(value)  # type: ignore[arg-type]
    return plain_text(value, "problem", Reason.EMPTY_PROBLEM)


def place_images(
    question: str, images: Sequence[ImageCell], videos: Sequence[Sequence[ImageCell]]
) -> tuple[str, list[ImageCell]]:
    """The question with every video marker as one image marker per frame, and all images in the markers' order.

    Raises:
        Unusable: MARKER_COUNT or VIDEO_MARKER_COUNT, when markers and images (or videos) do not pair up.
    """
    for marker, given, reason in (
        (IMAGE_MARKER, len(images), Reason.MARKER_COUNT),
        (VIDEO_MARKER, len(videos), Reason.VIDEO_MARKER_COUNT),
    ):
        if (markers := question.count(marker)) != given:
            raise Unusable(reason, f"{markers} {marker} marker(s) for {given} {marker.strip('<>')}(s)")
    next_image, next_video = iter(images), iter(videos)
    pieces: list[str] = []
    placed: list[ImageCell] = []
    for piece in _MARKERS.split(question):
        if piece == VIDEO_MARKER:
            frames = next(next_video)
            pieces.append(IMAGE_MARKER * len(frames))
            placed += frames
        else:
            pieces.append(piece)
            placed += [next(next_image)] if piece == IMAGE_MARKER else []
    return "".join(pieces), placed


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)
    )


def _user_text(messages: Sequence[dict[str, object]]) -> object:
    roles = [str(message["role"]) for message in messages]
    if [role for role in roles if role != "system"] != ["user"]:
        detail = f"the problem is a conversation of {', '.join(roles)}; one message of the user is allowed"
        raise Unusable(Reason.NOT_TEXT, detail)
    content = messages[roles.index("user")]["content"]
    if not isinstance(content, list):
        return content
    return "".join(chain.from_iterable(map(_part_text, content)))


def _part_text(part: object) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict) and part.get("type") in ("image", "video"):
        yield f"<{part['type']}>"
    elif isinstance(part, dict) and isinstance(part.get("text"), str):
        yield part["text"]
    else:
        raise Unusable(Reason.NOT_TEXT, f"a part of the user's message is {str(part)[:80]}")
