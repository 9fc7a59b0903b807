"""Records which experts the engine's layers chose, so that the trainer can use the same (router replay).

The record has one row per slot of the key-value cache, and each forward pass writes the rows of the slots that it
writes keys and values to. So the blocks that a request holds have the choices for all of its tokens: those of the
prefix cache as well, which another request has computed, and with several steps queued ahead. A request that is
preempted, or continued with newer weights, is computed again, and the record then has the newer choices.

vLLM's own ``enable_return_routed_experts`` returns the choices of one step, and needs one plan per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import SamplerError
from rlcore.types import Routes


class RouteRecorder:
    """The choices of all layers with experts, by slot of the key-value cache."""

    def __init__(self, model_runner: Any, slots: Callable[[], Mapping[str, Tensor]]) -> None:
        """Attach to vLLM's runner of a loaded model with an allocated key-value cache, before CUDA graphs are captured.

        Args:
            slots: for each layer, the slots [T] that the current forward pass writes; empty while vLLM measures memory.

        Raises:
            SamplerError: the model has no layers with experts, some choose inside a kernel, or the layers of the model
                have caches of several kinds.
        """
        routers = _routers(model_runner.get_model())
        cache = model_runner.kv_cache_config
        if len(cache.kv_cache_groups) != 1:
            raise SamplerError(
                f"rollout.replay_routes is true, and the layers of this model have {len(cache.kv_cache_groups)} kinds "
                "of key-value caches. Allowed is one kind. Set rollout.replay_routes to false."
            )
        self._block = int(cache.kv_cache_groups[0].kv_cache_spec.block_size)
        self._num_experts = max(int(router.global_num_experts) for router in routers)
        dtype = torch.uint8 if self._num_experts < 2**8 else torch.int16
        # the last row takes slot -1, which pads the batches of CUDA graphs
        rows = cache.num_blocks * self._block + 1
        shape = (rows, len(routers), max(int(router.top_k) for router in routers))
        device = next(model_runner.get_model().parameters()).device
        self._rows = torch.full(shape, torch.iinfo(dtype).max, dtype=dtype, device=device)  # no expert's number
        self._slots = slots
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._record, layer))

    def _record(self, layer: int, experts: Tensor) -> None:
        """
        Args:
            experts: [tokens of the step, k].
        """
        slots = next(iter(self._slots().values()), None)
        if slots is not None:
            self._rows[:, layer].index_put_((slots[: len(experts)],), experts.to(self._rows.dtype))

    def read(self, sequences: Sequence[tuple[Sequence[int], int]]) -> list[Routes]:
        """[tokens, E, k] of each sequence, which is given by its blocks and its number of computed tokens.

        Raises:
            SamplerError: a token's experts were not recorded.
        """
        within = np.arange(self._block)
        slots = [
            (np.asarray(blocks, np.int64)[:, None] * self._block + within).reshape(-1)[:tokens]
            for blocks, tokens in sequences
        ]
        index = torch.from_numpy(np.concatenate(slots)).to(self._rows.device)
        rows = self._rows[index].cpu().numpy()
        if rows.size and rows.max() >= self._num_experts:
            raise SamplerError(
                "rollout.replay_routes is true, and vLLM did not report the experts of every token. Set "
                "rollout.replay_routes to false, or use the vLLM version that infra/requirements pins."
            )
        ends = np.cumsum([len(part) for part in slots])
        return [part.copy() for part in np.split(rows, ends[:-1])]


def _routers(model: torch.nn.Module) -> list[Any]:
    """The routers of the layers with experts, in the order of the layers."""
    layers = [module for module in model.modules() if hasattr(getattr(module, "router", None), "select_experts")]
    routers = list({id(layer.router): layer.router for layer in layers}.values())
    kernels = [layer for layer in layers if getattr(layer, "is_monolithic", False)]
    if not routers or kernels or not all(hasattr(router, "set_capture_fn") for router in routers):
        raise SamplerError(
            f"rollout.replay_routes is true, and vLLM reports the chosen experts of {len(routers)} layers, of which "
            f"{len(kernels)} choose inside a kernel. Allowed are models whose layers with experts all report them. Set "
            "rollout.replay_routes to false."
        )
    return routers
