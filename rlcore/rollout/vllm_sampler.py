"""The only file that knows vLLM (0.26 to 0.32): an in-process engine that samples, and takes new weights in place."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from rlcore.config import ExperimentConfig
from rlcore.data.images import ImageStore
from rlcore.data.prompts import PromptBuilder
from rlcore.errors import SamplerError
from rlcore.ports import SampledGroup, SampleRequest
from rlcore.types import Completion, FinishReason, ImageRef

if TYPE_CHECKING:
    from vllm import LLM

    from rlcore.models.merge import CanarySequence


class VllmSampler:
    """One engine on one device. Implements ``ports.Sampler``.

    ``load_weights`` has to be called before the first ``generate``, so that the weights have a version.
    """

    def __init__(
        self,
        model: Path,
        config: ExperimentConfig,
        *,
        prompts: PromptBuilder,
        images: ImageStore,
        device: str,
        temperature: float | None = None,
        top_p: float | None = None,
        join_world: bool = True,
    ) -> None:
        """
        Args:
            temperature, top_p: of this sampler, where they differ from ``config.rollout`` (evaluation).
            join_world: the calling process is one rank of a torch.distributed world, which the engine joins.
        """
        rollout = config.rollout
        self._prompts, self._images, self._device = prompts, images, device
        self._version: int | None = None
        self._asleep = False
        self._params = {
            "temperature": rollout.temperature if temperature is None else temperature,
            "top_p": rollout.top_p if top_p is None else top_p,
            "top_k": rollout.top_k,
            "max_tokens": rollout.max_completion_tokens,
            "logprobs": 0,  # of the sampled token alone
            "flat_logprobs": True,
            "detokenize": False,
            "logit_bias": {token: -100.0 for token in prompts.banned_token_ids} or None,
        }
        self._llm = build_engine(
            model,
            device=device,
            join_world=join_world,
            max_model_len=config.max_sequence_tokens,
            max_num_seqs=rollout.max_sequences,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            kv_cache_mib=rollout.kv_cache_mib,
            enforce_eager=rollout.enforce_eager or device == "cpu",
            seed=config.seed,
            images_per_prompt=MAX_IMAGES if prompts.image_token_id is not None else 0,
            min_pixels=config.data.min_pixels,
            max_pixels=config.data.max_pixels,
            trust_remote_code=config.model.trust_remote_code,
            dtype="float32" if device == "cpu" else "bfloat16",
        )

    def generate(self, requests: Sequence[SampleRequest]) -> list[SampledGroup]:
        """Sample every request; groups and completions come back in the order asked for.

        Raises:
            SamplerError: no weights yet, asleep, or the engine expanded a prompt to other tokens than the trainer will.
        """
        from vllm import SamplingParams

        if self._version is None or self._asleep:
            raise SamplerError("the sampler holds no current weights: call load_weights (and wake) before generate")
        outputs = self._llm.generate(
            [self._prompt(request) for request in requests],
            [SamplingParams(n=r.count, seed=r.seed & 0x7FFFFFFF, **self._params) for r in requests],
            use_tqdm=False,
        )
        return [self._group(r, output) for r, output in zip(requests, outputs, strict=True)]

    def _prompt(self, request: SampleRequest) -> Any:
        problem = request.problem
        tokens = self._prompts.unexpanded_tokens(problem.question, len(problem.images))
        return engine_prompt(tokens.tolist(), problem.images, self._images)

    def _group(self, request: SampleRequest, output: Any) -> SampledGroup:
        expected = self._prompts.tokens(request.problem)
        if not np.array_equal(expected, output.prompt_token_ids):
            raise SamplerError(
                f"problem {request.problem.problem_id}: vLLM sees a prompt of {len(output.prompt_token_ids)} tokens, "
                f"the trainer one of {len(expected)}. Image resizing differs between the two; "
                "check that data.min_pixels and data.max_pixels are those the dataset was prepared with."
            )
        samples = sorted(output.outputs, key=lambda sample: sample.index)
        texts = self._prompts.tokenizer.batch_decode([s.token_ids for s in samples], skip_special_tokens=True)
        return SampledGroup(
            prompt_token_ids=expected,
            completions=tuple(
                Completion(
                    token_ids=np.asarray(s.token_ids, np.int32),
                    logprobs=np.asarray(s.logprobs.logprobs, np.float32),
                    text=text,
                    finish_reason=_finish_reason(s.finish_reason),
                    policy_version=cast(int, self._version),
                )
                for s, text in zip(samples, texts, strict=True)
            ),
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> tuple[float, float]:
        """Take Hugging Face tensors in place, drop every cache that depends on weights, and prove the result.

        Returns:
            The checksum (sum, sum of squares; float64) of the tensors that came in.

        Raises:
            SamplerError: the engine's parameters do not have the checksum of what was sent.
        """
        sent = Checksum()
        dtype = torch.float32 if self._device == "cpu" else torch.bfloat16

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, value in weights:  # lm_head.weight included, tied or not: vLLM on CPU holds a second copy
                sent.add(value.to(dtype))
                yield name, value

        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": counted(), "is_checkpoint_format": True})
        self._llm.reset_prefix_cache()
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()
        held = Checksum()
        for value in held_weights(_engine_model(self._llm)):
            held.add(value)
        if not sent.matches(held):
            raise SamplerError(
                f"after the weight sync to version {version} the sampler's parameters sum to {held}, the trainer's to "
                f"{sent}: not every weight arrived. Check that vLLM loads each tensor of this architecture by its "
                "Hugging Face name."
            )
        self._version = version
        return sent.total, sent.squares

    def keep_loaded_weights(self, version: int) -> None:
        """Sample from the weights of the model folder itself."""
        self._version = version

    def sleep(self) -> None:
        """Give the engine's GPU memory back until ``wake``. On CPU nothing is held that training needs."""
        if self._device != "cpu":
            self._llm.sleep(level=2)  # the weights would be overwritten by the next sync anyway
            self._asleep = True

    def wake(self) -> Iterator[None]:
        """A generator of two stops: weights are back (load them now), then the key-value cache is back."""
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        yield
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        yield


class Checksum:
    """Sum and sum of squares over tensors in float64: equal for fused and unfused, padded and unpadded layouts."""

    def __init__(self) -> None:
        self.total = 0.0
        self.squares = 0.0

    def add(self, value: Tensor) -> None:
        wide = value.detach().double()
        self.total += float(wide.sum())
        self.squares += float((wide * wide).sum())

    def matches(self, other: Checksum) -> bool:
        """Equal up to the order of summation."""
        scale = max(1.0, self.squares)
        return abs(self.squares - other.squares) <= 1e-9 * scale and abs(self.total - other.total) <= 1e-9 * scale

    def __str__(self) -> str:
        return f"{self.total:.9g} (squares {self.squares:.9g})"


MAX_IMAGES = 8  # per prompt


def build_engine(
    model: Path,
    *,
    device: str,
    join_world: bool,
    max_model_len: int,
    max_num_seqs: int,
    gpu_memory_utilization: float,
    kv_cache_mib: int,
    enforce_eager: bool,
    seed: int,
    images_per_prompt: int,
    min_pixels: int,
    max_pixels: int,
    trust_remote_code: bool,
    dtype: str,
) -> LLM:
    """A vLLM engine in this process, with what every engine of ours shares.

    Args:
        join_world: RANK, WORLD_SIZE and MASTER_* are set and the engine is one rank of that world; else it makes a
            world of one.
    """
    set_engine_environment(device)
    from vllm import LLM

    _register_model_class(model)
    if not join_world:
        _world_of_one()
    options: dict[str, Any] = {}
    if images_per_prompt:
        options["limit_mm_per_prompt"] = {"image": images_per_prompt, "video": 0}
        options["mm_processor_kwargs"] = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        options["skip_mm_profiling"] = True
    if device == "cpu":
        options["kv_cache_memory_bytes"] = kv_cache_mib << 20
        # a prompt prefilled in parts draws a token that vLLM then takes back by rewinding the request's generator,
        # which CPU generators cannot do
        options["enable_chunked_prefill"] = False
    else:
        options["enable_sleep_mode"] = True
        options["gpu_memory_utilization"] = gpu_memory_utilization
    return LLM(
        model=str(model),
        # not "dummy": that fills the buffers too, such as the means and deviations that images are normalised by,
        # and no later weight sync would put them right
        load_format="auto",
        dtype=cast(Any, dtype),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(8192, max_model_len),
        enforce_eager=enforce_eager,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        seed=seed,
        trust_remote_code=trust_remote_code,
        disable_log_stats=True,
        distributed_executor_backend="external_launcher",  # this process is the worker; nothing is started
        **options,
    )


def set_engine_environment(device: str) -> None:
    """What vLLM and torch read from the environment; before either is imported."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if device == "cpu":
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _world_of_one() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def engine_prompt(token_ids: Sequence[int], images: Sequence[ImageRef], store: ImageStore) -> dict[str, Any]:
    """vLLM's input for one prompt: one placeholder token per image, images named by their hash."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
    if images:
        prompt["multi_modal_data"] = {"image": [store.read(image) for image in images]}
        prompt["multi_modal_uuids"] = {"image": [image.sha256 for image in images]}
    return prompt


def vllm_sequence_logprobs(
    model: Path, sequences: Sequence[CanarySequence], dataset: Path, config: ExperimentConfig, device: str
) -> list[list[float]]:
    """Log-probs (nats, temperature 1) of each sequence's completion tokens under a model folder, as vLLM loads it."""
    from vllm import SamplingParams

    layout = json.loads((model / "config.json").read_text())
    llm = build_engine(
        model,
        device=device,
        join_world=False,
        max_model_len=max(len(s.token_ids) for s in sequences) + 8,
        max_num_seqs=16,
        gpu_memory_utilization=0.5,
        kv_cache_mib=64,
        enforce_eager=True,
        seed=0,
        images_per_prompt=MAX_IMAGES if "vision_config" in layout else 0,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
        trust_remote_code=config.model.trust_remote_code,
        dtype="float32" if device == "cpu" else "bfloat16",
    )
    store = ImageStore(dataset)
    prompts = [
        engine_prompt(collapse_images(s.token_ids, layout.get("image_token_id")), s.images, store) for s in sequences
    ]
    outputs = llm.generate(
        cast(Any, prompts),
        SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    return [
        [output.prompt_logprobs[t][s.token_ids[t]].logprob for t in range(s.completion_start, len(s.token_ids))]
        for s, output in zip(sequences, outputs, strict=True)
    ]


def collapse_images(token_ids: Sequence[int], image_token_id: int | None) -> list[int]:
    """One placeholder per run of image tokens, as vLLM takes prompts."""
    return [t for i, t in enumerate(token_ids) if t != image_token_id or i == 0 or token_ids[i - 1] != image_token_id]


def _finish_reason(reason: str | None) -> FinishReason:
    return cast(FinishReason, reason) if reason in ("stop", "length") else "abort"


def _engine_model(llm: LLM) -> torch.nn.Module:
    """The engine's own module, in this process."""
    found = llm.apply_model(lambda model: model)
    return found[0]


def held_weights(model: torch.nn.Module) -> Iterator[Tensor]:
    """Every weight that the engine computes with, a tied one once per use, as a Hugging Face state dict counts it.

    On CPU vLLM packs linear weights into its kernels' own format and keeps, or drops, the parameter beside it. What
    the kernel holds is read through the kernel: the identity matrix times the weight.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = list(model.modules())
    tied = not any(isinstance(module, ParallelLMHead) for module in modules)
    for module in modules:
        for name, value in module.named_parameters(recurse=False):
            packed = getattr(module, "cpu_linear", None) if name == "weight" else None
            if isinstance(module, ParallelLMHead) or value.numel() == 0:
                yield _through_kernel(module, packed, value)
                continue
            yield value
            if tied and isinstance(module, VocabParallelEmbedding):
                yield _through_kernel(module, packed, value)


def _through_kernel(module: Any, kernel: Any, weight: Tensor) -> Tensor:
    if kernel is None:
        return weight
    inputs = module.embedding_dim if hasattr(module, "embedding_dim") else module.input_size_per_partition
    held: Tensor = kernel(torch.eye(inputs, dtype=weight.dtype), weight, None)
    return held


def _register_model_class(model: Path) -> None:
    """Tell vLLM the class itself: by name it would start a process that imports vLLM again, to look at it."""
    from vllm import ModelRegistry

    for name in json.loads((model / "config.json").read_text()).get("architectures", []):
        entry = ModelRegistry.models.get(name)
        if entry is not None and hasattr(entry, "load_model_cls"):
            ModelRegistry.register_model(name, entry.load_model_cls())
