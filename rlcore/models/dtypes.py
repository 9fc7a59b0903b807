"""The dtypes of a policy: of its forward pass, and of the parameters that train and that do not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from rlcore.config import ExperimentConfig


def compute_dtype(config: ExperimentConfig, device_type: str) -> torch.dtype:
    """Dtype of the forward and backward pass."""
    if config.model.compute_dtype == "auto":
        return torch.bfloat16 if device_type == "cuda" else master_dtype(config)
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.compute_dtype]


def master_dtype(config: ExperimentConfig) -> torch.dtype:
    """Dtype of trained parameters between steps."""
    return torch.bfloat16 if config.training.optimizer == "adamw_bf16" else torch.float32


def weights_dtype(config: ExperimentConfig, device_type: str) -> torch.dtype:
    """Dtype of the policy's parameters that do not train.

    With adapters these are the base weights. They never change, so the compute dtype is enough.
    """
    return master_dtype(config) if config.model.lora is None else compute_dtype(config, device_type)


def reference_dtype(config: ExperimentConfig, device_type: str) -> torch.dtype:
    """Dtype of the reference's weights, which never change: the compute dtype is enough."""
    return min(compute_dtype(config, device_type), master_dtype(config), key=lambda dtype: dtype.itemsize)


def convert(parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Convert parameters in place. Buffers keep their dtype, because rotary frequencies need float32."""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)
