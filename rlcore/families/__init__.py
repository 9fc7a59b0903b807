"""The model families that can be trained: transformers' ``model_type`` -> ``Family``. See docs/howto/own-family.md.

This package is the only place that knows model types. Importing it loads neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import ModelError
from rlcore.families import (
    gemma3,
    glm4v,
    idefics3,
    internvl,
    qwen2,
    qwen2_vl,
    qwen3_5,
    qwen3_moe,
    qwen3_vl,
    qwen3_vl_moe,
)
from rlcore.families.protocol import Family, Images, Videos

FAMILIES: Mapping[str, Family] = {
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen2.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
    "llama": qwen2.FAMILY,
    "mistral": qwen2.FAMILY,
    "phi3": qwen2.FAMILY,
    "olmo2": qwen2.FAMILY,
    "olmo3": qwen2.FAMILY,
    "gemma2": qwen2.GEMMA2,
    "gemma3_text": qwen2.GEMMA3,
    "cohere": qwen2.FAMILY,  # with logit_scale 1
    "granite": qwen2.FAMILY,  # with logits_scaling 1
    "qwen2_vl": qwen2_vl.FAMILY,
    "qwen2_5_vl": qwen2_vl.FAMILY,
    "qwen3_vl": qwen3_vl.FAMILY,
    "qwen3_vl_moe": qwen3_vl_moe.FAMILY,
    "qwen3_5_text": qwen3_5.TEXT,
    "qwen3_5": qwen3_5.FAMILY,
    "qwen3_5_moe_text": qwen3_5.MOE_TEXT,
    "qwen3_5_moe": qwen3_5.MOE,
    "glm4v": glm4v.FAMILY,
    "internvl": internvl.FAMILY,
    "idefics3": idefics3.FAMILY,  # the first SmolVLM is one
    "smolvlm": idefics3.FAMILY,  # SmolVLM2
    "gemma3": gemma3.FAMILY,
}

EXACT = ("qwen2",)
"""Model types whose forward pass ``models.exact`` repeats with the sampler's kernels."""
REFUSED: Mapping[str, str] = {
    "gpt_oss": "its attention has sinks, which the trainer's packed attention does not compute",
    "kimi_vl": "transformers 5.19 has no implementation of it, which the trainer would run",
}
"""Model types that were tried, and what is missing. tests/long/test_refused_families.py measures it."""

_IMAGES = [family.images for family in FAMILIES.values() if family.images is not None]

PLACEHOLDERS = tuple(dict.fromkeys(token for images in _IMAGES for token in images.placeholders))
"""Of all families, because a text model's tokenizer may have those of the vision-language model of its family."""


def family_of(config: Any) -> Family:
    """
    Args:
        config: transformers' configuration, or the contents of a config.json.

    Raises:
        ModelError: no family in the table has this model type.
    """
    fields: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    model_type = fields.get("model_type")
    if (family := FAMILIES.get(str(model_type))) is not None:
        return family
    if (missing := REFUSED.get(str(model_type))) is not None:
        raise ModelError(
            f"config.json has model_type {model_type!r}, which is refused: {missing}. Supported are "
            f"{', '.join(FAMILIES)}. Set model.path to a model of one of these."
        )
    raise ModelError(
        f"config.json has model_type {model_type!r}{_peculiarities(fields)}, and no supported family has this type. "
        f"Supported are {', '.join(FAMILIES)}. Set model.path to a model of one of these, or add the family: "
        "docs/howto/own-family.md."
    )


def family_in(folder: Path) -> Family:
    """The family of a model folder.

    Raises:
        ModelError: as ``family_of``; config.json is missing or is no JSON object.
    """
    return family_of(_config_in(folder))


def images_in(folder: Path) -> Images | None:
    """How the model of a folder takes images; None for a text model. A text model of any type is accepted, because it
    can be sampled from.

    Raises:
        ModelError: as ``family_in``.
    """
    config = _config_in(folder)
    return family_of(config).images if "vision_config" in config else None


def has_states(folder: Path) -> bool:
    """Whether layers of the model in a folder have a recurrent state. False for a type that no family has.

    Raises:
        ModelError: as ``images_in``.
    """
    family = known_family_in(folder)
    return family is not None and family.recurrence is not None


def known_family_in(folder: Path) -> Family | None:
    """The family of a model folder; None for a type that no family has, which can only be sampled from.

    Raises:
        ModelError: as ``images_in``.
    """
    return FAMILIES.get(str(_config_in(folder).get("model_type")))


def _config_in(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}. model.path must be a Hugging Face model folder.") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} is no JSON object. Download it again.")
    return config


def images_of(image_processor: Any) -> Images:
    """How the family of an image processor takes images. Families with the same one do so in the same way.

    Raises:
        ModelError: no family in the table uses an image processor of this class.
    """
    name = type(image_processor).__name__
    for images in _IMAGES:
        if name in images.processors:
            return images
    supported = dict.fromkeys(known for images in _IMAGES for known in images.processors)
    raise ModelError(
        f"{name} is the image processor of no supported family. Supported are {', '.join(supported)}. Set "
        "model.path to a model with one of these, or add the family: docs/howto/own-family.md."
    )


def videos_of(processor: Any) -> Videos:
    """How the family of a processor takes videos in its own input.

    Raises:
        ModelError: no family with this processor has such an input.
    """
    name = type(processor).__name__
    for images in _IMAGES:
        if images.videos is not None and name in images.videos.processors:
            return images.videos
    raise _without_videos(f"{name} is the processor of a family")


def require_videos(model_type: str) -> None:
    """
    Raises:
        ModelError: models of this type have no input of their own for videos, or none that is supported.
    """
    if model_type not in _with_videos():
        raise _without_videos(f"{model_type} is a family")


def _with_videos() -> list[str]:
    return [name for name, family in FAMILIES.items() if family.images is not None and family.images.videos is not None]


def _without_videos(what: str) -> ModelError:
    return ModelError(
        f'data.video_input is "native", and {what} without an input of its own for videos, or without one that is '
        f'supported. Supported are {", ".join(_with_videos())}. Set data.video_input to "frames", or model.path to a '
        "model of one of these."
    )


def require_pictures(images: Images | None, device: str) -> None:
    """
    Raises:
        ModelError: vLLM masks the pictures of this family differently on this device.
    """
    if device == "cpu" and images is not None and images.both_ways:
        raise ModelError(
            "the tokens of a picture attend to each other in both directions, and vLLM 0.32 on a CPU lets them attend "
            "only to those before them: it would sample from another model. Use a GPU (resources.device), or choose "
            "another model (model.path, or model.tiny.family for a tiny one)."
        )


def require_adapters(family: Family | None, device: str) -> None:
    """
    Raises:
        ModelError: vLLM cannot sample from adapters of this family on this device.
    """
    if device == "cpu" and family is not None and family.experts is not None:
        raise ModelError(
            "model.lora is set, the model has experts, and vLLM 0.32 has kernels for adapters of such models on GPUs "
            "only. Use a GPU (resources.device), or set model.lora to null."
        )


def is_of_tower(tensor: str) -> bool:
    """Whether a tensor of this name belongs to a vision tower."""
    return any(images.owns(tensor) for images in _IMAGES)


def _peculiarities(config: Mapping[str, Any]) -> str:
    """Unusual features of an unsupported model, for the error message."""
    text, vision = (config.get(part) or {} for part in ("text_config", "vision_config"))
    kinds = sorted(set(text.get("layer_types") or config.get("layer_types") or ()) - {"full_attention"})
    deepstack = list(vision.get("deepstack_visual_indexes") or ())
    layers = f" with {', '.join(kinds)} layers" if kinds else ""
    features = f", feeds its vision layers {deepstack} into several decoder layers (deepstack)" if deepstack else ""
    return layers + features
