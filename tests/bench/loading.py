"""Memory of one rank while the large recipes load, simulated: the real shapes on the meta device, sharded over as many
ranks as the recipe has, without those ranks.

    .venv/bin/python -m tests.bench.loading

prints JSON: GiB on the device (shards of the policy and of the reference, and the largest piece on its way) and on the
host (the largest piece that is read at once).
"""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

from rlcore.config import ExperimentConfig
from rlcore.models.dtypes import master_dtype, reference_dtype, weights_dtype
from rlcore.models.lora import choose_trainable
from rlcore.models.sharding import local_part, own_rows, transformer_blocks
from tasks.experiments import load_experiment

GIB = 2**30
# hidden, intermediate, layers, heads, key-value heads: from the model cards
TEXT = {"grpo-geo3k-32b": (5120, 27_648, 64, 40, 8), "grpo-geo3k-72b": (8192, 29_568, 80, 64, 8)}


def large_model(recipe: str) -> nn.Module:
    hidden, intermediate, layers, heads, key_value_heads = TEXT[recipe]
    text: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": 152_064,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3456, "num_heads": 16, "out_hidden_size": hidden}
    with torch.device("meta"):
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def simulate(config: ExperimentConfig, hf: nn.Module) -> dict[str, float]:
    """The bytes that ``TorchPolicy`` allocates on rank 0, by the dtypes and the sharding that it uses."""
    workers = config.resources.workers
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
    mesh = init_device_mesh("cpu", (workers,))
    choose_trainable(hf, config.model)
    for parameter in hf.parameters():
        dtype = master_dtype(config) if parameter.requires_grad else weights_dtype(config, "cuda")
        parameter.data = parameter.data.to(dtype)
    models = [hf]
    if config.algorithm.kl.coefficient > 0 and config.model.lora is None:
        reference = copy.deepcopy(hf)
        for parameter in reference.parameters():
            parameter.data = parameter.data.to(reference_dtype(config, "cuda"))
        models.append(reference)
    for model in models:
        for block in transformer_blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    held = [sum(local_part(p).nbytes for p in model.parameters()) for model in models]
    largest = 2 * max(_elements(p) for p in hf.parameters())  # files are bfloat16
    dist.destroy_process_group()
    return {
        "workers": workers,
        "policy_gib": held[0] / GIB,
        "reference_gib": sum(held[1:]) / GIB,
        "device_gib": (sum(held) + largest) / GIB,
        "host_gib": largest / GIB,
        "whole_model_gib": sum(p.numel() for p in hf.parameters()) * 4 / GIB,
    }


def simulate_recipe(name: str) -> dict[str, float]:
    return simulate(load_experiment(name), large_model(name))


def _elements(parameter: torch.Tensor) -> int:
    """Of the rows that this rank reads."""
    rows = own_rows(parameter)
    return int(rows.stop - rows.start) * (parameter.numel() // parameter.shape[0])


def main() -> None:
    print(json.dumps({name: simulate_recipe(name) for name in TEXT}, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
