"""What one optimizer step makes of a gradient: AdamW's numbers by hand, clipping, and gradients that are not finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlcore.algorithms.loss import StepTotals
from rlcore.algorithms.objective import UpdateResult
from rlcore.config import ExperimentConfig, TrainingConfig
from rlcore.models.optimizer import make_optimizer
from rlcore.models.torch_policy import TorchPolicy
from rlcore.types import TrainingSample
from tests.numerics import toy


@pytest.mark.parametrize(("name", "tolerance"), [("adamw", 1e-6), ("adamw_bf16", 1e-3)])
def test_two_steps_by_hand(name: str, tolerance: float) -> None:
    """Weight 1, gradients 1 and 2, rate 0.1, decay 0.1, betas 0.5 and 0.75.

    Step 1: m = 0.5, v = 0.25, both corrected to 1: 1 * (1 - 0.01) - 0.1 = 0.89.
    Step 2: m = 1.25, over 1 - 0.25 is 5/3; v = 1.1875, over 1 - 0.5625 is 19/7: 0.89 * 0.99 - 0.1 * (5/3) / sqrt(19/7)
    = 0.779837. With the betas swapped this would be 0.790374, without decay 0.798837.
    """
    config = TrainingConfig(
        optimizer=name,
        learning_rate=0.1,
        beta1=0.5,
        beta2=0.75,
        weight_decay=0.1,  # type: ignore[arg-type]
    )
    parameter = nn.Parameter(torch.ones(1, dtype=torch.float32 if name == "adamw" else torch.bfloat16))
    optimizer = make_optimizer([parameter], config)
    seen = []
    for gradient in (1.0, 2.0):
        parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        rest = optimizer.state[parameter].get("compensation", torch.zeros(1))
        seen.append(float(parameter.detach().double() + rest.double()))
    assert seen == pytest.approx([0.89, 0.89 * 0.99 - 0.1 * (5 / 3) / (19 / 7) ** 0.5], abs=tolerance)


def clipped_to(norm: float) -> ExperimentConfig:
    settings = toy.config(kl={"coefficient": 0.0})
    return settings.model_copy(update={"training": settings.training.model_copy(update={"max_grad_norm": norm})})


def one_update(policy: TorchPolicy, samples: list[TrainingSample], rate: float = 1e-3) -> UpdateResult:
    return policy.update([samples], StepTotals(sum(s.num_trained for s in samples), len(samples)), rate, 0.0)


def test_only_a_gradient_above_the_norm_is_clipped(tiny_model: Path) -> None:
    samples = toy.samples(4)

    def handed_over(max_norm: float) -> tuple[Tensor, float]:
        """What the optimizer gets, and the norm that is reported."""
        policy = toy.policy(tiny_model, clipped_to(max_norm))
        kept = toy.keep_gradients(policy, then_step=False)
        reported = one_update(policy, samples).grad_norm
        return toy.in_one_vector(policy, kept), reported

    whole, norm = handed_over(1e6)
    assert float(whole.double().norm()) == pytest.approx(norm, rel=1e-5)
    for limit in (norm / 3, norm / 100):
        clipped, reported = handed_over(limit)
        assert reported == pytest.approx(norm, rel=1e-6)  # of before the clipping
        assert float(clipped.double().norm()) == pytest.approx(limit, rel=1e-4)
        torch.testing.assert_close(clipped, whole * (limit / norm), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(handed_over(norm * 1.01)[0], whole, rtol=0, atol=0)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_reported_and_not_applied(tiny_model: Path, broken: float) -> None:
    """Weights and moments stay to the last bit, and the next step is that of a policy which never saw it."""
    good = toy.samples(4)
    bad = [replace(s, advantages=np.where(s.loss_mask, np.float32(broken), np.float32(0))) for s in good[:1]]
    policies = [toy.policy(tiny_model, clipped_to(1.0)) for _ in range(2)]
    for policy in policies:
        one_update(policy, good)
    before = {name: value.clone() for name, value in policies[0].full_weights()}

    result = one_update(policies[0], [*bad, *good[1:]])
    assert result.skipped
    assert not np.isfinite(result.grad_norm)
    assert all(torch.equal(value, before[name]) for name, value in policies[0].full_weights())

    assert not any(one_update(policy, good).skipped for policy in policies)
    weights = [dict(policy.full_weights()) for policy in policies]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    assert any(not torch.equal(value, before[name]) for name, value in weights[0].items())
