"""One rank against two: the same gradient, the same weights after a step, the same numbers logged."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from rlcore.algorithms.aggregation import StepTotals
from rlcore.batch import plan_microbatches
from rlcore.training.metrics import update_metrics
from tests.numerics import toy


def _rank(rank: int, world: int, port: int, model: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    settings = toy.config(kl={"coefficient": 0.05}, aggregation="sequence_mean_token_mean")
    policy = toy.policy(Path(model), settings, init_device_mesh("cpu", (world,)))
    samples = toy.samples(12, group=4)
    samples += toy.samples(1, group=1, seed=5, text_only=True)  # one rank may meet a microbatch without a picture
    plan = plan_microbatches(
        [s.num_tokens for s in samples],
        num_ranks=world,
        token_budget=400,
        keys=[s.images or i for i, s in enumerate(samples)],
    )
    mine = [[samples[i] for i in micro] for micro in plan[rank]]
    reference = policy.logprobs(mine, reference=True)
    mine = [
        [replace(s, ref_logprobs=r - 0.3 * s.loss_mask.astype("float32")) for s, r in zip(m, rs, strict=True)]
        for m, rs in zip(mine, reference, strict=True)
    ]
    gradients: dict[str, torch.Tensor] = {}
    step = policy.optimizer.step

    def keep_then_step() -> None:
        gradients.update({n: p.grad.full_tensor() for n, p in policy.model.hf.named_parameters()})
        step()

    policy.optimizer.step = keep_then_step  # type: ignore[method-assign]
    result = policy.update(mine, StepTotals(sum(s.num_trained for s in samples), len(samples)), 1e-3)
    weights = {name: value.clone() for name, value in policy.full_weights()}
    if rank == 0:
        metrics = update_metrics(result, settings.algorithm)
        torch.save({"gradients": gradients, "weights": weights}, out)
        Path(out + ".json").write_text(json.dumps(metrics))
    dist.barrier()
    os._exit(0)  # gloo's thread can abort an interpreter that is shutting down


def _run(world: int, model: Path, folder: Path) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = str(folder / f"world-{world}.pt")
    mp.spawn(_rank, (world, port, str(model), out), nprocs=world)
    return torch.load(out, weights_only=True), json.loads(Path(out + ".json").read_text())


@pytest.mark.slow
def test_two_ranks_take_the_step_of_one(tiny_model: Path, tmp_path: Path) -> None:
    one, metrics_one = _run(1, tiny_model, tmp_path)
    two, metrics_two = _run(2, tiny_model, tmp_path)

    def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensors[name].flatten() for name in sorted(tensors)])

    a, b = flat(one["gradients"]), flat(two["gradients"])
    assert a.norm() > 0
    assert float((a - b).norm() / a.norm()) < 1e-6
    for name, value in metrics_one.items():
        assert metrics_two[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert one["weights"].keys() == two["weights"].keys()
    # AdamW's first step divides by |g|: where a gradient is float noise around 0 its sign decides, so most, not all
    same = (flat(one["weights"]) - flat(two["weights"])).abs() < 1e-5
    assert same.float().mean() > 0.999
