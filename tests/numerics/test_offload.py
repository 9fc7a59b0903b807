"""Weights and optimizer state that rest on the host between phases: the same bits, and no memory while they rest."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlcore.algorithms.loss import StepTotals
from rlcore.config import ExperimentConfig
from rlcore.models.offload import HostOffload, OffloadedOptimizer, in_parts
from rlcore.models.torch_policy import TorchPolicy
from tests.numerics import toy
from tests.ranks import on_ranks

KL = 0.1


def test_offloaded_memory_returns_to_the_same_tensors():
    base = torch.arange(1000.0)
    view, other, small = base[100:].view(30, 30), torch.ones(700, dtype=torch.bfloat16), torch.ones(3)
    rest = HostOffload(lambda: [base, view, other, small])
    address = id(view)
    for _ in range(2):
        rest.offload()
        rest.offload()
        assert (
            base.untyped_storage().nbytes() == view.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        )
        assert small.sum() == 3
        rest.onload()
        rest.onload()
        assert id(view) == address
        assert base.equal(torch.arange(1000.0))
        assert view[0, 0] == 100
        assert other.equal(torch.ones(700, dtype=torch.bfloat16))
        base[0] = 0.0  # and it is the memory that is in use


def test_parts_hold_all_parameters_in_order_and_none_more_than_the_largest():
    sizes = [3, 9, 2, 2, 5, 1, 4]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    assert [[len(p) for p in part] for part in in_parts(parameters)] == [[3], [9], [2, 2, 5], [1, 4]]
    assert list(in_parts([])) == []


def test_only_the_state_of_one_part_is_on_the_device_while_it_steps():
    """And a parameter without a gradient is left as it is."""
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (4000, 2500, 1500, 4000, 1300)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.0)
    seen = []

    def watch(*_: object) -> None:
        stepped = [len(p) for p in parameters if p.grad is not None]
        seen.append((stepped, held(v for state in optimizer.state.values() for v in state.values())))

    optimizer.register_step_post_hook(watch)
    offloaded = OffloadedOptimizer(optimizer)
    for _ in range(2):
        for parameter in parameters[:-1]:
            parameter.grad = torch.ones_like(parameter)
        offloaded.step()
        assert held(v for state in optimizer.state.values() for v in state.values()) == 0
        assert all(parameter.grad is None for parameter in parameters)
    both = 2 * 4  # bytes of two moments
    parts = [([4000], 4000 * both), ([2500, 1500], 4000 * both), ([4000], 4000 * both), ([], 0)]
    assert [(sizes, bytes_) for sizes, bytes_ in seen] == [*parts, *parts]
    assert [round(float(p[0].detach()), 4) for p in parameters] == [0.8, 0.8, 0.8, 0.8, 1.0]


def settings(offload: bool, optimizer: str) -> ExperimentConfig:
    base = toy.config(kl={"coefficient": KL})
    training = base.training.model_copy(update={"offload": offload, "optimizer": optimizer})
    return base.model_copy(update={"training": training})


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes behind this rank's shards."""
    own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own if t.nbytes > 4096}.values())


def train(policy: TorchPolicy, folder: Path, rank: int, world: int) -> list[Tensor]:
    """Two steps as the loop takes them, a save, a load, one step more."""
    samples = toy.samples(8)
    plan = toy.plan(samples, num_ranks=world, token_budget=400)[rank]
    mine = [[samples[i] for i in micro] for micro in plan]
    totals = StepTotals(sum(s.num_trained for s in samples), len(samples))
    seen = []
    for step in range(3):
        scored = [*policy.logprobs(mine), *policy.logprobs(mine, reference=True)]
        seen += [torch.from_numpy(one.logprobs) for micro in scored for one in micro]
        result = policy.update(mine, totals, 1e-3, KL)
        seen.append(torch.tensor([result.grad_norm, float(result.sums.totals["policy_loss"])]))
        seen += [weight.clone() for _, weight in policy.full_weights()]
        policy.offload()
        if policy.config.training.offload:
            state = [v for s in policy.optimizer.state.values() for v in s.values()]
            assert len(state) > 0
            assert held([*policy.model.parameters(), *policy.reference.parameters(), *state]) == 0
        if step == 1:
            toy.save(policy, folder)
            policy.load(folder)
    return seen


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16"])
def test_a_run_with_offload_is_the_run_without_it_to_the_last_bit(tiny_model: Path, tmp_path: Path, optimizer: str):
    plain, offloaded = (
        train(toy.policy(tiny_model, settings(on, optimizer)), tmp_path / str(on), 0, 1) for on in (False, True)
    )
    assert len(plain) == len(offloaded) > 50
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


def _rank(rank: int, world: int, model: str, folder: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    plain, offloaded = (
        train(toy.policy(Path(model), settings(on, "adamw"), mesh), Path(folder) / str(on), rank, world)
        for on in (False, True)
    )
    same = len(plain) == len(offloaded) and all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
    np.save(f"{folder}/same-{rank}.npy", np.array([same, len(plain)]))


def test_offload_of_uneven_shards_changes_no_bit(tiny_model: Path, tmp_path: Path) -> None:
    """3 ranks, which the widths (128, 384) do not all split evenly over."""
    on_ranks(3, _rank, str(tiny_model), str(tmp_path))
    for rank in range(3):
        same, count = np.load(tmp_path / f"same-{rank}.npy")
        assert same
        assert count > 50
