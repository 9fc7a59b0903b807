"""The tiny policies' tokenizers and processor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ImageProcessor,
    Gemma3Processor,
    Glm4vImageProcessor,
    Glm4vProcessor,
    Glm4vVideoProcessor,
    GotOcr2ImageProcessor,
    Idefics3ImageProcessor,
    Idefics3Processor,
    InternVLProcessor,
    InternVLVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)

PictureProcessor = (
    Qwen2VLProcessor
    | Qwen2_5_VLProcessor
    | Qwen3VLProcessor
    | Glm4vProcessor
    | InternVLProcessor
    | Idefics3Processor
    | SmolVLMProcessor
    | Gemma3Processor
)

# Qwen2.5-VL's special tokens, then Qwen3's thinking marks, which are ordinary text and stay in decoded text.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# InternVL's, by the names under which its processor asks the tokenizer for them
TILE_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
TEXT_TOKENS = ("<think>", "</think>")
END_OF_TURN = "<|im_end|>"
PAD = "<|endoftext|>"
# ChatML as in Qwen2-VL, but without a default system message, which would be half the prompt at one token per byte.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_tokenizer(
    text_tokens: tuple[str, ...] = TEXT_TOKENS, named_tokens: Mapping[str, str] = MappingProxyType({})
) -> PreTrainedTokenizerFast:
    """One token per byte and no merges, so that it encodes any text without a vocabulary file.

    Args:
        named_tokens: further special tokens, each of which is an attribute of the tokenizer.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: rank for rank, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = (*SPECIAL_TOKENS, *named_tokens.values())
    specials = [AddedToken(text, special=True, normalized=False) for text in texts]
    tokenizer.add_special_tokens(specials)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in text_tokens])
    make_tokenizer: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # not annotated
    return make_tokenizer(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=[text for text in SPECIAL_TOKENS if text not in (END_OF_TURN, PAD)],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
        **({"extra_special_tokens": dict(named_tokens)} if named_tokens else {}),
    )


# Paper is 0 and ink is negative, so that an empty patch adds nothing.
_IMAGE_MEAN = [1.0, 1.0, 1.0]
_IMAGE_STD = [0.5, 0.5, 0.5]
_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 1024 * 1024}  # areas, despite the names


def build_processor(family: str | None = None) -> PictureProcessor:
    """Byte-level tokenizer, the family's image and video processors, and chat template. Needs no files.

    Args:
        family: ``model.tiny.family``.
    """
    look: dict[str, Any] = {"image_mean": _IMAGE_MEAN, "image_std": _IMAGE_STD}
    if family == "internvl":
        return _build_tile_processor(look)
    if family == "glm4v":
        return _build_glm_processor(look)
    if family == "gemma3":
        return _build_square_processor(look)
    if family in ("idefics3", "smolvlm"):
        return _build_named_tile_processor(family)
    make_processor: Callable[..., PictureProcessor] = Qwen2_5_VLProcessor
    make_video_processor: Callable[..., Any] = Qwen2VLVideoProcessor
    if family == "qwen2_vl":
        make_processor = Qwen2VLProcessor
    if family in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
        look["patch_size"] = 16
        make_processor, make_video_processor = Qwen3VLProcessor, Qwen3VLVideoProcessor
    return make_processor(
        image_processor=Qwen2VLImageProcessor(**look, size=_PIXELS),
        tokenizer=build_tokenizer(),
        video_processor=make_video_processor(**look, size=_PIXELS),
        chat_template=CHAT_TEMPLATE,
    )


TILE = 28  # pixels per side; 4 x 4 patches of 7 pixels, merged into 2 x 2 tokens, each a letter's cell
TOKENS_PER_TILE = 4


def _build_tile_processor(look: Mapping[str, Any]) -> InternVLProcessor:
    size = {"height": TILE, "width": TILE}
    make_processor: Callable[..., InternVLProcessor] = InternVLProcessor
    make_video_processor: Callable[..., Any] = InternVLVideoProcessor
    return make_processor(
        image_processor=GotOcr2ImageProcessor(**look, size=size),
        tokenizer=build_tokenizer(named_tokens=TILE_TOKENS),
        video_processor=make_video_processor(**look, size=size),
        image_seq_length=TOKENS_PER_TILE,
        chat_template=CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>"),
    )


# GLM-4.1V's, by the names under which its processor asks the tokenizer for them
GLM_TOKENS = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    **{f"{end}_{kind}_token": f"<|{end}_of_{kind}|>" for kind in ("image", "video") for end in ("begin", "end")},
}


def _build_glm_processor(look: Mapping[str, Any]) -> Glm4vProcessor:
    size = {edge: 2 * area for edge, area in _PIXELS.items()}  # of both frames of a patch
    make_processor: Callable[..., Glm4vProcessor] = Glm4vProcessor
    make_video_processor: Callable[..., Any] = Glm4vVideoProcessor
    return make_processor(
        image_processor=Glm4vImageProcessor(**look, size=size),
        tokenizer=build_tokenizer(named_tokens=GLM_TOKENS),
        video_processor=make_video_processor(**look, size=size),
        chat_template=CHAT_TEMPLATE.replace(
            "<|vision_start|><|image_pad|><|vision_end|>", "<|begin_of_image|><|image|><|end_of_image|>"
        ),
    )


_GRID = 3  # most rows and columns of named tiles
NAMED_TILE_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    **{f"tile_{r}_{c}": f"<row_{r}_col_{c}>" for r in range(1, _GRID + 1) for c in range(1, _GRID + 1)},
}


def _build_named_tile_processor(family: str) -> Idefics3Processor | SmolVLMProcessor:
    make_processor: Callable[..., Idefics3Processor | SmolVLMProcessor] = Idefics3Processor
    make_image_processor: Callable[..., Any] = Idefics3ImageProcessor
    look: dict[str, Any] = {
        "image_mean": [0.99] * 3,  # paper is only almost 0: transformers and vLLM take a tile of zeros for padding
        "image_std": _IMAGE_STD,
        "size": {"longest_edge": _GRID * TILE},
        "max_image_size": {"longest_edge": TILE},
    }
    videos: dict[str, Any] = {}
    if family == "smolvlm":
        make_processor, make_image_processor = SmolVLMProcessor, SmolVLMImageProcessor
        videos["video_processor"] = SmolVLMVideoProcessor(**look)
    return make_processor(
        image_processor=make_image_processor(**look),
        **videos,
        tokenizer=build_tokenizer(named_tokens=NAMED_TILE_TOKENS),
        image_seq_len=TOKENS_PER_TILE,
        chat_template=CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>"),
    )


# Gemma 3's, by the names under which its processor asks the tokenizer for them
SOFT_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
SQUARE = 84  # pixels per side of every picture
TOKENS_PER_SQUARE = 36
LINE_BREAKS = tuple("\n" * count for count in range(1, 5))  # vLLM asks for these tokens


def _build_square_processor(look: Mapping[str, Any]) -> Gemma3Processor:
    make_processor: Callable[..., Gemma3Processor] = Gemma3Processor
    make_image_processor: Callable[..., Any] = Gemma3ImageProcessor
    return make_processor(
        image_processor=make_image_processor(**look, size={"height": SQUARE, "width": SQUARE}),
        tokenizer=build_tokenizer(TEXT_TOKENS + LINE_BREAKS, SOFT_TOKENS),
        image_seq_length=TOKENS_PER_SQUARE,
        chat_template=CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>"),
    )


ANSWER_TOKENS = ("<answer>", "</answer>")


def build_text_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with tokens for the thinking and answer marks. Needs no files."""
    return build_tokenizer(TEXT_TOKENS + ANSWER_TOKENS)
