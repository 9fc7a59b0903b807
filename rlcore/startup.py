"""What every process that loads torch and vLLM does while it starts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def making_what_stays() -> Iterator[None]:
    """Imports and engine starts make millions of objects that stay: looking through them again and again is a third of
    the start-up time. Those made inside are not looked at later either."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
