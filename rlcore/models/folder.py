"""Facts about a Hugging Face model folder, without loading the model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rlcore.errors import ModelError

VERIFIED = "verified.json"  # left by a merge in a folder that it verified


def folder_digest(folder: Path) -> str:
    """Hash of the names and contents of a model folder's files, hidden files and ``VERIFIED`` excepted."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != VERIFIED):
        if path.name.startswith("."):
            continue
        with path.open("rb") as file:
            digest.update(f"{path.relative_to(folder).as_posix()} ".encode())
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def count_parameters(folder: Path) -> int:
    """Elements of all tensors, from the headers of the safetensors files."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors. Convert the weights with save_pretrained.")
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                size = 1
                for side in tensors.get_slice(name).get_shape():
                    size *= side
                total += size
    return total
