"""A copy of a model folder with the first decoder layers only, for what would take too long with all of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rlcore.models.loading import empty_hf_model, load_hf_config
from rlcore.models.stored_weights import StoredWeights, write_shards

_NOT_COPIED = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.gguf")
_SHARD_BYTES = 4 << 30


def num_layers(folder: Path, trust_remote_code: bool = False) -> int:
    """Decoder layers of the model in a folder."""
    return int(load_hf_config(folder, trust_remote_code).get_text_config().num_hidden_layers)


def cut_layers(folder: Path, out: Path, trust_remote_code: bool = False) -> int:
    """Fill ``out`` with the model of ``folder``, cut to its first decoder layers; return how many they are: two, or as
    many as it takes to have each kind of layer. The vision tower, embeddings and LM head stay whole.

    Raises:
        ModelError: the folder cannot be read.
    """
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns(*_NOT_COPIED), dirs_exist_ok=True)
    config = load_hf_config(folder, trust_remote_code)
    text = config.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or [])
    layers: int = min(text.num_hidden_layers, max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    text.num_hidden_layers = layers
    if kinds:
        text.layer_types = kinds[:layers]
    config.save_pretrained(out)
    stored = StoredWeights(folder, empty_hf_model(folder, trust_remote_code))
    kept = empty_hf_model(out, trust_remote_code).state_dict().keys()

    def buckets() -> Iterator[dict[str, Tensor]]:
        for names in stored.buckets(_SHARD_BYTES, torch.float32):
            if bucket := {name: stored.read(name).clone() for name in names if name in kept}:
                yield bucket

    write_shards(buckets(), stored, out)
    return layers
