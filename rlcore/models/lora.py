"""Which parameters train: all of them, all but the vision tower's, or low-rank adapters of frozen weights.

PEFT is not used, because it renames every adapted weight (``.base_layer.``), and sync, checkpoint and merge rely on
Hugging Face's names. Here the names stay, and an adapter adds two tensors: ``<module>.lora_A.weight`` [rank, in] and
``<module>.lora_B.weight`` [out, rank], which are PEFT's names without its prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlcore.config import LoraConfig, ModelConfig
from rlcore.families import family_of

A, B = ".lora_A.weight", ".lora_B.weight"


class AdaptedLinear(nn.Linear):
    """y = W x + b + (alpha / rank) B A x, with W and b of ``base``. LoRA, arXiv:2106.09685, eq. 3."""

    def __init__(self, base: nn.Linear, config: LoraConfig) -> None:
        """The adapter is on the meta device until it gets values, such as those of ``draw_adapters``."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.alpha, self.scale, self.on = config.alpha, config.alpha / config.rank, True
        self.lora_A = nn.Linear(base.in_features, config.rank, bias=False, dtype=torch.float32, device="meta")
        self.lora_B = nn.Linear(config.rank, base.out_features, bias=False, dtype=torch.float32, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        out = functional.linear(x, self.weight, self.bias)
        return out + self.lora_B(self.lora_A(x)) * self.scale if self.on else out


def choose_trainable(hf: nn.Module, config: ModelConfig) -> None:
    """Set ``requires_grad`` on every parameter and insert the adapters, which have no values yet."""
    tower = vision_tower(hf)
    if config.freeze_vision_tower and tower is not None:
        tower.requires_grad_(False)
    if config.lora is None:
        return
    hf.requires_grad_(False)
    for part, name, linear in lora_targets(hf, config.lora):
        parent, _, child = name.rpartition(".")
        setattr(part.get_submodule(parent), child, AdaptedLinear(linear, config.lora))


def draw_adapters(hf: nn.Module, seed: int) -> dict[str, Tensor]:
    """Initial values of the adapters of ``hf``, by name, on the CPU in float32.

    A is uniform with a = sqrt(5), as in the paper's code and PEFT. B is 0, so the model starts as the base model.
    """
    generator = torch.Generator().manual_seed(seed)
    names = {module: name for name, module in hf.named_modules()}
    values: dict[str, Tensor] = {}
    for part in (decoder_of(hf), vision_tower(hf)):
        for module in () if part is None else part.modules():
            if isinstance(module, AdaptedLinear):
                a, b = (torch.empty(linear.weight.shape) for linear in (module.lora_A, module.lora_B))
                values[names[module] + A] = nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
                values[names[module] + B] = nn.init.zeros_(b)
    return values


def lora_targets(hf: nn.Module, config: LoraConfig) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Linear layers that get an adapter: the decoder or the vision tower, the layer's name in it, and the layer."""
    tower = vision_tower(hf) if config.vision_tower else None
    adapted = family_of(hf.config).adapted
    return [
        (part, name, module)
        for part in (decoder_of(hf), tower)
        if part is not None
        for name, module in part.named_modules()
        if type(module) is nn.Linear and (part is tower or adapted is None or name.rpartition(".")[2] in adapted)
    ]


def decoder_of(hf: nn.Module) -> Any:
    """The module with the embeddings and the layers, without the head."""
    return family_of(hf.config).decoder(hf)


def vision_tower(hf: nn.Module) -> nn.Module | None:
    """None for a text model."""
    images = family_of(hf.config).images
    return None if images is None else images.tower(hf)


def frozen_tower(hf: nn.Module) -> nn.Module | None:
    """The vision tower if none of its parameters train, else None."""
    tower = vision_tower(hf)
    return None if tower is None or any(p.requires_grad for p in tower.parameters()) else tower


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off inside the block: the model is then the base model."""
    adapted = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for module in adapted:
        module.on = False
    try:
        yield
    finally:
        for module in adapted:
            module.on = True


def lora_alpha(model: nn.Module) -> float | None:
    """alpha of the adapters in ``model``; None if it has none."""
    return next((module.alpha for module in model.modules() if isinstance(module, AdaptedLinear)), None)


def is_adapter(name: str) -> bool:
    """Whether this name in a state dict is a tensor of an adapter."""
    return name.endswith((A, B))


def merge_adapter(weight: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """W + (alpha / rank) B A, computed in float32, in the dtype of ``weight``."""
    return (weight.float() + b.float() @ a.float() * (alpha / a.shape[0])).to(weight.dtype)
