"""The FlashAttention kernel behind the packed attention on CUDA: the newest one that is installed, else torch's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rlcore.errors import ModelError

log = logging.getLogger(__name__)

Version = Literal["FA4", "FA3", "FA2"]
# In the order of preference: module, and the major compute capabilities that the kernels are written for.
MODULES: dict[Version, tuple[str, tuple[int, ...]]] = {
    "FA4": ("flash_attn.cute", (9, 10)),
    "FA3": ("flash_attn_interface", (9,)),
    "FA2": ("flash_attn.flash_attn_interface", (8, 9, 10, 12)),
}


class FlashKernel(Protocol):
    """Causal attention over packed sequences in 16 bits, the mask aligned to the end of each sequence's keys."""

    def forward(
        self,
        query: Tensor,  # [T, Hq, D]
        key: Tensor,  # [K, Hkv, D]
        value: Tensor,
        bounds: Tensor,  # [sequences + 1] int32: where each sequence's queries begin and end
        key_bounds: Tensor,
        longest: int,
        longest_keys: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Output [T, Hq, D] and log-sum-exp [Hq, T] float32."""
        ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        bounds: Tensor,
        key_bounds: Tensor,
        longest: int,
        longest_keys: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value."""
        ...


class TorchKernel:
    """torch's operators: a build of FlashAttention 2, or what ``activate_flash_attention_impl`` put in its place."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        key_bounds: Tensor,
        longest: int,
        longest_keys: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        ends = (bounds, key_bounds, longest, longest_keys)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(query, key, value, *ends, 0.0, True, False, scale=scale)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        bounds: Tensor,
        key_bounds: Tensor,
        longest: int,
        longest_keys: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ends = (bounds, key_bounds, longest, longest_keys)
        no_dropout = (query.new_zeros(2, dtype=torch.uint64), query.new_empty(0))  # state of its random generator
        return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
            grad, query, key, value, out, lse, *ends, 0.0, True, *no_dropout, scale=scale
        )


class FlashAttention2Library(Protocol):
    """What is called of ``flash_attn.flash_attn_interface``, version 2.8."""

    _flash_attn_varlen_forward: Callable[..., tuple[Tensor, ...]]
    _flash_attn_varlen_backward: Callable[..., Tensor]


class FlashAttention2:
    """The package flash-attn 2. Its public function keeps the log-sum-exp to itself, so these are the two below it."""

    def __init__(self, library: FlashAttention2Library) -> None:
        self._library = library

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        key_bounds: Tensor,
        longest: int,
        longest_keys: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._library._flash_attn_varlen_forward(
            query,
            key,
            value,
            cu_seqlens_q=bounds,
            cu_seqlens_k=key_bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest_keys,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=True,
        )
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        bounds: Tensor,
        key_bounds: Tensor,
        longest: int,
        longest_keys: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_query, of_key, of_value = (x.new_empty(x.shape) for x in (query, key, value))
        self._library._flash_attn_varlen_backward(
            grad,
            query,
            key,
            value,
            out,
            lse,
            of_query,
            of_key,
            of_value,
            cu_seqlens_q=bounds,
            cu_seqlens_k=key_bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest_keys,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=True,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return of_query, of_key, of_value


@cache
def flash_kernel() -> FlashKernel:
    """The kernel for this process's GPU. FlashAttention 3 and 4 are switched on for all of torch, as torch has it.

    Raises:
        ModelError: the package is there and cannot be loaded, because it was built against another torch, say.
    """
    version = newest(_installed, torch.cuda.get_device_capability()[0])
    if version is None:
        return TorchKernel()
    try:
        if version == "FA2":
            library: Any = import_module(MODULES["FA2"][0])
            kernel: FlashKernel = FlashAttention2(library)
        else:
            torch.nn.attention.activate_flash_attention_impl(version)
            kernel = TorchKernel()
    except (ImportError, RuntimeError) as error:
        raise ModelError(
            f"{MODULES[version][0]} is installed and cannot be loaded: {error}. Build it against the torch that is "
            "installed (make install EXTRA=gpu-flash), or uninstall it: torch has a kernel of its own."
        ) from error
    log.info("packed attention runs on %s (%s)", version, MODULES[version][0])
    return kernel


def newest(installed: Callable[[str], bool], major: int) -> Version | None:
    """The first of FlashAttention 4, 3 and 2 that is installed and made for GPUs of compute capability ``major``."""
    return next((v for v, (name, majors) in MODULES.items() if major in majors and installed(name)), None)


def _installed(name: str) -> bool:
    parts = name.split(".")
    # Parent first: looking for flash_attn.cute without a flash_attn raises, and imports one that is there.
    return all(find_spec(".".join(parts[: i + 1])) is not None for i in range(len(parts)))
