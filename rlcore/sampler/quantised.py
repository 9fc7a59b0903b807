"""Linear weights that the engine keeps in 8-bit floats, and the proof that they are the trainer's weights, quantised.

Each row of a weight has a scale of its own, so a fused or padded matrix has the same numbers as its parts. Nothing here
imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlcore.sampler.weights import added, bit_sum

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0  # of the format
_LEAST_SCALE = 1 / (_LARGEST * 512)  # vLLM's: rows of zeros have it
_VALUES_AT_ONCE = 1 << 24


def fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row by its largest absolute value: [N, K] -> [N, K] float8_e4m3fn and the scales [N, 1] float32.

    A row is about its quantised values times its scale. The arithmetic is that of vLLM's online "fp8_per_channel".
    """
    low, high = weight.aminmax(dim=-1, keepdim=True)
    most = torch.maximum(low.abs(), high.abs()).float()
    # a division by a Python number would become a product with its reciprocal, which rounds differently
    scale = (most / most.new_tensor(_LARGEST)).clamp_min(_LEAST_SCALE)
    quantised = torch.empty_like(weight, dtype=FP8)
    rows = max(1, _VALUES_AT_ONCE // weight.shape[-1])
    parts = (torch.split(x, rows) for x in (weight, scale, quantised))
    for part, of_rows, into in zip(*parts, strict=True):
        into.copy_((part / of_rows).clamp_(-_LARGEST, _LARGEST))
    return quantised, scale


class QuantisedLayers:
    """The layers of an engine's model whose weights are quantised at every load."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [layer for layer in model.modules() if is_quantised(layer)]

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def watched(self) -> Iterator[Callable[[], int]]:
        """Inside the block the model is loaded. Afterwards the yielded function tells by how much the checksum of what
        the layers must hold exceeds that of the weights they were given.

        vLLM fills a layer with unquantised weights and then calls its ``process_weights_after_loading``: here the
        weights are quantised a second time.
        """
        given: list[Tensor] = []
        due: list[Tensor] = []

        def after(process: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
            def process_and_count(layer: nn.Module) -> None:
                weight = cast(Tensor, layer.weight).detach()
                given.append(bit_sum(weight))
                due.extend(bit_sum(part) for part in fp8_rows(weight))
                process(layer)

            return process_and_count

        methods: list[Any] = [layer.quant_method for layer in self._layers]
        for method in methods:
            method.process_weights_after_loading = after(method.process_weights_after_loading)
        try:
            yield lambda: added(due) - added(given)
        finally:
            for method in methods:
                del method.process_weights_after_loading  # the class has vLLM's


def is_quantised(layer: nn.Module) -> bool:
    """Whether the layer's own weight has 8 bits."""
    weight = layer._parameters.get("weight")
    return weight is not None and weight.dtype == FP8
