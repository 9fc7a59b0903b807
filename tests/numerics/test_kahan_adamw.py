"""AdamW in bfloat16 alone: one step by hand, many small ones against float32, and the bytes that it takes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rlcore.config import TrainingConfig
from rlcore.models.optimizer import KahanAdamW, _kahan_adamw_, _nearest, kahan_adamw_, make_optimizer, rounded_by


def train(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradients: Tensor) -> None:
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype).clone()
        optimizer.step()


def value(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Tensor:
    """The weight that the pair of numbers stands for."""
    return parameter.detach().double() + optimizer.state[parameter]["compensation"].double()


def test_one_step_by_hand() -> None:
    """Weight 1, gradient 1, rate 1e-4: m = 0.1, v = 0.001, both corrected to 1, so the weight becomes 0.9999.

    Below 1 bfloat16 goes in steps of 2^-8 = 0.0039, so the parameter stays 1 and the compensation holds -1e-4, to 8
    bits: between 2^-14 and 2^-13 it goes in steps of 2^-21 = 4.8e-7, and 1e-4 lies between 209 and 210 of them.
    """
    parameter, compensation, mean, square = (torch.tensor([x], dtype=torch.bfloat16) for x in (1.0, 0.0, 0.0, 0.0))
    gradient = torch.ones(1, dtype=torch.bfloat16)
    kahan_adamw_(
        parameter,
        gradient,
        mean,
        square,
        compensation,
        step=1,
        lr=1e-4,
        betas=(0.9, 0.999),
        eps=0.0,
        weight_decay=0.0,
        generator=torch.Generator().manual_seed(0),
    )
    assert float(parameter) == 1.0
    assert float(compensation) in (-209 * 2**-21, -210 * 2**-21)
    assert float(mean) == float(torch.tensor(0.1).bfloat16())
    assert abs(float(square) - 0.001) <= 2**-17  # one step of bfloat16 between 2^-10 and 2^-9


def test_weight_decay_by_hand() -> None:
    """No gradient at all: the weight 1 shrinks to 1 - 0.1 * 0.5 = 0.95; its nearest below 1 is 243 / 256."""
    parameter, zero = torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    compensation = zero.clone()
    options = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.5}
    kahan_adamw_(
        parameter, zero, zero.clone(), zero.clone(), compensation, step=1, generator=torch.Generator(), **options
    )
    assert float(parameter) == 243 / 256
    assert float(parameter) + float(compensation) == pytest.approx(0.95, abs=2**-16)


@pytest.mark.parametrize("weight", [1.0, 0.02])
def test_many_small_steps_stay_with_float32_where_plain_bfloat16_does_not_move(weight: float) -> None:
    """A norm's weight and a projection's, at a rate of 1e-6: 1,000 steps move each by about 1e-3 or less."""
    torch.manual_seed(0)
    start = torch.full((512,), weight).bfloat16()
    gradients = torch.randn(1000, 512) + 0.5
    options = {"lr": 1e-6, "betas": (0.9, 0.999), "weight_decay": 0.01}
    exact = nn.Parameter(start.float())
    train(torch.optim.AdamW([exact], **options), exact, gradients.bfloat16().float())
    plain = nn.Parameter(start.clone())
    train(torch.optim.AdamW([plain], **options), plain, gradients)
    ours = nn.Parameter(start.clone())
    optimizer = KahanAdamW([ours], **options)
    train(optimizer, ours, gradients)
    moved = exact.detach().double() - start.double()
    assert float(moved.abs().mean()) > 2e-4
    off = value(ours, optimizer) - exact.detach().double()
    spacing = 2**-20 if weight == 1.0 else 2**-23  # of the compensation, at most 2^-12 and 2^-15 on most of the way
    walk = 1.2 * spacing * 1000**0.5  # of 1,000 roundings at random, of it and of the second moment
    assert float(off.std()) < walk
    assert float(off.abs().max()) < 5 * walk
    assert float(off.mean().abs()) < 0.02 * float(moved.abs().mean())  # and no drift
    if weight == 1.0:
        assert torch.equal(plain.detach(), start)  # plain bfloat16 stands still


def test_the_second_moment_falls_with_the_gradient() -> None:
    """1,000 steps of 1, then 2,000 of 0.1: v = 0.999^2000 * (1 - 0.999^1000) + 0.01 * (1 - 0.999^2000) = 0.0941.

    Rounded to the nearest it would stay at its highest: 0.999 of a bfloat16 rounds back to itself.
    """
    parameter = nn.Parameter(torch.ones(2048, dtype=torch.bfloat16))
    optimizer = KahanAdamW([parameter], lr=0.0)
    gradients = torch.cat([torch.ones(1000), torch.full((2000,), 0.1)])
    train(optimizer, parameter, gradients[:, None].expand(-1, 2048))
    expected = 0.999**2000 * (1 - 0.999**1000) + 0.01 * (1 - 0.999**2000)
    assert float(optimizer.state[parameter]["exp_avg_sq"].double().mean()) == pytest.approx(expected, rel=0.01)


def test_stochastic_rounding_is_right_on_average_and_exact_if_possible() -> None:
    noise = torch.randint(1 << 16, (100_000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    quarter = torch.full((100_000,), 1 + 2**-7 / 4)  # a quarter of the way from 1 to the next bfloat16
    rounded = rounded_by(quarter, noise).double()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(1 + 2**-7 / 4, abs=1e-4)
    exact = torch.tensor([0.0, 1.0, -3.5, 2.0**-120])
    assert torch.equal(rounded_by(exact, noise[:4]), exact)
    assert set(rounded_by(-quarter, noise).double().tolist()) == {-1.0, -1 - 2**-7}


def test_state_is_a_quarter_less_than_half_and_resumes_bit_for_bit() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(1000).bfloat16())
    optimizer = make_optimizer([parameter], TrainingConfig(optimizer="adamw_bf16", learning_rate=1e-4))
    assert isinstance(optimizer, KahanAdamW)
    gradients = torch.randn(20, 1000)
    train(optimizer, parameter, gradients[:10])
    state = optimizer.state[parameter]
    held = [parameter, parameter.grad, *(state[name] for name in ("exp_avg", "exp_avg_sq", "compensation"))]
    assert [tensor.dtype for tensor in held] == [torch.bfloat16] * 5  # 10 bytes a parameter; float32 AdamW takes 16
    other = nn.Parameter(parameter.detach().clone())
    resumed = make_optimizer([other], TrainingConfig(optimizer="adamw_bf16", learning_rate=1e-4))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(optimizer, parameter, gradients[10:])
    train(resumed, other, gradients[10:])
    assert torch.equal(parameter, other)
    for name, tensor in optimizer.state[parameter].items():
        assert torch.equal(tensor, resumed.state[other][name]), name


def test_frozen_parameters_are_left_out() -> None:
    frozen, trained = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    optimizer = make_optimizer([frozen, trained], TrainingConfig())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["params"] == [trained]


def test_rounding_to_nearest_equals_torchs() -> None:
    torch.manual_seed(0)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0])
    values = torch.cat([torch.randn(10_000) * 10.0 ** torch.randint(-30, 30, (10_000,)), ties])
    assert torch.equal(_nearest(values), values.bfloat16().float())


def test_compiled_it_takes_the_same_steps() -> None:
    """Where rounding to bfloat16 and back is left out, as compilers like to, no weight keeps a remainder."""
    torch.manual_seed(0)
    start = [torch.randn(500).bfloat16(), *(torch.zeros(500, dtype=torch.bfloat16) for _ in range(3))]
    compiled = torch.compile(_kahan_adamw_)
    plain, other = ([tensor.clone() for tensor in start] for _ in range(2))
    for step in range(1, 4):
        gradient, noise = torch.randn(500).bfloat16(), torch.randint(1 << 16, (2, 500), dtype=torch.int32)
        scalars = [torch.tensor(number) for number in (1 - 1e-4, -1e-3 / (1 - 0.9**step), 1 - 0.999**step)]
        for held, update in ((plain, _kahan_adamw_), (other, compiled)):
            update(held[0], gradient, *held[1:], *noise, *scalars, 0.9, 0.999, 1e-8)
    for found, expected in zip(other, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    assert float((other[3] != 0).double().mean()) > 0.9
