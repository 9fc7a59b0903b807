from __future__ import annotations

import threading
from typing import Any

import pytest

from rlcore.distributed.worker import ReadAhead
from rlcore.types import ImageRef


def image(name: str) -> ImageRef:
    return ImageRef(name, 28, 28)


def test_an_image_is_read_once_and_by_another_thread() -> None:
    reads: list[tuple[str, int]] = []

    def read(ref: ImageRef) -> Any:
        reads.append((ref.sha256, threading.get_ident()))
        return ref.sha256.upper()

    ahead = ReadAhead(read)
    for name in "aba":
        ahead.start(image(name))
    assert [ahead.of(image(name)) for name in "abca"] == ["A", "B", "C", "A"]
    assert [name for name, _ in reads] == ["a", "b", "c"]
    assert threading.get_ident() not in {thread for _, thread in reads}


def test_the_one_used_longest_ago_goes_first() -> None:
    reads: list[str] = []
    ahead = ReadAhead(lambda ref: reads.append(ref.sha256), kept=2)  # type: ignore[arg-type, func-returns-value]
    for name in ("a", "b", "a", "c", "a", "b"):
        ahead.of(image(name))
    assert reads == ["a", "b", "c", "b"]


def test_what_goes_wrong_is_raised_where_the_image_is_wanted() -> None:
    def read(ref: ImageRef) -> Any:
        raise FileNotFoundError(ref.sha256)

    ahead = ReadAhead(read)
    ahead.start(image("gone"))
    with pytest.raises(FileNotFoundError, match="gone"):
        ahead.of(image("gone"))
