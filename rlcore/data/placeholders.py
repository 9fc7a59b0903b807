"""The tokens of images and videos in a prompt.

vLLM takes one placeholder per image and expands it itself; the trainer needs all tokens of the image. ``expand`` and
``collapse`` translate between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from rlcore.errors import DataError
from rlcore.types import ImageRef, Ints


class Placeholders:
    """The placeholders of one model, and the tokens that stand for each image or video.

    Args:
        image_token_id: of the image placeholder; None if the model takes no images.
        video_token_id: of the video placeholder; None if videos are given to the model as images.
        expansion: the tokens of one image or video, with those around and between its features.
        joins: pairs of tokens that the tokenizer writes as one token at the edges of images, with that token.
    """

    def __init__(
        self,
        image_token_id: int | None,
        video_token_id: int | None,
        expansion: Callable[[ImageRef], Sequence[int]],
        joins: Mapping[tuple[int, int], int],
    ) -> None:
        self.image_token_id, self.video_token_id = image_token_id, video_token_id
        self._expand, self._joins = expansion, joins
        self._expansions: dict[tuple[int, int, int, float], Ints] = {}

    def count(self, tokens: Ints) -> int:
        """Number of placeholders in a prompt that is not expanded."""
        return int(self._are_placeholders(tokens).sum())

    def num_tokens(self, image: ImageRef) -> int:
        """Number of tokens of a resized image or video, with those around and between its features."""
        return len(self._expansion(image))

    def expand(self, tokens: Ints, images: Sequence[ImageRef]) -> Ints:
        """Replace the placeholder of each image and video with the tokens that the model's processor writes for it,
        joined with their neighbours as the tokenizer joins them.

        Raises:
            DataError: an image stands where the prompt has a video, or the reverse.
        """
        places = np.flatnonzero(self._are_placeholders(tokens))
        parts, start = [], 0
        for place, image in zip(places, images, strict=True):
            if tokens[place] != self._placeholder(image):
                raise DataError(f"image {image.sha256} stands at a placeholder of the other kind. Prepare it again.")
            parts += [tokens[start:place], self._expansion(image)]
            start = place + 1
        expanded: Ints = np.concatenate([*parts, tokens[start:]]).astype(np.int32)
        if parts and self._joins:
            expanded = np.asarray(_joined(expanded.tolist(), self._joins), dtype=np.int32)
        return expanded

    def collapse(self, tokens: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        """The reverse of ``expand``: one placeholder per image, as vLLM takes prompts.

        Raises:
            DataError: the tokens of an image are not among those that follow the image before it.
        """
        collapsed: list[int] = []
        rest = np.asarray(tokens, dtype=np.int32)
        for image in images:
            left, rest = self._around(rest, self._expansion(image))
            collapsed += [*left.tolist(), self._placeholder(image)]
        return [*collapsed, *rest.tolist()]

    def _around(self, tokens: Ints, expansion: Ints) -> tuple[Ints, Ints]:
        """The tokens before and after those of the first image."""
        if not self._joins:
            first = _find(tokens, expansion)
            return tokens[:first], tokens[first + len(expansion) :]
        first = _find(tokens, expansion[1:-1])
        last = first + len(expansion) - 2
        start, end = int(expansion[0]), int(expansion[-1])
        before = {together: left for (left, right), together in self._joins.items() if right == start}
        after = {together: right for (left, right), together in self._joins.items() if left == end}
        left = [*tokens[: first - 1], *_neighbour_in(int(tokens[first - 1]), start, before)]
        right = [*_neighbour_in(int(tokens[last]), end, after), *tokens[last + 1 :]]
        return np.asarray(left, np.int32), np.asarray(right, np.int32)

    def _placeholder(self, image: ImageRef) -> int:
        return cast(int, self.video_token_id if image.is_video else self.image_token_id)

    def _expansion(self, image: ImageRef) -> Ints:
        shape = (image.width, image.height, image.frames, image.seconds_per_frame)
        if shape not in self._expansions:
            self._expansions[shape] = np.asarray(self._expand(image), dtype=np.int32)
        return self._expansions[shape]

    def _are_placeholders(self, tokens: Ints) -> npt.NDArray[np.bool_]:
        return np.isin(tokens, [token for token in (self.image_token_id, self.video_token_id) if token is not None])


def _joined(tokens: Sequence[int], joins: Mapping[tuple[int, int], int]) -> list[int]:
    """The tokens with each pair of ``joins`` replaced, one pair after the other over the whole sequence."""
    result = list(tokens)
    for pair, together in joins.items():
        merged: list[int] = []
        place = 0
        while place < len(result):
            matches = tuple(result[place : place + 2]) == pair
            merged.append(together if matches else result[place])
            place += 2 if matches else 1
        result = merged
    return result


def _neighbour_in(token: int, own: int, others: Mapping[int, int]) -> list[int]:
    """The neighbour's part of the token at an edge of an image; empty if the token is the image's alone.

    Args:
        own: the image's token at this edge.
        others: joined token to the neighbour's token in it.

    Raises:
        DataError: the token is neither ``own`` nor joined with it.
    """
    if token != own and token not in others:
        raise DataError(f"token {token} is where an image has {own}. Prepare the dataset again with this model.")
    return [] if token == own else [others[token]]


def _find(tokens: Ints, part: Ints) -> int:
    """The first place of ``part`` in ``tokens``."""
    for first in np.flatnonzero(tokens == part[0]):
        if np.array_equal(tokens[first : first + len(part)], part):
            return int(first)
    raise DataError(
        f"the {len(part)} tokens of an image are not in the sequence, or not in this order. Prepare the dataset "
        "again with this model."
    )
