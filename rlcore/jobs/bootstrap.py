"""``python -m rlcore.jobs.bootstrap spec.json``: ModelConfig -> ModelRef, a local folder that loads everywhere."""

from __future__ import annotations

import math
from pathlib import Path

from rlcore.artifacts import ModelRef
from rlcore.config import ModelConfig, TinyModelConfig
from rlcore.errors import ModelError
from rlcore.families import family_in
from rlcore.files import building, folder_digest
from rlcore.jobs import job_main
from rlcore.specs import BootstrapSpec, tiny_folder

# Files that a model needs. Never *.bin or *.pt: they are pickles, which can run code.
DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")


def bootstrap(spec: BootstrapSpec) -> ModelRef:
    """The initial policy: the embedded tiny one, an existing folder, or a download.

    Raises:
        ModelError: a folder or download without config, safetensors or chat template; a teacher with other tokens than
            its pupil.
    """
    model = spec.model
    if model.path == "tiny":
        folder = tiny_folder(spec.models_dir, model.tiny)
        if not folder.exists():
            _make_tiny(folder, model.tiny)
    elif Path(model.path).is_dir():
        folder = Path(model.path).resolve()
    else:
        folder = _download(model)
    if spec.pupil is not None:
        from rlcore.models.teacher import require_same_tokens

        trusted = {"trust_policy": spec.trust_pupil, "trust_teacher": model.trust_remote_code}
        require_same_tokens(Path(spec.pupil.path), folder, **trusted)
    return ModelRef(
        path=str(folder),
        digest=folder_digest(folder),
        source=model.path if model.revision is None else f"{model.path}@{model.revision}",
        num_parameters=_count_parameters(folder),
    )


def _make_tiny(folder: Path, config: TinyModelConfig) -> None:
    import torch

    from rlcore.models.tiny import create_tiny_policy

    # Small operations: 16 threads on 16 cores took several times as long as two. And the data is prepared meanwhile:
    # threads that find no free core wait for each other.
    torch.set_num_threads(1)
    with building(folder) as aside:  # if two runs make it at once, the first to finish counts
        create_tiny_policy(aside, config)


def _download(model: ModelConfig) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        config = hf_hub_download(model.path, "config.json", revision=model.revision)
        family_in(Path(config).parent)  # refuses an unsupported family before the download of its weights
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=list(DOWNLOADED)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{model.path!r} is no folder here and cannot be fetched as a Hugging Face id: {error}. "
            "Allowed: tiny, an existing folder, or owner/name. Check the spelling, the revision and the network."
        ) from error


def _count_parameters(folder: Path) -> int:
    """Elements of all tensors, from the headers of the safetensors files."""
    from safetensors import safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors. Convert the weights with save_pretrained.")
    total = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


if __name__ == "__main__":
    job_main(bootstrap, BootstrapSpec)
