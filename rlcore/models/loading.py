"""Hugging Face folders as modules: which models are supported, and how their safetensors are loaded and saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlcore.config import LoraConfig
from rlcore.errors import ModelError
from rlcore.families import family_of


def load_hf_model(
    folder: Path,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    *,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    spread_over_gpus: bool = False,
) -> nn.Module:
    """The model of a local folder in ``dtype`` and eval mode, with its vision tower if it has one.

    Args:
        attn_implementation: transformers' name; None: the first of ``exact_attention``.
        spread_over_gpus: load it onto the GPUs of this machine, as many as it needs, and the rest onto the host
            (accelerate's ``device_map``). Else it is on the CPU.

    Raises:
        ModelError: no such model, no safetensors, or missing, unexpected or mismatched tensors.
    """
    config = load_hf_config(folder, trust_remote_code)
    if attn_implementation is None:
        attn_implementation = exact_attention(config)[0]
    if not any(folder.glob("*.safetensors")):
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        raise ModelError(
            f"{folder}: found {others or 'no weights'}, allowed are *.safetensors. "
            "Convert the weights with save_pretrained, or choose a revision that has safetensors."
        )
    model: nn.Module
    try:
        model, info = auto_class(config).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            attn_implementation=attn_implementation,
            experts_implementation=experts_implementation,
            device_map="sequential" if spread_over_gpus else None,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported below with the others
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{folder}: the weights cannot be read: {error}. Download or merge the model again."
        ) from error
    wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        # transformers would continue with random values for missing tensors
        listed = "; ".join(f"{kind}: {names[:5]} ({len(names)})" for kind, names in wrong.items() if names)
        raise ModelError(
            f"{folder}: the tensors do not fit {type(model).__name__}: {listed}. "
            "They must be exactly those of config.json. Use the config.json that was saved with the weights."
        )
    return model


def load_hf_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """The configuration of a local model folder.

    Raises:
        ModelError: no config.json, or a model type that transformers does not know.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: found no config.json. model.path must be a Hugging Face model folder.")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ModelError(
            f"{folder}/config.json: {error}. Allowed are models that transformers knows. For a model with its own code "
            "set model.trust_remote_code."
        ) from error


def empty_hf_model(folder: Path, trust_remote_code: bool = False) -> nn.Module:
    """The architecture of a local folder, in eval mode. Parameters are float32 on the meta device, tied as in the
    folder, and buffers (rotary frequencies) are on the CPU with their values.

    Raises:
        ModelError: no config.json, or a model type that transformers does not know.
    """
    config = load_hf_config(folder, trust_remote_code)
    with torch.device("meta"):
        model: Any = auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    model.tie_weights()
    _compute_buffers(model)
    return cast(nn.Module, model.eval())


def published(model: Any, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What transformers saves of a model, in the layout of the model's published files. transformers 5.19 transposes
    experts when it loads them, and not when it saves them."""
    family = family_of(model.config)
    return {family.published_name(n): family.as_published(n, value).contiguous() for n, value in saved.items()}


def save_published(model: Any, folder: Path) -> None:
    """``model.save_pretrained`` for a model of one file, in the layout of published files."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = published(model, load_file(path))
    path.unlink()  # the tensors may share its memory
    save_file(tensors, path, metadata={"format": "pt"})


def stores_buffers(model: nn.Module) -> bool:
    """Whether the files of this architecture have buffers besides parameters. No weight sync sends them."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return not parameters.issuperset(model.state_dict())


def _compute_buffers(model: Any) -> None:
    """transformers computes buffers where it initialises weights. It skips parameters with this mark."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        module._is_hf_initialized = False
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()


def exact_attention(config: Any) -> tuple[str, ...]:
    """transformers' names of the kinds of attention that compute this model, the fastest first. All but its eager
    attention leave out a soft cap of scores."""
    return ("sdpa", "eager") if family_of(config).caps(config).scores is None else ("eager",)


def auto_class(config: Any) -> Any:
    """transformers' loader for this configuration: with a vision tower, or text only.

    transformers runs the recurrent states of a model by flash-linear-attention where that is installed, on a CPU too,
    where it fails. Its own operations of torch take their place.
    """
    family = family_of(config)
    if family.recurrence is not None:
        module = import_module(type(config).__module__.replace("configuration_", "modeling_"))
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            setattr(module, name, unwrap(getattr(module, name)))
    return AutoModelForCausalLM if family.images is None else AutoModelForImageTextToText


def require_supported(
    model: Any,
    *,
    sequence_parallel: int,
    tensor_parallel: int = 1,
    lora: LoraConfig | None = None,
    replay_routes: bool = False,
) -> None:
    """Refuse a model that the packed forward pass or the engine cannot compute exactly.

    Args:
        model: Hugging Face configuration.
        sequence_parallel: ranks that compute a row together.
        tensor_parallel: ranks that hold an engine together.

    Raises:
        ModelError: no supported family; heads or widths that do not divide evenly over the ranks; layers without
            attention; soft caps or scales of logits; adapters in a tower for which the engine has none; router replay
            without experts.
    """
    family, name = family_of(model), model.model_type
    text = model.get_text_config()
    counts = {"attention heads": text.num_attention_heads}
    if family.recurrence is not None:
        counts["key heads in its layers with a recurrent state"] = text.linear_num_key_heads
    for of, heads in counts.items():
        if heads % sequence_parallel:
            raise ModelError(
                f"training.sequence_parallel is {sequence_parallel}, and {name} has {heads} {of}, which do not "
                f"divide evenly over as many ranks. Allowed are {_divisors(math.gcd(*counts.values()))}."
            )
    if tensor_parallel > 1 and tensor_parallel not in (allowed := tensor_parallel_degrees(model)):
        raise ModelError(
            f"rollout.tensor_parallel is {tensor_parallel}, and the heads and widths of {name} do not divide evenly "
            f"over as many ranks. Allowed are {allowed}."
        )
    if lora is not None and lora.vision_tower and family.images is not None and not family.images.adapts_tower:
        raise ModelError(
            f"model.lora.vision_tower is true, and vLLM has no adapters for the vision tower of {name}. Set it to "
            "false: adapters then reach the language model alone."
        )
    if replay_routes and family.experts is None:
        raise ModelError(
            f"rollout.replay_routes is true, and {name} has no experts. Allowed is a model that has some. "
            "Set rollout.replay_routes to false."
        )
    family.require_plain(model)
    kinds = dict.fromkeys(mask.kind for mask in family.masks(model))
    known = {"full_attention", "sliding_attention"} | ({"linear_attention"} if family.recurrence is not None else set())
    if unknown := sorted(kinds.keys() - known):
        raise ModelError(
            f"{name} has {' and '.join(unknown)} layers. Allowed are full_attention and sliding_attention: in "
            "other layers the sequences of a packed row would see each other."
        )


def tensor_parallel_degrees(model: Any) -> list[int]:
    """The numbers of ranks over which vLLM can spread one engine.

    Query heads and rows of the feed-forward weights divide evenly over the ranks, in the tower as well. Key-value heads
    divide evenly, or each is copied to equally many ranks.
    """
    text, images = model.get_text_config(), family_of(model).images
    sizes = ["num_attention_heads", "intermediate_size", "moe_intermediate_size"]
    sizes += ["linear_num_key_heads", "linear_num_value_heads"]  # of layers with a recurrent state
    cut = [getattr(text, size) for size in sizes if hasattr(text, size)]
    cut += [] if images is None else images.head_counts_and_widths(model)
    key_value = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return [n for n in _divisors(math.gcd(*cut)) if key_value % n == 0 or n % key_value == 0]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
