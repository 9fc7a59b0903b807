"""Model folders with random weights, laid out as hubs distribute them.

The embedded tiny policies are saved by this environment's own transformers, so they hide what a downloaded folder has:

- more embedding rows than tokenizer entries (151,936 for 151,665 in Qwen2.5)
- an LM head tied to the embedding, and so absent from the files
- weights in bfloat16, in several safetensors files with an index, under the names of older transformers
- config.json in the flat layout and with the older rope keys, or nested with the newer ones
- ``sliding_window`` set and switched off
- several end-of-sequence ids in generation_config.json
- a chat template with a default system text, in tokenizer_config.json and in chat_template.json
- an image processor with its own, very wide, pixel limits
- added tokens, and no padding token
- Python files for ``trust_remote_code`` that are not needed

``python -m tests.downloaded SHAPE FOLDER`` writes one, with weights made on the GPU if there is one.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from rlcore.data.tiny import SPECIAL_TOKENS

DEFAULT_SYSTEM = "You are a helpful assistant."
ADDED = (
    *SPECIAL_TOKENS,
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
ORDINARY_ADDED = frozenset(ADDED[len(SPECIAL_TOKENS) :])  # kept when special tokens are removed from a text
CHAT_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\nDEFAULT_SYSTEM<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
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
""".replace("DEFAULT_SYSTEM", DEFAULT_SYSTEM)


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int  # rows of the embedding
    tokenizer: int  # entries, added tokens included
    shard_bytes: int
    mrope: tuple[int, int, int] | None = None  # None: a text model
    vision: tuple[int, int, int, int] = (0, 0, 0, 0)  # depth, hidden, intermediate, heads
    full_attention: tuple[int, ...] = ()  # vision blocks that see the whole picture
    tied: bool = True


_TINY = Shape(128, 256, 2, 4, 2, vocabulary=640, tokenizer=599, shard_bytes=400_000)
_QWEN = {"vocabulary": 151_936, "tokenizer": 151_665, "shard_bytes": 4_000_000_000}
_TOWER = {"mrope": (16, 24, 24), "vision": (32, 1280, 3420, 16), "full_attention": (7, 15, 23, 31)}
SHAPES = {
    "tiny-text": _TINY,
    "tiny-vl": Shape(
        *(128, 256, 2, 4, 2, 640, 599, 400_000),
        mrope=(4, 6, 6),
        vision=(2, 64, 128, 4),
        full_attention=(1,),
    ),
    "text-1.5b": Shape(1536, 8960, 28, 12, 2, **_QWEN),
    "vl-3b": Shape(2048, 11_008, 36, 16, 2, **_QWEN, **_TOWER),
    "text-7b": Shape(3584, 18_944, 28, 28, 4, **(_QWEN | {"vocabulary": 152_064}), tied=False),
    "vl-7b": Shape(3584, 18_944, 28, 28, 4, **(_QWEN | {"vocabulary": 152_064}), **_TOWER, tied=False),
    "vl-32b": Shape(
        *(5120, 27_648, 64, 40, 8),
        **(_QWEN | {"vocabulary": 152_064}),
        **(_TOWER | {"vision": (32, 1280, 3456, 16)}),
        tied=False,
    ),
    "vl-72b": Shape(
        *(8192, 29_568, 80, 64, 8),
        **(_QWEN | {"vocabulary": 152_064}),
        **(_TOWER | {"vision": (32, 1280, 3456, 16)}),
        tied=False,
    ),
}


def make_downloaded(
    folder: Path,
    name: str,
    *,
    rope_keys: Literal["older", "newer"] = "older",
    seed: int = 0,
    device: str = "cpu",
) -> Path:
    """Write the folder of the shape called ``name`` and return it.

    Args:
        rope_keys: older: ``rope_theta`` and ``rope_scaling`` in a flat config.json, weights named ``visual.*`` and
            ``model.layers.*``; newer: ``rope_parameters``, nested under ``text_config`` where there is a vision tower.
        device: where random weights are made.
    """
    shape = SHAPES[name]
    folder.mkdir(parents=True)
    ids = _write_tokenizer(folder, shape)
    config = _config(shape, ids, rope_keys)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generation = {
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "do_sample": True,
        "repetition_penalty": 1.05,
        "temperature": 0.000001,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
    if shape.mrope is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(_IMAGE_PROCESSOR, indent=2))
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    (folder / "modeling_custom.py").write_text("raise RuntimeError('remote code was run without being asked for')\n")
    _write_weights(folder, shape, _weights(folder, shape, rope_keys, seed, device))
    return folder


_IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def _vocabulary(size: int) -> Iterator[str]:
    """Bytes, then letter pairs, triples and fours: each is one merge of two entries before it."""
    yield from sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_lowercase
    words = ("".join(word) for length in (2, 3, 4) for word in product(letters, repeat=length))
    yield from islice(words, size - 256)


def _write_tokenizer(folder: Path, shape: Shape) -> dict[str, int]:
    """Returns the ids of the added tokens."""
    entries = list(_vocabulary(shape.tokenizer - len(ADDED)))
    vocab = {entry: rank for rank, entry in enumerate(entries)}
    merges = [(entry[:-1], entry[-1]) for entry in entries if len(entry) > 1]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for text in ADDED:  # one by one: special and ordinary ones keep their order
        token = AddedToken(text, special=text not in ORDINARY_ADDED, normalized=False)
        (tokenizer.add_tokens if text in ORDINARY_ADDED else tokenizer.add_special_tokens)([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: int(tokenizer.token_to_id(text)) for text in ADDED}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(" ".join(merge) for merge in merges))
    described = {
        str(index): {"content": text, "special": text not in ORDINARY_ADDED, "normalized": False}
        | dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
        for text, index in ids.items()
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": described,
        "eos_token": "<|im_end|>",
        "pad_token": None,
        "unk_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131_072,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return ids


def _config(shape: Shape, ids: dict[str, int], rope_keys: str) -> dict[str, Any]:
    text: dict[str, Any] = {
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 32_768,
        "max_window_layers": shape.layers,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "rms_norm_eps": 1e-6,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
    }
    rope = {"rope_theta": 1e6}
    if shape.mrope is None:
        kind = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    else:
        kind = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
        rope["rope_scaling"] = {"type": "mrope", "mrope_section": list(shape.mrope)}  # type: ignore[assignment]
    if rope_keys == "newer":
        rope = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}  # type: ignore[dict-item]
        if shape.mrope is not None:
            rope["rope_parameters"]["mrope_section"] = list(shape.mrope)  # type: ignore[index]
    text |= rope
    common = {
        **kind,
        "tie_word_embeddings": shape.tied,
        ("dtype" if rope_keys == "newer" else "torch_dtype"): "bfloat16",
        "transformers_version": "4.41.2" if rope_keys == "older" else "5.17.0",
        "auto_map": {"AutoModelForCausalLM": "modeling_custom.CustomModel"},
    }
    if shape.mrope is None:
        return common | text
    depth, hidden, intermediate, heads = shape.vision
    tower = {
        "depth": depth,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_heads": heads,
        "in_chans": 3,
        "out_hidden_size": shape.hidden,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": list(shape.full_attention),
        "tokens_per_second": 2,
    }
    placeholders = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    nested = text if rope_keys == "older" else {"text_config": {"model_type": "qwen2_5_vl_text", **text}}
    return common | nested | placeholders | {"vision_config": tower}


def _weights(folder: Path, shape: Shape, rope_keys: str, seed: int, device: str) -> Iterator[tuple[str, Tensor]]:
    """bfloat16, by the file's names; matrices with deviation 1 / sqrt(inputs), norms 1, biases small."""
    from rlcore.models.checkpoint import untied_tensors
    from rlcore.models.loading import empty_hf_model

    generator = torch.Generator(device).manual_seed(seed)
    for name, value in untied_tensors(empty_hf_model(folder))[0].items():
        deviation = value[0].numel() ** -0.5 if value.dim() > 1 else 0.02
        drawn = torch.randn(value.shape, generator=generator, device=device) * deviation
        if value.dim() == 1 and "norm" in name:
            drawn = torch.ones(value.shape)
        if shape.mrope is not None and rope_keys == "older":
            name = name.removeprefix("model.") if name.startswith("model.visual.") else name
            name = name.replace("model.language_model.", "model.")
        yield name, drawn.to("cpu", torch.bfloat16)


def _write_weights(folder: Path, shape: Shape, weights: Iterator[tuple[str, Tensor]]) -> None:
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    total = 0

    def end_shard() -> None:
        save_file(shard, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, value in weights:
        if shard and sum(tensor.nbytes for tensor in shard.values()) + value.nbytes > shape.shard_bytes:
            end_shard()
        shard[name], total = value, total + value.nbytes
    end_shard()
    places = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


if __name__ == "__main__":
    make_downloaded(Path(sys.argv[2]), sys.argv[1], device="cuda" if torch.cuda.is_available() else "cpu")
