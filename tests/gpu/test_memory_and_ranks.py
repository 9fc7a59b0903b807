"""On CUDA: a row computed by two GPUs, and memory that is free while the policy rests: ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlcore.algorithms.loss import StepTotals
from rlcore.config import build_experiment
from rlcore.models.checkpoint import _host_memory
from rlcore.models.torch_policy import TorchPolicy
from rlcore.types import TrainingSample
from tests.bench.update import Shape, make_samples
from tests.numerics.toy import emptied, in_one_vector, keep_gradients

pytestmark = pytest.mark.gpu

SHAPE = Shape(prompt=60, cap=40, side=0)


def make_policy(world: int, *, offload: bool = False, compiled: bool = False) -> TorchPolicy:
    torch.manual_seed(0)
    small = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = Qwen2Config(num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True, **small)
    settings = build_experiment(
        {
            "name": "small",
            "model": {"compute_dtype": "bfloat16", "gradient_checkpointing": "none"},
            "data": {"max_prompt_tokens": 60},
            "rollout": {"group_size": 8, "max_completion_tokens": 40},
            "algorithm": {"aggregation": "token_mean", "kl": {"coefficient": 0.0}},
            "training": {
                "tokens_per_microbatch": 4096,
                "offload": offload,
                "sequence_parallel": world,
                "compile_blocks": "on" if compiled else "off",
            },
            "resources": {"workers": world},
        }
    )
    mesh = init_device_mesh("cuda", (world,))
    hf = Qwen2ForCausalLM(config).float()
    return TorchPolicy(hf, settings, weights=emptied(hf), mesh=mesh, banned_token_ids=[0], features=None)


def test_memory_of_a_save_is_page_locked_and_holds_what_is_copied() -> None:
    values = torch.randn(1024, 1025, device="cuda")
    for like in (values, values.bfloat16(), values[:1]):
        host = _host_memory(like)
        assert host.is_pinned()
        assert torch.equal(host.copy_(like), like.cpu())


def test_memory_that_takes_the_place_of_a_save_can_be_copied() -> None:
    """CUDA must not take it for page-locked."""
    like, taken = torch.randn(1024, 4096, device="cuda"), []
    for pages_more in (0, 0, 1, 1, 1024, 1024):
        address = _host_memory(like).data_ptr()  # and free it
        value = torch.frombuffer(mmap.mmap(-1, like.nbytes + pages_more * mmap.PAGESIZE), dtype=like.dtype).normal_()
        taken.append(value.data_ptr() <= address < value.data_ptr() + value.nbytes)
        assert torch.equal(value.cuda().cpu(), value)
    assert any(taken)


def step(policy: TorchPolicy, samples: list[TrainingSample]) -> tuple[Tensor, float]:
    """Gradient, unclipped, and loss."""
    take = policy.optimizer.step
    gradients = keep_gradients(policy, then_step=True)
    totals = StepTotals(sum(s.num_trained for s in samples), len(samples))
    result = policy.update([samples[:16], samples[16:]], totals, 1e-3, 0.0)
    policy.optimizer.step = take  # type: ignore[method-assign]
    return in_one_vector(policy, gradients) * max(1.0, result.grad_norm), float(result.sums.totals["policy_loss"])


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
def test_a_resting_policy_holds_no_memory_and_comes_back_bit_for_bit() -> None:
    samples = make_samples(SHAPE, 3, "ragged", shared=True)
    policy = make_policy(1, offload=True)
    for _ in range(2):  # kernels that add in any order make two runs differ; a rest must not
        step(policy, samples)
        before = {name: weight.cpu() for name, weight in policy.full_weights()}
        policy.offload()
        torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each thread that multiplied: not the policy's
        assert torch.cuda.memory_allocated() < 64 << 20, torch.cuda.memory_summary(abbreviated=True)
        assert all(torch.equal(before[name], weight.cpu()) for name, weight in policy.full_weights())
    states = [value for state in policy.optimizer.state.values() for value in state.values() if value.is_cuda]
    assert sum(value.to_local().untyped_storage().nbytes() for value in states if value.dim()) < 64 << 20


def _rank(rank: int, world: int, meeting: str, compiled: bool, out: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=meeting, rank=rank, world_size=world)
    gradient, loss = step(make_policy(world, compiled=compiled), make_samples(SHAPE, 3, "ragged", True))
    if rank == 0:
        torch.save({"gradient": gradient, "loss": loss}, out)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", [False, True])
def test_two_gpus_take_the_step_of_one(tmp_path: Path, compiled: bool) -> None:
    """In bfloat16, in which the kernels compute."""
    found = []
    for world in (1, 2):
        out = tmp_path / f"{world}.pt"
        mp.spawn(_rank, (world, f"file://{tmp_path}/ranks-{world}", compiled, str(out)), nprocs=world)
        found.append(torch.load(out, weights_only=True))
    one, two = found
    assert float((one["gradient"] - two["gradient"]).norm() / one["gradient"].norm()) < 3e-2
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-5)
