"""What every process that loads torch and vLLM does while it starts."""

from __future__ import annotations

import gc
import sys
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


@contextmanager
def leaving_out(*packages: str) -> Iterator[None]:
    """Imports inside find these packages not installed, unless they have been imported before."""
    absent = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: no such module
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


def make_transformers_lean() -> None:
    """To be called before transformers is imported. It imports scikit-learn and SciPy, where they are installed, for
    assisted decoding and for losses of object detection: a fifth of the time that importing it takes."""
    with leaving_out("sklearn", "scipy"):
        from transformers import utils

        utils.is_sklearn_available()  # it remembers the answer
        utils.is_scipy_available()


@contextmanager
def importing_vllm() -> Iterator[None]:
    """It imports SciPy, where it is installed, for sound: a third of the time that importing it takes."""
    make_transformers_lean()
    from transformers import utils

    asked_before = utils.is_sklearn_available() or utils.is_scipy_available()  # and it would miss them now
    with leaving_out(*(() if asked_before else ("scipy",))):
        yield
