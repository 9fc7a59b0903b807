"""Optimizers over FSDP2 shards: torch's AdamW in float32, and one whose every number is bfloat16.

Not torch-optimi's ``AdamW(kahan_sum=True)``: it multiplies a bfloat16 second moment by beta2, and at 0.999 that rounds
back to the same number, so the moment never falls; a weight of 1 stops moving at a rate of 1e-6, compensated or not;
its weight decay is outside of the compensation; and on DTensors it dispatches ten operations per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlcore.algorithms.logprobs import fused
from rlcore.config import TrainingConfig
from rlcore.models.offload import local_part

_CHUNK = 1 << 24  # elements whose float32 copies are alive at once


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

    The state of a parameter is ``exp_avg``, ``exp_avg_sq``, ``compensation`` and ``step``, and nothing else decides
    what a step does.
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
                flat = [_local(tensor) for tensor in tensors]
                device = flat[0].device
                if device not in generators:
                    generators[device] = torch.Generator(device)
                # from step and place alone, so that a resumed run draws what an unbroken one would have, and so does
                # a step over some parameters at a time; mixed, because torch takes but 32 bits of a seed on a CPU
                generators[device].manual_seed(int(np.random.SeedSequence((step, place)).generate_state(1)[0]))
                for chunk in zip(*(tensor.split(_CHUNK) for tensor in flat), strict=True):
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

    The weight is parameter + compensation: the compensation keeps what the parameter's 8 bits cannot (Kahan, 1965; with
    bfloat16 training in arXiv:2010.06192), which makes 17 bits. A change below the last of them (a norm's weight of 1
    at a rate of 1e-6) would still be lost, and so would the second moment's fall by 1 - beta2, less than half a spacing
    of bfloat16: these two are rounded up or down at random and right on average. The first moment moves by 1 - beta1,
    and the nearest does.

    Args:
        step: of this update, counted from 1.
    """
    beta1, beta2 = betas
    # numbers that change from step to step are tensors, or there would be a kernel for each of them
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
    """float32 to values that bfloat16 has, up or down: where ``noise`` is drawn from 0 .. 2^16 - 1 alike, with the
    probability that makes the mean exact."""
    return ((values.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)


def _nearest(values: Tensor) -> Tensor:
    """float32 to the nearest values that bfloat16 has, ties to even.

    Not ``values.bfloat16().float()``, which torch.compile takes for nothing to do: no weight would have a remainder.
    """
    bits = values.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -(1 << 16)).view(torch.float32)


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard, flat, sharing memory."""
    return local_part(tensor).detach().view(-1)
