"""What ``check-model`` computes of a model folder without an engine: transformers' own results, the packed passes that
are compared with them, gradients, and a change of the weights that every implementation can repeat."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlcore.batch import ImageFeatures, on_device, pack, rows_of
from rlcore.config import LoraConfig, ModelConfig
from rlcore.data.probe import ProbeSequence
from rlcore.families import family_in
from rlcore.families.protocol import Images
from rlcore.models.comparison import (
    FLOAT32_TOLERANCE,
    MAX_FACTOR,
    RMS_FACTOR,
    Limits,
    Pass,
    ReadImages,
    Values,
    allowed_differences,
    difference,
    plain_pass,
    recorded_states,
    sequence_logprobs,
    state_errors,
)
from rlcore.models.loading import empty_hf_model, load_hf_model
from rlcore.models.lora import A, B, choose_trainable, draw_adapters, lora_alpha, merge_adapter
from rlcore.models.packed import PackedModel
from rlcore.models.sharding import local_part, plain_name
from rlcore.models.stored_weights import StoredWeights, load_shards, with_adapters
from rlcore.models.stored_weights import Values as StoredValues
from rlcore.types import Floats, ImageRef, TrainingSample

_SEED = 0
_CHANGE = 0.2  # share by which weights change: far more than rounding, and the model still computes
_SMALL_PART = 1e-3  # of the gradient's norm: a parameter with less is measured against this much

_FLOAT32 = (FLOAT32_TOLERANCE, FLOAT32_TOLERANCE)

Change = Callable[[nn.Module], None]  # changes a transformers model, sharded or not, in place
Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The sequences of a check, as the trainer and as transformers take them."""

    samples: tuple[TrainingSample, ...]
    kinds: tuple[str, ...]
    sequences: tuple[ProbeSequence, ...]
    image_masks: tuple[Tensor, ...]  # of each sequence [L] bool
    read: ReadImages
    features: Callable[[ImageRef], ImageFeatures] | None


@dataclass(frozen=True, slots=True)
class Standard:
    """transformers' results in float32, and by dtype how far a correct implementation may be from them."""

    exact: Pass
    limits: Mapping[torch.dtype, Limits]
    rounding: Mapping[torch.dtype, list[dict[str, float]]]  # ``state_errors`` of correct passes


@dataclass(frozen=True, slots=True)
class Where:
    """How a model is loaded."""

    device: str
    dtype: torch.dtype  # in which the trainer computes
    engine_dtype: torch.dtype  # in which vLLM computes, or of the weights that it gets if that is coarser
    trust_remote_code: bool

    def load(self, folder: Path, dtype: torch.dtype) -> Any:
        """transformers' model of a folder, with its eager attention and one expert after the other. Other kinds of
        attention leave out caps of scores and sinks. The trainer's experts compute together."""
        return load_hf_model(
            folder,
            dtype,
            self.trust_remote_code,
            attn_implementation="eager",
            experts_implementation="eager",
            spread_over_gpus=self.device == "cuda",
        )

    def free(self) -> None:
        """Give memory that torch holds back to the device."""
        if self.device == "cuda":
            torch.cuda.empty_cache()


# --- transformers ---


def standards(folder: Path, inputs: Inputs, where: Where, change: Change) -> tuple[Standard, Standard]:
    """Of the weights as they are, and of the changed weights."""
    model = where.load(folder, torch.float32)
    exact = plain_pass(model, inputs.sequences, inputs.read)
    coarse = sorted({where.dtype, where.engine_dtype} - {torch.float32}, key=str)
    unchanged = {dtype: [parameter.detach().to(dtype) for parameter in model.parameters()] for dtype in coarse}
    change(model)
    changed = plain_pass(model, inputs.sequences, inputs.read)
    kinds = _right_kinds(model, changed, inputs) if coarse else ()
    rounded: dict[torch.dtype, list[Pass]] = {torch.float32: []}
    rounded_changed: dict[torch.dtype, list[Pass]] = {torch.float32: []}
    for dtype in coarse:
        if model is None:
            change(model := where.load(folder, torch.float32))
        _cast(model, dtype)
        rounded_changed[dtype] = _rounded(model, kinds, inputs)
        for parameter, value in zip(model.parameters(), unchanged.pop(dtype), strict=True):
            parameter.data = value
        rounded[dtype] = _rounded(model, kinds, inputs)
        model = None
        where.free()
    return _standard(exact, rounded, inputs), _standard(changed, rounded_changed, inputs)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters. Buffers stay: rotary frequencies need their float32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _right_kinds(model: Any, exact: Pass, inputs: Inputs) -> tuple[str, ...]:
    """The implementations of attention that compute this model.

    Args:
        model: in float32.
        exact: its eager pass.
    """
    (other,) = _rounded(model, ("sdpa",), inputs)
    return ("eager", "sdpa") if difference(exact.logprobs, other.logprobs).is_within(_FLOAT32) else ("eager",)


def _rounded(model: Any, kinds: Sequence[str], inputs: Inputs) -> list[Pass]:
    passes = []
    for kind in kinds:
        model.set_attn_implementation(kind)
        passes.append(plain_pass(model, inputs.sequences, inputs.read))
    return passes


def _standard(exact: Pass, rounded: Mapping[torch.dtype, Sequence[Pass]], inputs: Inputs) -> Standard:
    limits, rounding = {}, {}
    for dtype, passes in rounded.items():
        apart = [v - e for one in passes for v, e in zip(one.logprobs, exact.logprobs, strict=True)]
        limits[dtype] = allowed_differences(apart)
        rounding[dtype] = [state_errors(exact.states, one.states, inputs.image_masks) for one in passes]
    return Standard(exact, limits, rounding)


# --- the packed row ---


def packed_model(folder: Path, where: Where, dtype: torch.dtype, lora: LoraConfig | None = None) -> PackedModel:
    """The trainer's model of a folder, whole on one device, with the log-probs of temperature 1. Its adapters are as at
    the start of a run: they change nothing."""
    hf = empty_hf_model(folder, where.trust_remote_code)
    values: StoredValues = StoredWeights(folder, hf).read
    _cast(hf, dtype)
    if lora is not None:
        choose_trainable(hf, ModelConfig(lora=lora))
        values = with_adapters(values, draw_adapters(hf, _SEED))
    packed = PackedModel(hf, temperature=1.0, banned_token_ids=())
    load_shards(packed, hf, values, torch.device(where.device))
    return packed


def raw_logprobs(packed: PackedModel, inputs: Inputs, samples: Sequence[TrainingSample]) -> list[Tensor]:
    """[C] log-probs of each sample's completion, all samples in one row. Differentiable."""
    batch = pack(samples, layout=packed.image_layout, features=inputs.features)
    device = packed.hf.get_input_embeddings().weight.device
    tokens = packed(on_device(batch, device), raw=True, with_entropy=False)
    return list(tokens.logprobs.split([sample.num_trained for sample in samples]))


def row_of(packed: PackedModel, inputs: Inputs) -> Pass:
    """The packed pass of a whole model."""

    def logprobs(samples: Sequence[TrainingSample]) -> list[Values]:
        return [values.double().cpu().numpy() for values in raw_logprobs(packed, inputs, samples)]

    return packed_pass(packed.decoder.layers, logprobs, inputs.samples)


def policy_pass(
    layers: nn.ModuleList,
    logprobs: Callable[[Sequence[TrainingSample]], list[Floats]],
    samples: Sequence[TrainingSample],
) -> Pass:
    """The packed pass of ``TorchPolicy.raw_logprobs``."""

    def trained(samples: Sequence[TrainingSample]) -> list[Values]:
        return [v[s.loss_mask].astype(np.float64) for v, s in zip(logprobs(samples), samples, strict=True)]

    return packed_pass(layers, trained, samples)


@torch.no_grad()
def packed_pass(
    layers: nn.ModuleList,
    logprobs: Callable[[Sequence[TrainingSample]], list[Values]],
    samples: Sequence[TrainingSample],
) -> Pass:
    """All samples in one row; hidden states are taken apart by sequence.

    Args:
        logprobs: [C] of each sample's completion.
    """
    with recorded_states(layers) as row:
        values = logprobs(samples)
    states = [[tuple(part[rows] for part in candidates) for candidates in row] for rows in rows_of(samples)]
    return Pass(values, states)


# --- gradients ---


@dataclass(frozen=True, slots=True)
class GradientErrors:
    """Of one gradient from the exact one, as shares of its size."""

    by_parameter: dict[str, float]
    whole: float


@dataclass(frozen=True, slots=True)
class GradientDifference:
    errors: GradientErrors
    worst: str  # the parameter whose error exceeds what is allowed the most
    allowed: Limits  # of the worst parameter, and of the whole gradient


def compare_gradients(folder: Path, inputs: Inputs, where: Where) -> GradientDifference:
    """The gradient of one packed microbatch, against transformers' gradient summed over the sequences one by one."""
    model = where.load(folder, torch.float32)
    exact = _plain_gradient(model, inputs)
    rounding = []
    if where.dtype != torch.float32:
        kinds = _right_kinds(model, plain_pass(model, inputs.sequences, inputs.read), inputs)
        model.zero_grad()
        _cast(model, where.dtype)
        for kind in kinds:
            model.zero_grad()
            model.set_attn_implementation(kind)
            rounding.append(_gradient_errors(exact, _plain_gradient(model, inputs)))
    del model
    packed = packed_model(folder, where, where.dtype)
    errors = _gradient_errors(exact, _gradient(packed.hf, raw_logprobs(packed, inputs, inputs.samples), inputs))
    allowed = {
        name: max([FLOAT32_TOLERANCE, *(MAX_FACTOR * each.by_parameter[name] for each in rounding)])
        for name in errors.by_parameter
    }
    worst = max(allowed, key=lambda name: _or_infinite(errors.by_parameter[name]) / allowed[name])
    of_whole = max([FLOAT32_TOLERANCE, *(RMS_FACTOR * each.whole for each in rounding)])
    where.free()
    return GradientDifference(errors, worst, (allowed[worst], of_whole))


def _plain_gradient(model: Any, inputs: Inputs) -> Gradients:
    gradients: Gradients = {}
    for index, sequence in enumerate(inputs.sequences):  # one graph at a time
        gradients = _gradient(model, [sequence_logprobs(model, sequence, inputs.read)], inputs, first=index)
    return gradients


def _gradient(model: nn.Module, logprobs: Sequence[Tensor], inputs: Inputs, first: int = 0) -> Gradients:
    """Add the gradient of a weighted sum of log-probs to what the parameters hold, and return it.

    Args:
        logprobs: of the sequences from number ``first`` on. Each token has a fixed weight of either sign.
    """
    total = sum(sample.num_trained for sample in inputs.samples)
    terms = []
    for number, values in enumerate(logprobs, start=first):
        weights = torch.from_numpy(np.random.default_rng(number).normal(size=len(values)) / total)
        terms.append((values * weights.to(values)).sum())
    torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _gradient_errors(exact: Gradients, actual: Gradients) -> GradientErrors:
    norms = {name: float(value.norm()) for name, value in exact.items()}
    total = math.hypot(*norms.values())
    apart = {
        name: float((actual[name].to(value) - value).norm()) if name in actual else norms[name]
        for name, value in exact.items()
    }
    by_parameter = {name: apart[name] / (norms[name] + _SMALL_PART * total) for name in exact}
    return GradientErrors(by_parameter, math.hypot(*apart.values()) / total)


def _or_infinite(value: float) -> float:
    return value if value == value else math.inf


# --- a change of the weights ---


def change_for(config: ModelConfig, folder: Path) -> Change:
    """Changes what trains: the weights, without those of a frozen tower, or the adapters.

    It gives transformers' model, and the sharded model of the trainer on one rank, the same weights. A model without
    adapters gets those of ``config.lora`` merged into its weights.
    """
    if config.lora is not None:
        return partial(_set_adapters, config=config, folder=folder)
    images = family_in(folder).images
    return partial(_scale_rows, frozen=images if config.freeze_vision_tower else None)


@torch.no_grad()
def _scale_rows(hf: nn.Module, frozen: Images | None) -> None:
    """Scale each row of each tensor by a factor that depends on its place and on the tensor's name."""
    for name, parameter in hf.named_parameters():
        if frozen is not None and frozen.owns(plain_name(name)):
            continue
        values = local_part(parameter.detach())
        places = torch.arange(values.shape[0], device=values.device) + zlib.crc32(plain_name(name).encode()) % 1000
        factors = (1 + _CHANGE * torch.sin(places.double())).float().view(-1, *[1] * (values.dim() - 1))
        values.copy_((values.float() * factors).to(values.dtype))


@torch.no_grad()
def _set_adapters(hf: nn.Module, config: ModelConfig, folder: Path) -> None:
    parameters = {plain_name(name): local_part(p.detach()) for name, p in hf.named_parameters()}
    if lora_alpha(hf) is not None:
        for name, value in random_adapters(hf).items():
            parameters[name].copy_(value)
        return
    adapted = empty_hf_model(folder, config.trust_remote_code)
    choose_trainable(adapted, config)
    adapters, alpha = random_adapters(adapted), lora_alpha(adapted) or 0.0
    for name in (name.removesuffix(A) for name in adapters if name.endswith(A)):
        weight = parameters[f"{name}.weight"]
        a, b = (adapters[name + part].to(weight.device) for part in (A, B))
        weight.copy_(merge_adapter(weight, a, b, alpha))


def random_adapters(hf: nn.Module) -> Mapping[str, Tensor]:
    """Values of the adapters of ``hf`` that change each weight by about a fifth of the usual size of weights."""
    values, alpha = draw_adapters(hf, _SEED), lora_alpha(hf) or 1.0
    generator = torch.Generator().manual_seed(_SEED)
    for name, value in values.items():
        if name.endswith(B):  # A has a deviation of 1 / sqrt(3 in), and weights have one of about 1 / sqrt(in)
            value.normal_(std=_CHANGE * math.sqrt(3 * value.shape[1]) / alpha, generator=generator)
    return values
