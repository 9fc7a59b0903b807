"""Nothing that a resume would miss: no step draws from python's, numpy's or torch's own generators.

What is drawn at random is a function of the run's seed and the step (completions, the order of problems) or of the
step alone (rounding in bfloat16), so a checkpoint holds no generator.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from rlcore.algorithms.loss import StepTotals
from rlcore.config import build_experiment
from rlcore.models.torch_policy import TorchPolicy
from tests.numerics import toy
from tests.ranks import on_ranks


def _generators() -> dict[str, object]:
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), rest),
        "torch": torch.get_rng_state().tolist(),
    }


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _step(policy: TorchPolicy) -> torch.Tensor:
    samples = toy.samples(8)
    policy.logprobs([samples])
    policy.raw_logprobs(samples)
    policy.update([samples], StepTotals(sum(s.num_trained for s in samples), len(samples)), 1e-3, 0.0)
    return torch.cat([value.flatten().float() for _, value in policy.full_weights()])


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16"])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_step_neither_reads_nor_moves_a_global_generator(tiny_model: Path, optimizer: str, lora: object) -> None:
    """In a process of its own: threads that other tests have left, such as Prefect's, draw from Python's generator."""
    on_ranks(1, _take_steps, tiny_model, optimizer, lora)


def _take_steps(rank: int, world: int, model: Path, optimizer: str, lora: object) -> None:
    values = toy.config().model_dump(mode="json")
    values["training"]["optimizer"] = optimizer
    values["model"]["lora"] = lora
    weights = []
    for seed in (1, 2):
        policy = toy.policy(model, build_experiment(values))
        _seed(seed)
        before = _generators()
        weights.append(torch.stack([_step(policy), _step(policy)]))
        assert _generators() == before
    assert torch.equal(*weights)


def test_a_model_s_dropout_is_off(tiny_model: Path) -> None:
    from transformers import AutoModelForImageTextToText

    hf = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
    hf.model.language_model.norm = nn.Sequential(hf.model.language_model.norm, nn.Dropout(0.5))
    policy = TorchPolicy(
        hf,
        toy.config(),
        weights=toy.emptied(hf),
        mesh=toy.one_rank_mesh(),
        banned_token_ids=[],
        features=toy.features,
    )
    assert [m.p for m in policy.model.modules() if isinstance(m, nn.Dropout)] == [0.0]
    assert policy.model.training
