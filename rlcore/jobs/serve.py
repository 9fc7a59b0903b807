"""``python -m rlcore.jobs.serve spec.json``: becomes vLLM's OpenAI-compatible server of a model folder.

The server has the limits, the bounds of pictures and the prompts of a run. vLLM itself parses the words, so this file
does not import it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rlcore.config import ModelConfig
from rlcore.data.processor import load_processor
from rlcore.distributed.cluster import claim_device
from rlcore.errors import RlflowError
from rlcore.families import family_in, images_in
from rlcore.inference.chat import chat_template
from rlcore.jobs import spec_file
from rlcore.models.checkpoint_weights import CheckpointWeights
from rlcore.sampler.start import engine_dtype, fp8_of_decoder, padded_rank, set_engine_environment
from rlcore.specs import ServeSpec

MODULE = "vllm.entrypoints.openai.api_server"
KEY = "VLLM_API_KEY"  # where vLLM's server looks for its key


def command(spec: ServeSpec, device: str) -> list[str]:
    """The words of vLLM's server. Writes a chat template, and adapters if there are some, next to ``spec.result``.

    Raises:
        ModelError: the model folder cannot be used, or the server could not write the prompts of training.
    """
    experiment, model = spec.experiment, Path(spec.model)
    rollout, data = experiment.rollout, experiment.data
    trusted = experiment.model.trust_remote_code
    processor = load_processor(ModelConfig(path=spec.model, trust_remote_code=trusted))
    words: dict[str, Any] = {
        "model": spec.model,
        "served-model-name": spec.name,
        "host": spec.host,
        "port": spec.port,
        "dtype": str(engine_dtype(rollout, device)).removeprefix("torch."),
        "quantization": None if rollout.quantization is None else "online",
        "quantization-config": None if rollout.quantization is None else fp8_of_decoder(model),
        "max-model-len": experiment.max_sequence_tokens,
        "max-num-seqs": rollout.max_sequences,
        "tensor-parallel-size": rollout.tensor_parallel,
        "seed": experiment.seed,
        # the folder's own defaults, such as a repetition penalty, are not those of training
        "generation-config": "vllm",
        "override-generation-config": {"max_new_tokens": rollout.max_completion_tokens},
        "default-chat-template-kwargs": data.chat_template_arguments or None,
    }
    if not spec.plain:
        path = spec.result.with_name("chat_template.jinja")
        path.write_text(chat_template(processor, data), encoding="utf-8")
        words["chat-template"] = path
    if (images := images_in(model)) is not None:
        words["limit-mm-per-prompt"] = {"image": data.max_images, "video": 0}
        words["mm-processor-kwargs"] = images.engine_options(
            processor.image_processor, data.min_pixels, data.max_pixels
        )
        words["chat-template-content-format"] = "openai"
    if device == "cpu":
        words["kv-cache-memory-bytes"] = rollout.kv_cache_mib << 20
    else:
        words["gpu-memory-utilization"] = spec.gpu_memory_utilization
    flags = ["--enforce-eager"] if rollout.enforce_eager or device == "cpu" else []
    flags += ["--no-enable-chunked-prefill"] if device == "cpu" else []
    flags += ["--trust-remote-code"] if trusted else []
    if spec.checkpoint is not None:
        folder = spec.result.with_name("adapter")
        rank = write_adapter(Path(spec.checkpoint.path), model, folder, trust_remote_code=trusted)
        words |= {"served-model-name": f"{spec.name}-base", "max-lora-rank": padded_rank(rank), "max-loras": 1}
        flags += ["--enable-lora", "--lora-modules", f"{spec.name}={folder}"]
        if (adapted := family_in(model).adapted) is not None:
            flags += ["--lora-target-modules", *adapted]
        if experiment.model.lora is not None and experiment.model.lora.vision_tower:
            flags += ["--enable-tower-connector-lora"]
    return [sys.executable, "-m", MODULE, *_options(words), *flags, *spec.words]


def _options(words: dict[str, Any]) -> list[str]:
    given = {name: value for name, value in words.items() if value is not None}
    texts = {name: json.dumps(value) if isinstance(value, dict) else str(value) for name, value in given.items()}
    return [word for name, text in texts.items() for word in (f"--{name}", text)]


def write_adapter(checkpoint: Path, base: Path, folder: Path, *, trust_remote_code: bool = False) -> int:
    """Write a checkpoint's adapters in PEFT's format, and return their rank.

    Raises:
        CheckpointError: the checkpoint has none, or does not fit ``base``.
    """
    weights = CheckpointWeights(checkpoint, base, trust_remote_code=trust_remote_code)
    adapters, alpha = weights.adapters()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {f"base_model.model.{name}": value.contiguous() for name, value in adapters.items()},
        folder / "adapter_model.safetensors",
    )
    rank = min(min(value.shape) for value in adapters.values())
    modules = {name.rpartition(".lora_")[0] for name in adapters}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in modules}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return rank


def main() -> None:
    """Replace this process by the server."""
    spec = ServeSpec.model_validate_json(spec_file("rlcore.jobs.serve").read_text())
    try:
        device = claim_device(spec.experiment, spec.experiment.rollout.tensor_parallel, inherited=True)
        set_engine_environment(device)
        words = command(spec, device)
    except RlflowError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    # the server runs its engine in a process of its own, and tells when it is ready
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        os.environ.pop(name, None)
    if spec.key_variable is not None:
        os.environ[KEY] = os.environ[spec.key_variable]
    os.execv(words[0], words)


if __name__ == "__main__":
    main()
