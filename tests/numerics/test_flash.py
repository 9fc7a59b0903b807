"""Which FlashAttention is chosen, and how flash-attn 2 is called, against plain arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlcore.errors import ModelError
from rlcore.models import flash
from rlcore.models.flash import FlashAttention2, Sequences, TorchKernel, flash_kernel, newest
from tests.numerics.attention import LAYOUTS, SCALE, math_backward, math_forward, segments

FLASH_2, FLASH_3, FLASH_4 = "flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute"


@pytest.mark.parametrize(
    ("modules", "major", "expected"),
    [
        ([], 9, None),
        ([FLASH_2], 9, "FA2"),
        ([FLASH_2, FLASH_3], 9, "FA3"),
        ([FLASH_2, FLASH_3, FLASH_4], 9, "FA4"),
        ([FLASH_2, FLASH_3, FLASH_4], 10, "FA4"),
        ([FLASH_2, FLASH_3], 10, "FA2"),
        ([FLASH_2, FLASH_3, FLASH_4], 8, "FA2"),
        ([FLASH_3, FLASH_4], 8, None),
    ],
)
def test_the_newest_that_is_installed_and_made_for_the_gpu(modules, major, expected):
    assert newest(modules.__contains__, major) == expected


@pytest.fixture
def with_modules(monkeypatch):
    """Sets the modules that are installed, of which flash-attn 2 is the stand-in below."""

    def install(*modules: str) -> None:
        monkeypatch.setattr(flash, "_installed", modules.__contains__)
        monkeypatch.setattr(flash, "_major", lambda: 9)
        monkeypatch.setattr(flash, "import_module", lambda name: {FLASH_2: Library()}[name])
        flash_kernel.cache_clear()

    yield install
    flash_kernel.cache_clear()


def test_a_soft_cap_takes_flash_attn_2_even_if_a_newer_one_is_installed(with_modules):
    with_modules(FLASH_2, FLASH_3, FLASH_4)
    assert isinstance(flash_kernel(capped=True), FlashAttention2)


@pytest.mark.parametrize("modules", [(), (FLASH_3, FLASH_4)])
def test_a_soft_cap_without_flash_attn_2_is_refused_and_the_error_names_two_ways_out(with_modules, modules):
    with_modules(*modules)
    with pytest.raises(ModelError, match=r"soft cap of attention scores.*EXTRA=gpu-flash.*compute_dtype to float32"):
        flash_kernel(capped=True)


def test_without_a_soft_cap_torch_is_enough(with_modules):
    with_modules()
    assert isinstance(flash_kernel(), TorchKernel)


class Library:
    """flash-attn 2.8.3's two functions with their signatures, in plain arithmetic."""

    def _flash_attn_varlen_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
        block_table: Tensor | None = None,
        leftpad_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert dropout_p == 0.0
        assert window_size_right == (-1 if window_size_left == -1 or not causal else 0)
        window = None if window_size_left == -1 else window_size_left + 1
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window, softcap or None, causal)
        return *math_forward(q, k, v, *ends, softmax_scale), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
        zero_tensors: bool = False,
    ) -> Tensor:
        assert dropout_p == 0.0
        assert window_size_right == (-1 if window_size_left == -1 or not causal else 0)
        window = None if window_size_left == -1 else window_size_left + 1
        ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window, softcap or None, causal)
        results = math_backward(dout, q, k, v, out, softmax_lse, *ends, softmax_scale)
        for place, result in zip((dq, dk, dv), results, strict=True):
            assert place is not None
            assert place.is_contiguous()
            place.copy_(result)
        return torch.empty(0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flash_attn_2_gets_each_argument_in_its_place(layout, window, cap, causal):
    where = segments(LAYOUTS[layout])
    ends = Sequences(where.bounds, where.key_bounds, *where.sizes[1:].tolist(), window, cap, causal)
    generator = torch.Generator().manual_seed(0)
    query, grad = (torch.randn(int(where.bounds[-1]), 4, 8, generator=generator) for _ in range(2))
    key, value = (torch.randn(len(where.key_rows), 2, 8, generator=generator) for _ in range(2))
    kernel = FlashAttention2(Library())
    out, lse = kernel.forward((query, key, value), ends, SCALE)
    assert_close((out, lse), math_forward(query, key, value, *ends, SCALE))
    expected = math_backward(grad, query, key, value, out, lse, *ends, SCALE)
    assert_close(kernel.backward(grad, (query, key, value), out, lse, ends, SCALE), expected)
