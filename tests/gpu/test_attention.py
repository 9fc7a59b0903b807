"""The kernel of a GPU against the padded batch in float32: shared prompts, with a window and without."""

from __future__ import annotations

import pytest
import torch

from rlcore.batch import Segments
from rlcore.models.attention import Scores, shared_prompt_attention
from tests.numerics.attention import SCALE, segments

pytestmark = pytest.mark.gpu
GROUPS = [(300, [70, 1, 200]), (5, [3, 400]), (129, [])]


@pytest.mark.parametrize("window", [None, 1, 64, 5000])
def test_the_kernel_equals_the_padded_batch(window: int | None) -> None:
    cpu = segments(GROUPS)
    where = Segments(cpu.bounds.cuda(), cpu.key_bounds.cuda(), cpu.key_rows.cuda(), cpu.sizes)
    generator = torch.Generator("cuda").manual_seed(0)
    total = int(where.bounds[-1])
    query, key, value, grad = (
        torch.randn(total, heads, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (4, 2, 2, 4)
    )
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [x.to(dtype).detach().requires_grad_() for x in (query, key, value)]
        out = shared_prompt_attention(*leaves, where, Scores(SCALE, window))
        results.append([out, *torch.autograd.grad(out, leaves, grad.to(dtype))])
    size = float(results[1][0].norm())  # a token that sees only itself gives its query and key no gradient
    for kernel, exact in zip(*results, strict=True):
        assert float((kernel.float() - exact).norm()) < 0.01 * max(size, float(exact.norm()))  # bfloat16: 0.4 percent
