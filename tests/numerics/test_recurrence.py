"""Layers with a recurrent state over packed rows: against the recurrence token by token, and over shared prompts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close

from rlcore.algorithms.loss import StepTotals
from rlcore.batch import Segments
from rlcore.errors import ModelError
from rlcore.families import FAMILIES
from rlcore.models import recurrence
from rlcore.models.recurrence import (
    CHUNK,
    Tokens,
    causal_convolution,
    gated_delta_rule,
    unit_lower_inverse,
    use_packed_recurrence,
)
from rlcore.models.torch_policy import TorchPolicy
from tests.checking import make_model
from tests.docs.pages import ROOT
from tests.numerics import toy
from tests.numerics.attention import segments
from tests.ranks import on_ranks

HEADS, KEY, VALUE = 2, 4, 3
Groups = Sequence[tuple[int, Sequence[int]]]


def row(groups: Groups) -> tuple[Segments, list[list[int]]]:
    """A packed row of (prompt, completions) lengths, and the rows of each of its sequences."""
    made = segments(groups)
    return made, [rows.tolist() for rows in made.key_rows.tensor_split(made.key_bounds[1:-1].long())]


def tokens(count: int) -> Tokens:
    torch.manual_seed(count)
    key = torch.randn(count, HEADS, KEY, dtype=torch.float64)
    return (
        torch.randn(count, HEADS, KEY, dtype=torch.float64),
        key / key.norm(dim=-1, keepdim=True),
        torch.randn(count, HEADS, VALUE, dtype=torch.float64),
        -torch.rand(count, HEADS, dtype=torch.float64),
        torch.rand(count, HEADS, dtype=torch.float64),
    )


def one_by_one(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, write: Tensor) -> Tensor:
    """The formula, token after token."""
    state = query.new_zeros(HEADS, KEY, VALUE)
    read = []
    for q, k, v, g, b in zip(query, key, value, log_decay, write, strict=True):
        state = state * g.exp()[:, None, None]
        held = torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - held))
        read.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(read)


LAYOUTS: dict[str, Groups] = {
    "one prompt": [(5, ())],
    "a prompt of a whole chunk": [(CHUNK, (CHUNK,))],
    "ragged": [(3, (2, 200)), (150, (1, 70)), (CHUNK + 1, (CHUNK, 5))],
    "a prompt without completions": [(7, ()), (80, (90, 3))],
}


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_each_sequence_reads_what_it_reads_alone(groups: Groups) -> None:
    where, sequences = row(groups)
    inputs = tokens(int(where.bounds[-1]))
    found = gated_delta_rule(inputs, where)
    for rows in sequences:
        assert_close(found[rows], one_by_one(*(x[rows] for x in inputs)))


def test_the_gradient_of_a_shared_prompt_is_the_sum_over_its_completions() -> None:
    where, sequences = row([(70, (9, 90)), (4, (3,))])
    inputs = tuple(x.requires_grad_() for x in tokens(int(where.bounds[-1])))
    weights = torch.randn(int(where.bounds[-1]), HEADS, VALUE, dtype=torch.float64)
    prompt_end = 74
    found = torch.autograd.grad((gated_delta_rule(inputs, where) * weights)[prompt_end:].sum(), inputs)
    alone = sum(
        (one_by_one(*(x[rows] for x in inputs)) * weights[rows])[torch.tensor(rows) >= prompt_end].sum()
        for rows in sequences[2:]
    )
    for one, other in zip(found, torch.autograd.grad(alone, inputs), strict=True):
        assert_close(one, other)


def test_two_tokens_by_hand() -> None:
    """One head of size 1. S = 0 + 1 * 0.5 * 4 = 2, read 2 * 3 = 6. Half is left: S = 1, and replacing it wholly by 5
    gives S = 5, read 5 * 2 = 10."""
    where, _ = row([(1, (1,))])
    query, key, value = (torch.tensor(x).view(2, 1, 1) for x in ([3.0, 2.0], [1.0, 1.0], [4.0, 5.0]))
    log_decay, write = torch.tensor([[1.0], [0.5]]).log(), torch.tensor([[0.5], [1.0]])
    assert gated_delta_rule((query, key, value, log_decay, write), where).flatten().tolist() == pytest.approx([6, 10])


def test_a_convolution_sees_the_end_of_the_prompt_and_nothing_before_it() -> None:
    where, sequences = row([(1, (2,)), (5, (1, 6))])
    count = int(where.bounds[-1])
    torch.manual_seed(0)
    mixed, weight = torch.randn(count, 3), torch.randn(3, 4)
    found = causal_convolution(mixed, weight, where)
    for rows in sequences:
        padded = torch.nn.functional.pad(mixed[rows].T[None], (3, 0))
        expected = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], groups=3))[0].T
        assert_close(found[rows], expected)


def test_some_heads_at_a_time_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model", "qwen3_5", linear_num_key_heads=2, linear_num_value_heads=4)
    together = step(policy(model))
    monkeypatch.setattr(recurrence, "_HELD_BYTES", 1)
    one_by_one = step(policy(model))
    assert one_by_one["loss"] == pytest.approx(together["loss"], rel=1e-6)
    for name, gradient in together["gradients"].items():
        assert_close(one_by_one["gradients"][name], gradient, rtol=1e-4, atol=1e-6)


def test_a_call_without_segments_is_refused() -> None:
    layer: Any = SimpleNamespace(activation="silu")
    decoder = SimpleNamespace(layers=[SimpleNamespace(linear_attn=layer)])
    kind: Any = FAMILIES["qwen3_5"].recurrence
    use_packed_recurrence(kind, decoder)
    with pytest.raises(ValueError, match="sequences would see each other"):
        layer.forward(torch.zeros(1, 2, 4))
    layer.activation = "gelu"
    with pytest.raises(ModelError, match=r"has the activation gelu after its convolution\. Allowed is silu"):
        use_packed_recurrence(kind, decoder)


def step(policy: TorchPolicy, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Loss and gradients of a step that is not taken, over pictures and texts in groups."""
    every = [*toy.samples(6, group=2), *toy.samples(2, group=2, seed=5, text_only=True)]
    plan = toy.plan(every, num_ranks=world, token_budget=150)[rank]
    mine = [[every[i] for i in micro] for micro in plan]
    gradients = toy.keep_gradients(policy, then_step=False)
    result = policy.update(mine, StepTotals(sum(s.num_trained for s in every), len(every)), 1e-3, 0.0)
    return {"loss": float(result.sums.totals["policy_loss"]), "norm": result.grad_norm, "gradients": dict(gradients)}


def policy(model: Path, mesh: Any = None, *, degree: int = 1, **settings: Any) -> TorchPolicy:
    base = toy.config()
    own = type(base.model).model_validate({**base.model.model_dump(), **settings})
    training = base.training.model_copy(update={"sequence_parallel": degree})
    return toy.policy(model, base.model_copy(update={"model": own, "training": training}), mesh)


def _rank(rank: int, world: int, model: str, out: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for degree in (1, 2):  # ranks that share a row
        settings = {"freeze_vision_tower": degree == 1, "gradient_checkpointing": "selective"}
        found.append(step(policy(Path(model), mesh, degree=degree, **settings), rank // degree, world // degree))
    if rank == 0:
        torch.save(found, out)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_two_ranks_take_the_step_of_one(family: str, tmp_path: Path) -> None:
    """With whole rows and a frozen tower, and with halves of each row; activations are computed again."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_key_value_heads": 2}
    model = make_model(tmp_path / "model", family, **heads)
    on_ranks(2, _rank, str(model), str(tmp_path / "two.pt"))
    one = step(policy(model))
    for two in torch.load(tmp_path / "two.pt", weights_only=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-7)
        decoder = [name for name in two["gradients"] if "language_model" in name]
        assert any("linear_attn.A_log" in name for name in decoder)
        a, b = (torch.cat([found["gradients"][name].flatten() for name in decoder]) for found in (one, two))
        # not as they are: the gradient of a tower counts in the norm that all are clipped by
        assert float((a / a.norm() - b / b.norm()).norm()) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 64])
def test_the_inverse_of_a_triangular_matrix(size: int) -> None:
    torch.manual_seed(size)
    below = (0.5 * torch.randn(3, 2, size, size, dtype=torch.float64)).requires_grad_()  # on and above: not read
    whole = below.tril(-1) + torch.eye(size, dtype=torch.float64)
    expected = torch.linalg.solve_triangular(whole, torch.eye(size, dtype=torch.float64).expand_as(whole), upper=False)
    found = unit_lower_inverse(below)
    assert_close(found, expected)
    grad = torch.randn_like(found)
    assert_close(torch.autograd.grad(found, below, grad), torch.autograd.grad(expected, below, grad))


def test_the_inverse_is_exact_where_a_token_comes_again_and_again() -> None:
    """All keys equal and all written: ones below the diagonal. The inverse has -1 next to the diagonal and no other."""
    found = unit_lower_inverse(torch.ones(CHUNK, CHUNK))
    assert torch.equal(found, torch.eye(CHUNK) - torch.diag(torch.ones(CHUNK - 1), -1))


def test_transformers_computes_states_without_the_kernels_of_a_gpu(tmp_path: Path) -> None:
    """Where flash-linear-attention is installed, transformers would call it on a CPU, too."""
    package = tmp_path / "fla" / "ops"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "gated_delta_rule.py").write_text(
        "def chunk_gated_delta_rule(*_, **__):\n    raise SystemExit('the kernels ran')\n"
        "fused_recurrent_gated_delta_rule = chunk_gated_delta_rule\n"
    )
    make_model(tmp_path / "model", "qwen3_5_text")
    code = (
        "import sys, torch; from pathlib import Path; from rlcore.models.loading import load_hf_model\n"
        "{first}\n"
        "load_hf_model(Path(sys.argv[1]), torch.float32)(torch.arange(4)[None])"
    )
    plain = "from transformers import AutoModelForCausalLM as A; load_hf_model = lambda *a: A.from_pretrained(a[0])"
    ended = [
        subprocess.run(
            [sys.executable, "-c", code.format(first=first), str(tmp_path / "model")],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
            capture_output=True,
            text=True,
        )
        for first in ("", plain)
    ]
    assert ended[0].returncode == 0, ended[0].stderr
    assert "the kernels ran" in ended[1].stderr
