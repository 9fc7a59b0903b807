"""One rank against two: the same gradient, the same weights after a step, the same numbers logged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlcore.algorithms.loss import Aggregation, StepTotals
from rlcore.config import ExperimentConfig
from rlcore.distributed.group import with_high_entropy
from rlcore.training.metrics import update_metrics
from rlcore.types import ScoredTokens, TrainingSample
from tests.numerics import toy
from tests.ranks import on_ranks

KL_COEFFICIENT = 0.05
LOSSES = ("ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "vespo")
CORRECTION = {"name": "mask", "level": "sequence", "min_weight": 0.5, "max_weight": 2.0}
CHOICES = {
    f"{loss} {mode}": {"loss": {"name": loss}, "aggregation": mode} for loss in LOSSES for mode in get_args(Aggregation)
}
CHOICES |= {
    "gspo corrected": {"loss": {"name": "gspo"}, "correction": CORRECTION},
    "vespo corrected": {"loss": {"name": "vespo"}, "correction": CORRECTION},
    "cispo by sequence": {"loss": {"name": "cispo", "level": "sequence"}},
    "sapo by sequence": {"loss": {"name": "sapo", "level": "sequence"}},
    "k3 weighted": {"kl": {"coefficient": KL_COEFFICIENT, "estimator": "k3_weighted"}},
    "masked": {"entropy_mask": {"share": 0.3}, "off_policy_mask": {"threshold": 0.01}},
}
LAST = "ppo_clip sequence_mean_token_mean"  # whose step is taken, with a learning rate above 0


def _rank(rank: int, world: int, model: str, out: str) -> None:
    policy = toy.policy(Path(model), _settings(LAST), init_device_mesh("cpu", (world,)))
    samples = toy.samples(12, group=4)
    samples += toy.samples(1, group=1, seed=5, text_only=True)  # one rank may meet a microbatch without a picture
    plan = toy.plan(samples, num_ranks=world, token_budget=400)
    mine = [[samples[i] for i in micro] for micro in plan[rank]]
    reference = policy.logprobs(mine, reference=True)
    mine = [[_beside(s, r) for s, r in zip(m, rs, strict=True)] for m, rs in zip(mine, reference, strict=True)]
    totals = StepTotals(sum(s.num_trained for s in samples), len(samples))
    gradients = toy.keep_gradients(policy, then_step=True)
    found, metrics = {}, {}
    for choice in [*CHOICES, LAST]:  # a learning rate of 0 leaves the weights as they are for the next one
        policy.config = config = _settings(choice)
        if config.algorithm.entropy_mask is not None:
            mine = _with_masks(policy.logprobs(mine), mine, config.algorithm.entropy_mask.share)
        rate = 1e-3 if choice in found else 0.0
        if rate:
            policy.optimizer.state.clear()
        result = policy.update(mine, totals, rate, KL_COEFFICIENT)
        found[choice] = torch.cat([gradients[name].flatten() for name in sorted(gradients)])
        metrics[choice] = update_metrics(result, KL_COEFFICIENT, alarm_above=0.01)
    weights = torch.cat([value.flatten() for _, value in policy.full_weights()])
    if rank == 0:
        torch.save({"gradients": found, "weights": weights}, out)
        Path(out + ".json").write_text(json.dumps(metrics))


def _settings(choice: str) -> ExperimentConfig:
    return toy.config(**{"kl": {"coefficient": KL_COEFFICIENT}, **CHOICES[choice]})


def _with_masks(
    scored: list[list[ScoredTokens]], mine: list[list[TrainingSample]], share: float
) -> list[list[TrainingSample]]:
    """The mask over the samples of all ranks, as the worker group makes it."""
    own = [
        replace(s, entropies=r.entropies)
        for m, rs in zip(mine, scored, strict=True)
        for s, r in zip(m, rs, strict=True)
    ]
    ranks: list[list[TrainingSample]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, own)
    every = iter(with_high_entropy([sample for rank in ranks for sample in rank], share))
    masked = [[next(every) for _ in rank] for rank in ranks]
    rest = iter(masked[dist.get_rank()])
    return [[next(rest) for _ in micro] for micro in mine]


def _beside(sample: TrainingSample, scored: ScoredTokens) -> TrainingSample:
    """Old, reference and sampler log-probs a little off the policy's own."""
    mask, own = sample.loss_mask.astype("float32"), scored.logprobs
    return replace(
        sample, ref_logprobs=own - 0.3 * mask, old_logprobs=own + 0.01 * mask, sampler_logprobs=own - 0.02 * mask
    )


def _run(world: int, model: Path, folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    out = str(folder / f"world-{world}.pt")
    on_ranks(world, _rank, str(model), out)
    return torch.load(out, weights_only=True), json.loads(Path(out + ".json").read_text())


def test_two_ranks_take_the_step_of_one(each_model: Path, tmp_path: Path) -> None:
    """For every loss and aggregation."""
    one, metrics_one = _run(1, each_model, tmp_path)
    two, metrics_two = _run(2, each_model, tmp_path)
    assert one["gradients"].keys() == two["gradients"].keys() == CHOICES.keys()
    for choice, a in one["gradients"].items():
        b = two["gradients"][choice]
        assert a.norm() > 0, choice
        assert float((a - b).norm() / a.norm()) < 2e-6, choice
        for name, value in metrics_one[choice].items():
            assert metrics_two[choice][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (choice, name)
    # AdamW's first step divides by |g|: where a gradient is float noise around 0 its sign decides, so most, not all
    same = (one["weights"] - two["weights"]).abs() < 1e-5
    assert same.float().mean() > 0.999
