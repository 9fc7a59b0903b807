"""The FLOPs of a training pass, and the model FLOPs utilisation of a device.

Only work that the model needs is counted: no padding, no recomputed activations, and a prompt that a group shares only
once. Norms, activations and the optimizer are left out, as is usual (PaLM, arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from operator import add

PEAK_BF16 = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12}
"""Dense FLOP/s by a part of the device's name (the longest match counts), from the vendors' data sheets."""


@dataclass(frozen=True, slots=True)
class TowerShape:
    """A vision tower: widths in elements, areas in patches."""

    parameters: int  # applied to every patch
    merger_parameters: int  # applied to every merged patch
    merged: int  # patches that are merged into one
    patch_size: int  # pixels per side
    width: int  # heads * head size
    full_layers: int  # layers whose patches attend to their whole frame
    window_layers: int
    window: int  # patches of a window
    trains: bool
    overview: bool = False  # an image of several windows passes the tower once more, as one window

    def patches(self, width: int, height: int) -> int:
        """Of a resized image."""
        of_image = (width // self.patch_size) * (height // self.patch_size)
        return of_image + (self.window if self.overview and of_image > self.window else 0)


@dataclass(frozen=True, slots=True)
class ModelShape:
    parameters: int  # of the decoder's layers
    head_parameters: int  # of the LM head, applied to the trained tokens
    layers: int
    width: int  # of attention: query heads * head size
    weights_train: bool  # False with adapters: the backward pass has no weight gradients
    tower: TowerShape | None
    windows: tuple[int, ...] = ()  # of the layers with a sliding window, in tokens
    recurrent_layers: int = 0  # of ``layers``: those with a recurrent state in place of attention
    state_elements: int = 0  # of the states of all of them

    @property
    def attention_weight(self) -> float:
        """Cost of attending to one token in all layers, relative to the matrix products of a token. Microbatches are
        balanced by it, as if no layer had a window."""
        return 2 * (self.layers - self.recurrent_layers) * self.width / self.parameters


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a pass over some microbatches."""

    forward_flops: float
    backward_flops: float
    tokens: int  # computed; a prompt counts once per microbatch
    prompt_tokens: int  # part of ``tokens``
    shared_tokens: int  # saved, because another sequence of the microbatch has the same prompt

    def __add__(self, other: Work) -> Work:
        return Work(*map(add, astuple(self), astuple(other)))


NOTHING = Work(0.0, 0.0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Sequences of one microbatch that share a prompt."""

    prompt: int
    completions: tuple[int, ...]
    trained: int  # tokens of the completions that are trained


def pass_work(shape: ModelShape, groups: Sequence[GroupSize], images: Sequence[tuple[int, int]]) -> Work:
    """The work of one microbatch.

    Forward: 2 N FLOPs per token (N parameters of the layers), 2 V H per trained token for the head, and
    4 * layers * width per pair of a token and a token that it attends to (itself counts half). A token reads a
    recurrent state twice and writes it once: 6 FLOPs per element. The tower is counted in the same way. Backward: twice
    that if the weights train, once for a decoder with frozen weights. A frozen tower counts 0, because its outputs are
    cached.

    Args:
        images: (width, height) in pixels of each distinct image.
    """
    prompt_tokens = sum(group.prompt for group in groups)
    tokens = prompt_tokens + sum(sum(group.completions) for group in groups)
    of_layers = [*[None] * (shape.layers - shape.recurrent_layers - len(shape.windows)), *shape.windows]
    pairs = {window: sum(_pairs(group, window) for group in groups) for window in set(of_layers)}
    decoder = (
        (2.0 * shape.parameters + 6.0 * shape.state_elements) * tokens
        + 2.0 * shape.head_parameters * sum(group.trained for group in groups)
        + 4.0 * shape.width * sum(pairs[window] for window in of_layers)
    )
    running = shape.tower if shape.tower is not None and shape.tower.trains else None
    tower = sum(_tower_flops(running, *size) for size in images) if running is not None else 0.0
    return Work(
        forward_flops=decoder + tower,
        backward_flops=decoder * (2 if shape.weights_train else 1) + 2 * tower,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        shared_tokens=sum(group.prompt * (max(1, len(group.completions)) - 1) for group in groups),
    )


def _pairs(group: GroupSize, window: int | None) -> float:
    """Pairs of a token and a token that it attends to, in a layer with this window. The prompt counts once."""

    def of_first(tokens: int) -> float:
        """Of the first tokens of a sequence: those beyond the window see all of it."""
        inside = tokens if window is None else min(tokens, window)
        return inside**2 / 2 + (tokens - inside) * (inside - 1 / 2)

    prompt = of_first(group.prompt)
    return prompt + sum(of_first(group.prompt + completion) - prompt for completion in group.completions)


def _tower_flops(tower: TowerShape, width: int, height: int) -> float:
    patches = tower.patches(width, height)
    seen = tower.full_layers * patches + tower.window_layers * min(tower.window, patches)
    return (
        2.0 * patches * (tower.parameters + tower.merger_parameters / tower.merged) + 4.0 * tower.width * patches * seen
    )


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of one device; None if it is not in the table."""
    known = [name for name in PEAK_BF16 if name in device_name]
    return PEAK_BF16[max(known, key=len)] if known else None


def utilisation(flops: float, seconds: float, devices: int, device_name: str) -> float | None:
    """FLOPs divided by what the devices could compute in that time; None if their peak is unknown."""
    peak = peak_flops(device_name)
    return None if peak is None else flops / (seconds * devices * peak)
