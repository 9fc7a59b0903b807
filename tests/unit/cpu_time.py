"""How long one call computes, on a machine that has other work."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """The result of a call and the CPU seconds of this thread in it, with the garbage collector off.

    A full collection visits every object of the process. In a test process that takes longer than grading a long text.
    A grading process has far fewer objects.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    start = time.thread_time()
    try:
        result = call()
        return result, time.thread_time() - start
    finally:
        if was_enabled:
            gc.enable()
