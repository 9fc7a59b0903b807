"""How far two implementations of one model are apart: their log-probs, the layer at which hidden states part, and what
rounding alone explains. Letters as in ``rlcore.batch``; H the decoder's width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor

from rlcore.algorithms.logprobs import logprobs_and_entropy
from rlcore.batch import trained_positions
from rlcore.data.pixels import frames_in
from rlcore.data.probe import ProbeSequence
from rlcore.families import family_of, images_of
from rlcore.models.lora import decoder_of
from rlcore.types import ImageRef

# Of two implementations, in nats. In float32 an implementation may differ from transformers by this much.
FLOAT32_TOLERANCE = 1e-3
# In another dtype it may differ from transformers in float32 by so many times the root mean square of what transformers
# in that dtype, with two kinds of attention, differs by: in its own root mean square, and in a single token. A single
# token may also differ by RMS_FACTOR times the largest of those differences, which may have a long tail.
RMS_FACTOR, MAX_FACTOR = 2.0, 6.0
# Hidden states part where their relative difference exceeds this, and so many times that of rounding.
_TEXT, _PICTURES = "the token embeddings", "the features of pictures"
_FLOAT32_STATES, _STATES_FACTOR = 1e-4, 3.0

Values = npt.NDArray[np.float64]  # [C] nats, of a sequence's completion tokens
Limits = tuple[float, float]  # largest difference of one token, and root mean square over the tokens
ReadImages = Callable[[Sequence[ImageRef]], tuple[Tensor, Tensor]]  # pixels, and grids [I, 3], of a sequence's images
States = list[tuple[Tensor, ...]]
"""Of one sequence: the input of the first decoder layer, then the output of each layer. Each as one or more tensors
[L, H], float32 on the CPU, of which one is the residual stream."""


# --- log-probs ---


def allowed_differences(rounding: Sequence[Values]) -> Limits:
    """How far a correct implementation may be from the exact log-probs: in one token, and in root mean square. Nats.

    Args:
        rounding: differences of correct forward passes in the implementation's dtype from the exact log-probs. None of
            them: the implementation computes in float32.
    """
    if not rounding:
        return FLOAT32_TOLERANCE, FLOAT32_TOLERANCE
    together = np.concatenate(rounding)
    spread, largest = root_mean_square(together), float(np.abs(together).max())
    of_one_token = max(FLOAT32_TOLERANCE, MAX_FACTOR * spread, RMS_FACTOR * largest)
    return of_one_token, max(FLOAT32_TOLERANCE, RMS_FACTOR * spread)


def root_mean_square(values: Values) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@dataclass(frozen=True, slots=True)
class Difference:
    """Of the log-probs of some sequences, in nats."""

    largest: float
    spread: float  # root mean square
    sequence: int  # where the largest is
    token: int  # of the completion

    def is_within(self, limits: Limits) -> bool:
        """False if it is NaN."""
        return self.largest <= limits[0] and self.spread <= limits[1]


def difference(exact: Sequence[Values], actual: Sequence[Values]) -> Difference:
    """
    Args:
        exact, actual: log-probs [C] of each sequence's completion.
    """
    deltas = np.abs(np.concatenate(actual) - np.concatenate(exact))
    places = [(sequence, token) for sequence, values in enumerate(exact) for token in range(len(values))]
    sequence, token = places[int(np.argmax(np.where(np.isnan(deltas), np.inf, deltas)))]
    return Difference(float(np.max(deltas)), root_mean_square(deltas), sequence, token)


# --- transformers' own forward pass ---


def image_reader(
    model_dir: Path, read_image: Callable[[ImageRef], Image.Image], min_pixels: int, max_pixels: int
) -> ReadImages:
    """Reads images with the image processor of a model folder.

    Args:
        read_image: reads an image of the prepared dataset.
    """

    @cache  # a text model has none
    def processor() -> Any:
        return AutoImageProcessor.from_pretrained(model_dir, local_files_only=True)  # type: ignore[no-untyped-call]

    def read(images: Sequence[ImageRef]) -> tuple[Tensor, Tensor]:
        family = images_of(processor())
        parts, grids = [], []
        for image in images:
            opened = frames_in(read_image(image), image)
            if image.is_video and family.videos is not None:
                pixels, grid = family.videos.read(processor(), opened)
            else:
                pixels, (grid,) = family.read(processor(), opened, min_pixels, max_pixels)
            parts.append(pixels)
            grids.append(grid)
        return torch.cat(parts), torch.tensor(grids)

    return read


def sequence_logprobs(model: Any, sequence: ProbeSequence, read: ReadImages) -> Tensor:
    """[C] log-probs of the completion in nats, at temperature 1. Differentiable."""
    device = model.get_input_embeddings().weight.device
    tokens = torch.tensor(sequence.token_ids)
    mask = torch.arange(len(tokens)) >= sequence.completion_start
    predict_from, token_index = trained_positions(mask, torch.tensor([0, len(tokens)]))
    images = family_of(model.config).images
    inputs: dict[str, Any] = {}
    if sequence.images and images is not None:
        inputs = images.plain_arguments(images.layout(model.config), tokens, *read(sequence.images), sequence.images)
    logits = model(
        input_ids=tokens[None].to(device),
        use_cache=False,
        logits_to_keep=predict_from.to(device),  # [1, C, V] and not [1, L, V]
        **{name: value.to(device) for name, value in inputs.items()},
    ).logits
    return logprobs_and_entropy(logits[0], tokens[token_index].to(device))[0]


@dataclass(frozen=True, slots=True)
class Pass:
    """What one implementation computes for some sequences."""

    logprobs: list[Values]
    states: list[States]


@torch.no_grad()
def plain_pass(model: nn.Module, sequences: Sequence[ProbeSequence], read: ReadImages) -> Pass:
    """transformers' forward pass, one sequence after the other."""
    logprobs, states = [], []
    for sequence in sequences:
        with recorded_states(decoder_of(model).layers) as recorded:
            logprobs.append(sequence_logprobs(model, sequence, read).double().cpu().numpy())
        states.append(recorded)
    return Pass(logprobs, states)


# --- hidden states ---


@contextmanager
def recorded_states(layers: nn.ModuleList) -> Iterator[States]:
    """Inside the block, the first forward pass through ``layers`` fills the list.

    A layer that returns the stream in two parts, as vLLM's do, gives two candidates: the first part, and their sum.
    """
    states: States = []

    def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not states:
            states.append(_candidates((*args, *named.values())))

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        if len(states) <= len(layers):
            states.append(_candidates(output if isinstance(output, tuple) else (output,)))

    hooks = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def _candidates(values: tuple[Any, ...]) -> tuple[Tensor, ...]:
    tensors = [v.detach() for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1]
    parts = [  # copies, because vLLM reuses the memory
        v.reshape(-1, v.shape[-1]).to("cpu", torch.float32, copy=True) for v in tensors if v.shape == tensors[0].shape
    ]
    return (parts[0], parts[0] + parts[1]) if len(parts) > 1 else tuple(parts)


def state_errors(exact: Sequence[States], actual: Sequence[States], images: Sequence[Tensor]) -> dict[str, float]:
    """The relative difference of hidden states by place, in the order of the forward pass: root mean square over the
    tokens of the sequence where it is largest.

    Args:
        images: of each sequence [L] bool, True on image tokens.
    """
    errors = {_TEXT: 0.0, _PICTURES: 0.0}
    for wanted, given, is_image in zip(exact, actual, images, strict=True):
        for stage, ((right,), candidates) in enumerate(zip(wanted, given, strict=True)):
            each = [((c - right).norm(dim=1) / right.norm(dim=1).clamp_min(1e-30)).square() for c in candidates]
            squares = min(each, key=lambda error: float(error.mean()))
            parts = {f"decoder layer {stage - 1}": torch.ones_like(is_image)}
            if stage == 0:
                parts = {_TEXT: ~is_image, _PICTURES: is_image}
            for place, chosen in parts.items():
                if bool(chosen.any()):
                    error = float(squares[chosen].mean().sqrt())
                    errors[place] = max(errors.get(place, 0.0), error if error == error else float("inf"))
    return errors


def first_parting(errors: dict[str, float], rounding: Sequence[dict[str, float]]) -> str:
    """The first place where hidden states differ by more than rounding explains.

    Args:
        errors: of the implementation, from ``state_errors``.
        rounding: of correct passes in its dtype. None of them: it computes in float32.
    """
    for place, error in errors.items():
        if error > max([_FLOAT32_STATES, *(_STATES_FACTOR * each[place] for each in rounding)]):
            return place
    return "the final norm or the LM head"
