"""Hugging Face folders into modules: safetensors only, nothing missing, nothing left over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlcore.errors import ModelError
from rlcore.families import family_of


def load_hf_model(
    folder: Path,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    *,
    attn_implementation: str | None = None,
) -> nn.Module:
    """The model of a local folder on CPU, in ``dtype`` and eval mode; with its vision tower if it has one.

    Raises:
        ModelError: no such model, no safetensors, or tensors that do not fit the architecture one to one.
    """
    config = load_hf_config(folder, trust_remote_code)
    if not any(folder.glob("*.safetensors")):
        found = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        raise ModelError(
            f"{folder}: found {found or 'no weights'}, allowed are *.safetensors. "
            "Convert the weights (load and save_pretrained), or take a revision that has them."
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
        # transformers would draw random values for what is missing and go on.
        listed = "; ".join(f"{kind}: {names[:5]} ({len(names)})" for kind, names in wrong.items() if names)
        raise ModelError(
            f"{folder}: the tensors do not fit {type(model).__name__}: {listed}. "
            "Allowed is exactly the architecture that config.json names; use the one saved with the weights."
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
            f"{folder}/config.json: {error}. Allowed are models that transformers knows; for code that "
            "comes with the model set model.trust_remote_code."
        ) from error


def empty_hf_model(folder: Path, trust_remote_code: bool = False) -> nn.Module:
    """The architecture of a local folder on the meta device: names, shapes and ties, no values.

    Raises:
        ModelError: no config.json, or a model type that transformers does not know.
    """
    config = load_hf_config(folder, trust_remote_code)
    with torch.device("meta"):
        model: nn.Module = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()  # type: ignore[operator]
    return model


def auto_class(config: Any) -> Any:
    """transformers' loader for this configuration: with a vision tower, or text alone."""
    return AutoModelForCausalLM if family_of(config).images is None else AutoModelForImageTextToText
