"""The kernels of flash-linear-attention over packed rows, against operations of torch in float64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rlcore.batch import Segments
from rlcore.models.recurrence import along_by_chunks, along_by_kernels, gated_delta_rule, has_kernels
from tests.numerics.attention import segments

pytestmark = pytest.mark.gpu

HEADS, SIZE = 4, 128
GROUPS: Sequence[tuple[int, Sequence[int]]] = [(3, (2, 200)), (150, (1, 70)), (65, (64, 5)), (7, ())]
NAMES = ("query", "key", "value", "log_decay", "write")


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    assert has_kernels(), "flash-linear-attention is missing: make install EXTRA=gpu installs it"


def row() -> Segments:
    made = segments(GROUPS)
    return Segments(*(x.cuda() for x in (made.bounds, made.key_bounds, made.key_rows)), made.sizes)


def tokens(count: int) -> dict[str, Tensor]:
    """As the layers make them: queries, keys and values in bfloat16."""
    torch.manual_seed(0)
    of_size = [torch.randn(count, HEADS, SIZE, device="cuda") for _ in range(3)]
    query, key = (torch.nn.functional.normalize(x, dim=-1) for x in of_size[:2])
    decay = -0.05 * torch.rand(count, HEADS, device="cuda")  # so that a state lasts for dozens of tokens
    write = torch.rand(count, HEADS, device="cuda")
    inputs = [*(x.bfloat16() for x in (query, key, of_size[2])), decay, write]
    return dict(zip(NAMES, inputs, strict=True))


def output_and_gradients(inputs: dict[str, Tensor], where: Segments, *, kernels: bool) -> dict[str, Tensor]:
    taken = {name: x.clone() if kernels else x.double() for name, x in inputs.items()}
    for x in taken.values():
        x.requires_grad_()
    along = along_by_kernels if kernels else along_by_chunks
    out = gated_delta_rule(tuple(taken.values()), where, along)  # type: ignore[arg-type]
    torch.manual_seed(1)
    (out * torch.randn(out.shape, device="cuda")).sum().backward()  # type: ignore[no-untyped-call]
    return {"output": out.detach(), **{f"gradient of {name}": x.grad for name, x in taken.items()}}  # type: ignore[dict-item]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_kernels_compute_outputs_and_gradients_of_shared_prompts() -> None:
    """By at most eight roundings to bfloat16, of 2^-9 each: the kernels round several products."""
    where = row()
    inputs = tokens(int(where.bounds[-1]))
    expected = output_and_gradients(inputs, where, kernels=False)
    found = output_and_gradients(inputs, where, kernels=True)
    errors = {name: error(found[name], value) for name, value in expected.items()}
    assert max(errors.values()) < 8 * 2**-9, errors


def test_a_completion_with_the_state_of_another_prompt_is_told_apart() -> None:
    """The negative control: the bound above is below what such a mistake gives."""
    where = row()
    inputs = tokens(int(where.bounds[-1]))
    expected = output_and_gradients(inputs, where, kernels=False)["output"]
    swapped = Segments(where.bounds, where.key_bounds, where.key_rows.clone(), where.sizes)
    first = swapped.key_bounds[len(GROUPS) + 1].long()  # of the second completion, whose prompt starts at row 0
    swapped.key_rows[first] = 3  # the second prompt's first row
    found = output_and_gradients(inputs, swapped, kernels=True)["output"]
    assert error(found, expected) > 0.1
