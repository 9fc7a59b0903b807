"""Optimizers over FSDP2 shards: torch's AdamW in float32, and one that stores everything in bfloat16.

torch-optimi's ``AdamW(kahan_sum=True)`` is no substitute. It multiplies a bfloat16 second moment by beta2: at 0.999
that rounds back to the same number, so the moment never falls. A weight of 1 stops moving at a learning rate of 1e-6,
even with compensation. Weight decay is not compensated. And on DTensors it dispatches ten operations per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlcore.algorithms.logprobs import fused
from rlcore.config import TrainingConfig
from rlcore.models.sharding import local_part

_CHUNK = 1 << 24  # elements with float32 copies at a time


def make_optimizer(parameters: Iterable[nn.Parameter], config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101) as ``training.optimizer`` says, over the parameters that train."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    options: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "adamw_bf16":
        return KahanAdamW(trained, **options)
    return torch.optim.AdamW(trained, **options, fused=True)


class KahanAdamW(torch.optim.Optimizer):
    """AdamW with bfloat16 parameters, moments and compensation: 8 bytes per parameter, 10 with the gradient.

    ``exp_avg``, ``exp_avg_sq``, ``compensation`` and ``step`` are the whole state: nothing else influences a step.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    for name in ("exp_avg", "exp_avg_sq", "compensation"):
                        state[name] = torch.zeros_like(parameter)
                state["step"] += 1
                step = int(state["step"])
                tensors = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["compensation"]]
                flat = [local_part(tensor).detach().view(-1) for tensor in tensors]
                device = flat[0].device
                if device not in generators:
                    generators[device] = torch.Generator(device)
                # seeded by step and place only: a resumed run, and a step over a few parameters at a time, then use the
                # same noise. Mixed by SeedSequence, because on a CPU torch uses only 32 bits of a seed
                generators[device].manual_seed(int(np.random.SeedSequence((step, place)).generate_state(1)[0]))
                chunks = [tensor.split(_CHUNK) for tensor in flat]  # type: ignore[no-untyped-call]
                for chunk in zip(*chunks, strict=True):
                    kahan_adamw_(
                        *chunk,
                        step=step,
                        lr=group["lr"],
                        betas=group["betas"],
                        eps=group["eps"],
                        weight_decay=group["weight_decay"],
                        generator=generators[device],
                    )


def kahan_adamw_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    compensation: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    generator: torch.Generator,
) -> None:
    """One AdamW step in place, in float32 on bfloat16 tensors of one shape.

    The weight is parameter + compensation: together 17 bits instead of the parameter's 8 (Kahan, 1965; for bfloat16
    training arXiv:2010.06192). Two changes can still be too small: that of a weight below its 17th bit, such as a
    norm's weight of 1 at a rate of 1e-6, and the second moment's decay by 1 - beta2. Both are rounded up or down at
    random, which is right on average. The first moment decays by 1 - beta1 and is rounded to the nearest.

    Args:
        step: number of this update, counted from 1.
    """
    beta1, beta2 = betas
    # tensors, because torch.compile would build a new kernel for each value of a Python number
    decay, rate, correction = (
        torch.tensor(number, dtype=torch.float32)
        for number in (1 - lr * weight_decay, -lr / (1 - beta1**step), 1 - beta2**step)
    )
    noise = [
        torch.randint(1 << 16, parameter.shape, dtype=torch.int32, device=parameter.device, generator=generator)
        for _ in range(2)
    ]
    update = fused(_kahan_adamw_, parameter.device.type)
    update(parameter, gradient, exp_avg, exp_avg_sq, compensation, *noise, decay, rate, correction, beta1, beta2, eps)


def _kahan_adamw_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    compensation: Tensor,
    noise_of_square: Tensor,
    noise_of_weight: Tensor,
    decay: Tensor,
    rate: Tensor,
    correction: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    wide = gradient.float()
    mean = exp_avg.float().lerp(wide, 1 - beta1)
    square = (exp_avg_sq.float() * beta2).addcmul(wide, wide, value=1 - beta2)
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(rounded_by(square, noise_of_square))
    weight = (parameter.float() + compensation) * decay + rate * (mean / ((square / correction).sqrt() + eps))
    nearest = _nearest(weight)
    parameter.copy_(nearest)
    compensation.copy_(rounded_by(weight - nearest, noise_of_weight))


def rounded_by(values: Tensor, noise: Tensor) -> Tensor:
    """Stochastic rounding of float32 to values of bfloat16: right on average if ``noise`` is uniform in 0..2^16 - 1."""
    return ((values.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)


def _nearest(values: Tensor) -> Tensor:
    """float32 rounded to the nearest values of bfloat16, ties to even.

    torch.compile removes ``values.bfloat16().float()`` as a no-op, and no weight would have a remainder.
    """
    bits = values.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -(1 << 16)).view(torch.float32)
