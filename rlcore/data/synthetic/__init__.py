"""Problems generated from a seed, and the splits that they belong to."""

from __future__ import annotations

import hashlib
from typing import Literal, cast

from rlcore.errors import DataError

SPLITS = ("train", "validation", "test", "warmup")
PUBLIC_SPLITS = ("train", "validation", "test")
Split = Literal["train", "validation", "test", "warmup"]
"""``warmup`` is for the warm start of the tiny policies; no experiment trains on it or evaluates with it."""


def split_of(content: bytes) -> Split:
    """The only split in which a problem with this content may appear: by a hash, a quarter of them in each."""
    return cast(Split, SPLITS[hashlib.blake2b(content, digest_size=1).digest()[0] % len(SPLITS)])


def check_split(name: str, split: str) -> Split:
    """
    Raises:
        DataError: synthetic sources have no such split.
    """
    if split not in PUBLIC_SPLITS:
        raise DataError(f"{name} has no split {split!r}. Allowed: {', '.join(PUBLIC_SPLITS)}.")
    return cast(Split, split)
