"""Arithmetic on long tensors as one kernel, where memory is what takes the time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """``function`` compiled, on CUDA; elsewhere itself.

    Args:
        function: pure, or writing into its arguments; of tensors and constants. Tensors may come with any number of
            rows, their other dimensions are what kernels are made for.
    """
    if device_type != "cuda":
        return function
    compiled = torch.compile(function)

    def of_any_rows(*arguments: Any) -> Any:
        for rows in arguments:
            if isinstance(rows, Tensor) and rows.dim():
                torch._dynamo.maybe_mark_dynamic(rows, 0)
        return compiled(*arguments)

    return of_any_rows
