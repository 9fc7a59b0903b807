"""The kernel of a GPU against the padded batch in float32: shared prompts, with a window and without, and pictures that
attend to themselves in both directions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlcore.batch import Pictures, Segments
from rlcore.models.attention import Scores, shared_prompt_attention
from tests.numerics.attention import SCALE, segments

pytestmark = pytest.mark.gpu
GROUPS = [(300, [70, 1, 200]), (5, [3, 400]), (129, [])]


def pictures() -> Pictures:
    """Two of the first prompt, and one that is the end of the third."""
    return Pictures(
        rows=torch.cat([torch.arange(10, 74), torch.arange(100, 230), torch.arange(400, 434)]).cuda(),
        bounds=torch.tensor([0, 64, 194, 228], dtype=torch.int32).cuda(),
        key_bounds=torch.tensor([0, 74, 304, 433], dtype=torch.int32).cuda(),
        key_rows=torch.cat([torch.arange(74), torch.arange(230), torch.arange(305, 434)]).cuda(),
        sizes=torch.tensor([3, 130, 230]),
    )


@pytest.mark.parametrize("with_pictures", [False, True])
@pytest.mark.parametrize("window", [None, 1, 64, 5000])
def test_the_kernel_equals_the_padded_batch(window: int | None, with_pictures: bool) -> None:
    cpu = segments(GROUPS)
    where = Segments(cpu.bounds.cuda(), cpu.key_bounds.cuda(), cpu.key_rows.cuda(), cpu.sizes)
    where = replace(where, pictures=pictures() if with_pictures else None)
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
