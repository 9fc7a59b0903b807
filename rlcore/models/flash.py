"""The FlashAttention kernel behind the packed attention on CUDA: the newest one that is installed, else torch's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from rlcore.config import ExperimentConfig
from rlcore.errors import ModelError
from rlcore.families import family_of
from rlcore.models.dtypes import compute_dtype

log = logging.getLogger(__name__)

Version = Literal["FA4", "FA3", "FA2"]
# In order of preference: module, and the major compute capabilities that its kernels support.
MODULES: dict[Version, tuple[str, tuple[int, ...]]] = {
    "FA4": ("flash_attn.cute", (9, 10)),
    "FA3": ("flash_attn_interface", (9,)),
    "FA2": ("flash_attn.flash_attn_interface", (8, 9, 10, 12)),
}


class Sequences(NamedTuple):
    """Where each packed sequence begins and ends."""

    bounds: Tensor  # [sequences + 1] int32: of the queries
    key_bounds: Tensor  # [sequences + 1] int32: of the keys
    longest: int  # in queries
    longest_keys: int
    window: int | None = None  # number of last keys that a query attends to; None: all
    cap: float | None = None  # soft cap of the scores
    causal: bool = True  # else a query also attends to the keys after its own

    @property
    def left(self) -> int | None:
        """Keys before its own that a query attends to."""
        return None if self.window is None else self.window - 1

    @property
    def right(self) -> int:
        """Keys after its own that a query with a window attends to; -1: all."""
        return 0 if self.causal else -1


Triple = tuple[Tensor, Tensor, Tensor]  # query [T, Hq, D], key and value [K, Hkv, D]; or their gradients


class FlashKernel(Protocol):
    """Attention over packed sequences in 16 bits, with the mask aligned to the end of each sequence's keys."""

    def forward(self, inputs: Triple, where: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        """Output [T, Hq, D] and log-sum-exp [Hq, T] float32."""
        ...

    def backward(
        self, grad: Tensor, inputs: Triple, out: Tensor, lse: Tensor, where: Sequences, scale: float
    ) -> Triple:
        """Gradients of the inputs; ``grad`` is that of ``out``."""
        ...


class TorchKernel:
    """torch's operators: a build of FlashAttention 2, or the version that ``activate_flash_attention_impl`` chose. They
    have no soft cap."""

    def forward(self, inputs: Triple, where: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *inputs, *where[:4], 0.0, where.causal, False, scale=scale, **_window(where)
        )
        return out, lse

    def backward(
        self, grad: Tensor, inputs: Triple, out: Tensor, lse: Tensor, where: Sequences, scale: float
    ) -> Triple:
        no_dropout = (grad.new_zeros(2, dtype=torch.uint64), grad.new_empty(0))  # state of its random generator
        return torch.ops.aten._flash_attention_backward(  # type: ignore[no-any-return]
            grad, *inputs, out, lse, *where[:4], 0.0, where.causal, *no_dropout, scale=scale, **_window(where)
        )


def _window(where: Sequences) -> dict[str, int]:
    """torch's operators take an omitted window as none."""
    return {} if where.left is None else {"window_size_left": where.left, "window_size_right": where.right}


class FlashAttention2Library(Protocol):
    """The two functions of ``flash_attn.flash_attn_interface``, version 2.8, that ``FlashAttention2`` calls."""

    _flash_attn_varlen_forward: Callable[..., tuple[Tensor, ...]]
    _flash_attn_varlen_backward: Callable[..., Tensor]


class FlashAttention2:
    """The package flash-attn 2. Its public function does not return the log-sum-exp, so this calls private ones."""

    def __init__(self, library: FlashAttention2Library) -> None:
        self._library = library

    def forward(self, inputs: Triple, where: Sequences, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._library._flash_attn_varlen_forward(*inputs, **_options(where, scale))
        return out, lse

    def backward(
        self, grad: Tensor, inputs: Triple, out: Tensor, lse: Tensor, where: Sequences, scale: float
    ) -> Triple:
        of_query, of_key, of_value = (x.new_empty(x.shape) for x in inputs)
        self._library._flash_attn_varlen_backward(
            *(grad, *inputs, out, lse, of_query, of_key, of_value),
            **_options(where, scale),
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return of_query, of_key, of_value


def _options(where: Sequences, scale: float) -> dict[str, Any]:
    return {
        "cu_seqlens_q": where.bounds,
        "cu_seqlens_k": where.key_bounds,
        "max_seqlen_q": where.longest,
        "max_seqlen_k": where.longest_keys,
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": where.causal,
        "window_size_left": -1 if where.left is None else where.left,
        "window_size_right": -1 if where.left is None else where.right,
        "softcap": 0.0 if where.cap is None else where.cap,
    }


@cache
def flash_kernel(capped: bool = False) -> FlashKernel:
    """The kernel for this process's GPU. FlashAttention 3 and 4 are activated for all of torch: torch offers no less.

    Args:
        capped: scores have a soft cap, which only flash-attn 2 computes in both directions.

    Raises:
        ModelError: the package is installed and cannot be loaded, for example because it was built for another torch;
            no kernel computes the cap.
    """
    version = newest(lambda name: _installed(name) and (not capped or name == MODULES["FA2"][0]), _major())
    if version is None and capped:
        raise ModelError(
            "the model has a soft cap of attention scores, which torch's FlashAttention kernel does not compute. "
            "flash-attn 2 computes it (make install EXTRA=gpu-flash). Or set model.compute_dtype to float32: attention "
            "then runs without a kernel, in more memory."
        )
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
            "installed (make install EXTRA=gpu-flash), or uninstall it: torch has its own kernel."
        ) from error
    log.info("packed attention runs on %s (%s)", version, MODULES[version][0])
    return kernel


def require_kernel(model: Any, config: ExperimentConfig, device_type: str) -> None:
    """Refuse a soft cap of attention scores that no installed kernel computes. On a CPU and in float32 attention needs
    no kernel.

    Args:
        model: Hugging Face configuration.

    Raises:
        ModelError: the model has such a cap.
    """
    in_kernel = device_type == "cuda" and compute_dtype(config, device_type).itemsize == 2
    if in_kernel and family_of(model).caps(model).scores is not None:
        flash_kernel(capped=True)


def _major() -> int:
    return torch.cuda.get_device_capability()[0]


def newest(installed: Callable[[str], bool], major: int) -> Version | None:
    """The first of FlashAttention 4, 3 and 2 that is installed and supports compute capability ``major``."""
    return next((v for v, (name, majors) in MODULES.items() if major in majors and installed(name)), None)


def _installed(name: str) -> bool:
    parts = name.split(".")
    # parent first: find_spec("flash_attn.cute") raises without flash_attn
    return all(find_spec(".".join(parts[: i + 1])) is not None for i in range(len(parts)))
