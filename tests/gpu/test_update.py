"""The kernels and compiled parts of an update on CUDA against plain arithmetic: ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlcore.algorithms.logprobs import fused, linear_logprobs, logprobs_and_entropy
from rlcore.algorithms.loss import StepTotals
from rlcore.config import build_experiment
from rlcore.models.attention import Scores, shared_prompt_attention
from rlcore.models.flash import MODULES, FlashAttention2, FlashKernel, Sequences, TorchKernel
from rlcore.models.optimizer import _kahan_adamw_
from rlcore.models.torch_policy import TorchPolicy
from rlcore.types import TrainingSample
from tests.numerics.attention import LAYOUTS, SCALE, dense, segments
from tests.numerics.toy import emptied, in_one_vector, keep_gradients

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def apart(found: Tensor, expected: Tensor) -> float:
    expected = expected.detach().double().cpu()
    return float((found.detach().double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("layout", [*LAYOUTS, "long"])
def test_attention_over_shared_prompts(layout: str) -> None:
    groups = LAYOUTS.get(layout, [(700, [3, 400, 129]), (33, [512, 64])])
    where = segments(groups)
    on_device = type(where)(*(getattr(where, n).to(CUDA) for n in where.__slots__[:3]), where.sizes)
    total = int(where.bounds[-1])
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(total, heads, 64, generator=generator).bfloat16() for heads in (12, 2, 2, 12)
    )
    exact = [x.double().requires_grad_() for x in (query, key, value)]
    expected = dense(*exact, groups)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    leaves = [x.to(CUDA).requires_grad_() for x in (query, key, value)]
    out = shared_prompt_attention(*leaves, on_device, Scores(SCALE))
    assert apart(out, expected) < 5e-3
    for found, want in zip(torch.autograd.grad(out, leaves, grad.to(CUDA)), wanted, strict=True):
        assert apart(found, want) < 1e-2


@pytest.mark.parametrize(("version", "module"), [(v, name) for v, (name, _) in MODULES.items()])
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_another_flash_attention_equals_torchs_own(version: str, module: str, head_size: int) -> None:
    library = import_module(module)
    where = segments([(700, [3, 400, 129]), (33, [512, 64])])
    ends = Sequences(where.bounds.to(CUDA), where.key_bounds.to(CUDA), *where.sizes[1:].tolist())
    generator = torch.Generator().manual_seed(0)
    rows = {12: int(where.bounds[-1]), 2: len(where.key_rows)}
    query, key, value, grad = (
        torch.randn(rows[heads], heads, head_size, generator=generator).bfloat16().to(CUDA) for heads in (12, 2, 2, 12)
    )

    def values(kernel: FlashKernel) -> tuple[Tensor, ...]:
        out, lse = kernel.forward((query, key, value), ends, SCALE)
        return out, lse, *kernel.backward(grad, (query, key, value), out, lse, ends, SCALE)

    expected = values(TorchKernel())
    if version == "FA2":
        found = values(FlashAttention2(library))
    else:
        torch.nn.attention.activate_flash_attention_impl(version)
        found = values(TorchKernel())
        torch.nn.attention.restore_flash_attention_impl()
    for one, other in zip(found, expected, strict=True):
        assert apart(one, other) < 1e-2


def test_the_compiled_head() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(700, 256, generator=generator).bfloat16()
    weight = (torch.randn(30_000, 256, generator=generator) / 4).bfloat16()
    targets = torch.randint(0, 29_000, (700,), generator=generator)
    upstream = torch.randn(700, generator=generator)
    banned = torch.tensor([29_998, 29_999])
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    logits = (exact[0] @ exact[1].T / 0.9).index_fill(-1, banned, float("-inf"))
    values, entropy = logprobs_and_entropy(logits, targets)
    wanted = torch.autograd.grad((values * upstream).sum(), exact)
    leaves = [x.to(CUDA).requires_grad_() for x in (hidden, weight)]
    for rows in (256, None):
        found = linear_logprobs(*leaves, targets.to(CUDA), temperature=0.9, banned=banned.to(CUDA), chunk_size=rows)
        assert float((found[0].double().cpu() - values).abs().max()) < 1e-4
        assert float((found[1].double().cpu() - entropy).abs().max()) < 1e-4
        gradients = torch.autograd.grad((found[0] * upstream.to(CUDA)).sum(), leaves)
        for got, want in zip(gradients, wanted, strict=True):
            assert apart(got, want) < 1e-2


def gradient(device: str, shared: bool, **choices: Any) -> tuple[Tensor, Tensor]:
    """Log-probs before and gradient of one step on two groups of ragged completions."""
    torch.manual_seed(0)
    text = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 1000}
    hf = Qwen2ForCausalLM(Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **text))
    config = build_experiment(
        {
            "name": "update",
            "model": {
                "gradient_checkpointing": choices.pop("checkpointing", "none"),
                "compute_dtype": choices.pop("compute_dtype", "auto"),
            },
            "algorithm": {"kl": {"coefficient": 0.0}},
            "training": choices,
        }
    )
    mesh = init_device_mesh(device, (1,))
    policy = TorchPolicy(hf, config, weights=emptied(hf), mesh=mesh, banned_token_ids=[999], features=None)
    random = np.random.default_rng(0)
    samples = []
    for group in range(2):
        prompt = random.integers(0, 999, 40 + 30 * group)
        for _ in range(4):
            count = int(random.integers(5, 90))
            mask = np.arange(len(prompt) + count) >= len(prompt)
            samples.append(
                TrainingSample(
                    token_ids=np.concatenate([prompt, random.integers(0, 999, count)]).astype(np.int32),
                    loss_mask=mask,
                    sampler_logprobs=np.where(mask, -7.0, 0.0).astype(np.float32),
                    images=(),
                    policy_version=0,
                    advantages=np.where(mask, random.normal(), 0.0).astype(np.float32),
                )
            )
    plan = [samples] if shared else [[s] for s in samples]
    gradients = keep_gradients(policy, then_step=False)
    scored = [s for part in policy.logprobs(plan) for s in part]
    totals = StepTotals(sum(s.num_trained for s in samples), len(samples))
    result = policy.update(plan, totals, 0.0, 0.0)
    assert float(result.sums.maxima["loss/ratio_max"]) == 1.0
    gradient = in_one_vector(policy, gradients) * max(1.0, result.grad_norm)
    return torch.from_numpy(np.concatenate([s.logprobs for s in scored])), gradient


def test_every_path_has_the_gradient_of_the_plain_one() -> None:
    """float32 on the CPU, one sequence at a time, against bfloat16 on CUDA."""
    logprobs, expected = gradient("cpu", shared=False, reshard_after_forward="on")
    plain = gradient("cuda", shared=False, compile_blocks="off", reshard_after_forward="on")
    noise = apart(plain[1], expected)
    assert noise < 0.03
    for choices in (
        {"compile_blocks": "off"},
        {"compile_blocks": "on"},
        {"compile_blocks": "on", "checkpointing": "selective"},
        {"compile_blocks": "on", "checkpointing": "full"},
        {"compile_blocks": "off", "checkpointing": "selective"},
    ):
        found = gradient("cuda", shared=True, **choices)
        assert float((found[0] - logprobs).abs().mean()) < 0.01, choices
        assert apart(found[1], expected) < 1.3 * noise + 1e-3, choices


def test_float32_has_the_gradient_of_the_cpu() -> None:
    logprobs, expected = gradient("cpu", shared=False, reshard_after_forward="on")
    for shared in (False, True):
        found = gradient("cuda", shared=shared, compute_dtype="float32")
        assert float((found[0] - logprobs).abs().max()) < 1e-4
        assert apart(found[1], expected) < 1e-4


def test_the_bfloat16_optimizer_in_one_kernel() -> None:
    torch.manual_seed(0)
    size = 100_003
    start = [torch.randn(size).bfloat16(), *(torch.zeros(size, dtype=torch.bfloat16) for _ in range(3))]
    plain, other = [tensor.clone() for tensor in start], [tensor.to(CUDA) for tensor in start]
    for step in range(1, 4):
        gradient, noise = torch.randn(size).bfloat16(), torch.randint(1 << 16, (2, size), dtype=torch.int32)
        numbers = [torch.tensor(number) for number in (1 - 1e-4, -1e-3 / (1 - 0.9**step), 1 - 0.999**step)]
        _kahan_adamw_(plain[0], gradient, *plain[1:], *noise, *numbers, 0.9, 0.999, 1e-8)
        arguments = (other[0], gradient.to(CUDA), *other[1:], *noise.to(CUDA))
        fused(_kahan_adamw_, "cuda")(*arguments, *numbers, 0.9, 0.999, 1e-8)
    for found, expected in zip(other[:3], plain[:3], strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=2**-7, atol=0)
    weights = [held[0].double().cpu() + held[3].double().cpu() for held in (other, plain)]
    torch.testing.assert_close(*weights, rtol=2**-15, atol=1e-7)  # a compiler may leave the remainders out
    assert float((other[3] != 0).double().mean()) > 0.9
