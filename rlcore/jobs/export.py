"""``python -m rlcore.jobs.export spec.json``: a merged model as a Hugging Face folder in another dtype."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from rlcore.artifacts import ModelRef
from rlcore.files import VERIFIED, building, folder_digest
from rlcore.jobs import job_main
from rlcore.models.loading import empty_hf_model
from rlcore.models.stored_weights import StoredWeights, write_shards
from rlcore.specs import ExportSpec

_SHARD_BYTES = 4 << 30  # of a safetensors file, and the most that is in memory


def export(spec: ExportSpec) -> ModelRef:
    """The job: every floating-point tensor rounded to ``spec.dtype``, one file at a time. Other files are copied."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    source = Path(spec.model.path)
    model = empty_hf_model(source, spec.trust_remote_code)
    stored = StoredWeights(source, model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with building(spec.out) as folder:
        shards = (
            {name: _rounded(stored.read(name), dtype) for name in names}
            for names in stored.buckets(_SHARD_BYTES, dtype)
        )
        write_shards(shards, stored, folder)
        for path in sorted(source.iterdir()):
            if path.is_file() and not path.name.startswith(".") and not _is_weights(path):
                shutil.copyfile(path, folder / path.name)
        _set_dtype(folder / "config.json", spec.dtype)
        digest = folder_digest(folder)
    return ModelRef(path=str(spec.out), digest=digest, source=spec.model.source, num_parameters=parameters)


def _rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _is_weights(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name in ("model.safetensors.index.json", VERIFIED)


def _set_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text())
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in {"dtype", "torch_dtype"} & section.keys():
            section[key] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    job_main(export, ExportSpec)
