"""``python -m rlcore.jobs.architecture spec.json``: the shape of a model, from its config.json alone.

The model is built on torch's meta device: no weights, no GPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlcore.config import ModelConfig
from rlcore.errors import ModelError
from rlcore.estimate import Architecture, ArchitectureRef, ArchitectureSpec
from rlcore.families import family_of
from rlcore.jobs import job_main
from rlcore.models.loading import auto_class, load_hf_config
from rlcore.models.lora import decoder_of, lora_targets, vision_tower
from rlcore.models.packed import model_shape

_ANSWER_SECONDS = "5"


def describe(spec: ArchitectureSpec) -> ArchitectureRef:
    """The job.

    Raises:
        ModelError: there is no config.json, or transformers does not know the model.
    """
    config = _tiny_config(spec.model) if spec.model.path == "tiny" else load_hf_config(
        _config_folder(spec.model), spec.model.trust_remote_code
    )  # fmt: skip
    with torch.device("meta"):
        hf = auto_class(config).from_config(config)
    return ArchitectureRef(architecture=architecture(hf, spec.model))


def architecture(hf: Any, model: ModelConfig) -> Architecture:
    tower, text = vision_tower(hf), hf.config.get_text_config()
    if tower is not None and (model.freeze_vision_tower or (model.lora is not None and not model.lora.vision_tower)):
        tower.requires_grad_(False)
    total = _elements(hf)
    in_tower = 0 if tower is None else _elements(tower)
    trained = sum(p.numel() for p in hf.parameters() if p.requires_grad)
    shape = model_shape(hf)
    if model.lora is not None:
        targets = lora_targets(hf, model.lora)
        trained = sum(model.lora.rank * (linear.in_features + linear.out_features) for _, _, linear in targets)
        for parameter in hf.parameters():
            parameter.requires_grad_(False)
        shape = model_shape(hf)
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    family = family_of(hf.config)
    images, widths = family.images, family.feed_forward_widths(hf.config)
    matrices = [p for layer in decoder_of(hf).layers for p in layer.parameters() if p.dim() > 1]
    return Architecture(
        shape=shape,
        parameters=total,
        trained_parameters=trained,
        tower_parameters=in_tower,
        hidden=text.hidden_size,
        intermediate=sum(widths),
        key_value_width=text.num_key_value_heads * head_size,
        vocabulary=text.vocab_size,
        decoder_parameters=sum(p.numel() for p in matrices),
        largest_parameter=max(p.numel() for p in hf.parameters()),
        experts_per_token=len(widths),
        largest_stack=max((p.numel() for p in matrices if p.dim() > 2), default=0),
        tower_hidden=0 if shape.tower is None else shape.tower.width,
        tower_intermediate=0 if images is None or tower is None else images.intermediate(tower.config),
        tower_layers=0 if shape.tower is None else shape.tower.full_layers + shape.tower.window_layers,
    )


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _config_folder(model: ModelConfig) -> Path:
    folder = Path(model.path)
    if folder.is_dir():
        return folder
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", _ANSWER_SECONDS)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model.path, "config.json", revision=model.revision)).parent
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model.path {model.path!r} is no folder here, and its config.json cannot be fetched from Hugging Face: "
            f"{error}. The estimate needs that one file: put it into a folder and add --set model.path=FOLDER."
        ) from error


def _tiny_config(model: ModelConfig) -> Any:
    from rlcore.data.tiny import build_text_tokenizer
    from rlcore.models.tiny import build_model, build_text_model

    if model.tiny.task == "geometry":
        return build_model(model.tiny.family, model.tiny.seed).config
    return build_text_model(build_text_tokenizer(), model.tiny.seed).config


if __name__ == "__main__":
    job_main(describe, ArchitectureSpec)
