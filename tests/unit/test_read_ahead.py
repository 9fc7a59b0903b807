from __future__ import annotations

import threading
from typing import Any

import pytest
from PIL import Image

from rlcore.data.tiny import build_processor
from rlcore.models.vision import ReadAhead, feature_bytes
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


# 28 x 28 pixels are 4 patches of 3 channels x 2 frames x 14 x 14 float32
IMAGE_BYTES = 4 * 1176 * 4


def test_the_bytes_of_an_image_are_known_before_it_is_read() -> None:
    processor = build_processor().image_processor
    picture = Image.new("RGB", (56, 28))
    pixels = processor(images=[picture], size={"shortest_edge": 784, "longest_edge": 50_000}, return_tensors="pt")
    assert feature_bytes(ImageRef("a", 56, 28)) == pixels["pixel_values"].nbytes == 2 * IMAGE_BYTES


def counting(room: int) -> tuple[ReadAhead, list[str]]:
    reads: list[str] = []
    read: Any = lambda ref: reads.append(ref.sha256)  # noqa: E731
    return ReadAhead(read, kept_bytes=room), reads


def test_the_least_recently_used_image_is_evicted_first() -> None:
    ahead, reads = counting(2 * IMAGE_BYTES)
    for name in ("a", "b", "a", "c", "a", "b"):
        ahead.of(image(name))
    assert reads == ["a", "b", "c", "b"]


def test_the_cache_is_limited_by_bytes() -> None:
    ahead, reads = counting(4 * IMAGE_BYTES)
    large = ImageRef("large", 56, 56)  # all of the room
    for ref in (image("a"), image("b"), large, image("a")):
        ahead.of(ref)
    assert reads == ["a", "b", "large", "a"]


def test_a_batch_larger_than_the_cache_evicts_no_unused_image() -> None:
    """Reading on would push out what training wants first."""
    ahead, reads = counting(3 * IMAGE_BYTES)
    for name in "abcdefgh":
        ahead.start(image(name))
    for name in "abcdefgh":
        ahead.of(image(name))
    assert reads == list("abcdefgh")


def test_the_cache_stays_within_its_limit() -> None:
    ahead, _ = counting(3 * IMAGE_BYTES)
    for batch in ("abcdefgh", "ijklmnop"):
        for name in batch:
            ahead.start(image(name))
            assert ahead.held_bytes <= 3 * IMAGE_BYTES
        for name in batch[::2]:  # the other groups are not trained on
            ahead.of(image(name))
            assert ahead.held_bytes <= 3 * IMAGE_BYTES


def test_an_image_larger_than_the_cache_is_read() -> None:
    ahead, reads = counting(IMAGE_BYTES)
    ahead.of(ImageRef("large", 56, 56))
    ahead.of(image("a"))
    assert reads == ["large", "a"]
    assert ahead.held_bytes == IMAGE_BYTES


def test_an_error_of_the_read_is_raised_to_the_caller() -> None:
    def read(ref: ImageRef) -> Any:
        raise FileNotFoundError(ref.sha256)

    ahead = ReadAhead(read)
    ahead.start(image("gone"))
    with pytest.raises(FileNotFoundError, match="gone"):
        ahead.of(image("gone"))
