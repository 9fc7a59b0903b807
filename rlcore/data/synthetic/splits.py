"""The splits of synthetic problems."""

from __future__ import annotations

import hashlib
from typing import Literal, cast

from rlcore.errors import DataError

SPLITS = ("train", "validation", "test", "warmup")
PUBLIC_SPLITS = ("train", "validation", "test")
Split = Literal["train", "validation", "test", "warmup"]
"""``warmup`` holds the problems of the tiny policies' warm start; no experiment trains or measures on them."""


def split_of(content: bytes) -> Split:
    """The only split that a problem with this content may appear in: a hash, a quarter to each split."""
    return cast(Split, SPLITS[hashlib.blake2b(content, digest_size=1).digest()[0] % len(SPLITS)])


def check_split(name: str, split: str) -> Split:
    """``split``, if a drawn source has it.

    Raises:
        DataError: it does not.
    """
    if split not in PUBLIC_SPLITS:
        raise DataError(f"{name} has no split {split!r}. Allowed: {', '.join(PUBLIC_SPLITS)}.")
    return cast(Split, split)
