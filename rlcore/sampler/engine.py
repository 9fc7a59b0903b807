"""The only file that imports vLLM (0.26 to 0.32): an engine in this process, its weights, its adapter, its caches."""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor

from rlcore.config import ExperimentConfig, RolloutConfig
from rlcore.data.image_store import ImageStore
from rlcore.errors import SamplerError
from rlcore.families import images_in
from rlcore.process import importing_vllm
from rlcore.types import ImageRef

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from rlcore.models.probe import ProbeSequence

T = TypeVar("T")

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's adapter buffers can have; smaller ranks are padded
_ADAPTER = 1  # the one adapter's id


class Engine:
    """One vLLM engine, in this process."""

    def __init__(self, model: Path, config: ExperimentConfig, device: str, *, join_world: bool) -> None:
        """
        Args:
            join_world: RANK, WORLD_SIZE and MASTER_* are set and the engine is one rank of that world; else it makes a
                world of one. With ``rollout.tensor_parallel`` that many neighbours in the world hold the engine
                together: each of them builds it and makes every call alike.
        """
        set_engine_environment(device)
        with importing_vllm():
            from vllm import LLM

        rollout, self.config, self.device = config.rollout, config, device
        self.dtype = cast(torch.dtype, getattr(torch, engine_dtype(device, rollout.dtype)))
        _register_model_class(model)
        gc.freeze()  # vLLM collects garbage five times while it starts, among objects that the imports made and keep
        if not join_world:
            _world_of_one()
        options: dict[str, Any] = {}
        if (images := images_in(model)) is not None:
            options["limit_mm_per_prompt"] = {"image": config.data.max_images, "video": 0}
            options["mm_processor_kwargs"] = images.engine_options(config.data.min_pixels, config.data.max_pixels)
            options["skip_mm_profiling"] = True
        if device == "cpu":
            options["kv_cache_memory_bytes"] = rollout.kv_cache_mib << 20
            # a prompt prefilled in parts samples a token that vLLM then takes back by rewinding the request's
            # generator, which CPU generators cannot do
            options["enable_chunked_prefill"] = False
        else:
            options["enable_sleep_mode"] = rollout.sleep != "never"
            options["gpu_memory_utilization"] = rollout.gpu_memory_utilization
            # its own kernels for that look for the other devices in this process, which sees one
            options["disable_custom_all_reduce"] = rollout.tensor_parallel > 1
            # vLLM's own sizes end at 512 sequences, and beyond the last one every layer is launched by itself
            options["compilation_config"] = {"cudagraph_capture_sizes": capture_sizes(rollout.max_sequences)}
        if (lora := config.model.lora) is not None:
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": padded_rank(lora.rank)}
            if lora.vision_tower:
                options["enable_tower_connector_lora"] = True
        gloo = device == "cpu" and rollout.tensor_parallel > 1
        self.llm = LLM(
            model=str(model),
            # not "dummy": that fills the buffers too, such as the means and deviations that images are normalised by,
            # and no later weight sync would put them right
            load_format="auto",
            dtype=cast(Any, engine_dtype(device, rollout.dtype)),
            max_model_len=config.max_sequence_tokens,
            max_num_seqs=rollout.max_sequences,
            max_num_batched_tokens=max(8192 if device == "cpu" else 16384, config.max_sequence_tokens),
            enforce_eager=rollout.enforce_eager or device == "cpu",
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            seed=config.seed,
            trust_remote_code=config.model.trust_remote_code,
            disable_log_stats=True,
            tensor_parallel_size=rollout.tensor_parallel,
            # this process is the worker; nothing is started
            distributed_executor_backend=_launcher() if gloo else "external_launcher",
            **options,
        )

    @property
    def core(self) -> Any:
        """What schedules and runs the requests, in this process."""
        return cast(Any, self.llm.llm_engine.engine_core).engine_core

    def enqueue(
        self, prompts: Sequence[dict[str, Any]], params: Sequence[Any], adapter: LoRARequest | None
    ) -> list[list[str]]:
        """Add requests to the engine without running it; the names of each one's samples, in their order."""
        names = self.llm.enqueue(cast(Any, prompts), params, use_tqdm=False, lora_request=adapter)
        return [
            [name] if of.n == 1 else [f"{sample}_{name}" for sample in range(of.n)]
            for name, of in zip(names, params, strict=True)
        ]

    def waiting_prompt(self, name: str) -> Sequence[int]:
        """The prompt of an enqueued sample, as the engine expanded it."""
        return cast(Sequence[int], self.core.scheduler.requests[name].prompt_token_ids)

    def forget_outputs(self) -> None:
        """Drop what the engine keeps of samples to turn into its own kind of output."""
        outputs = self.llm.llm_engine.output_processor
        outputs.abort_requests(list(outputs.request_states), internal=True)
        outputs.abort_requests(list(outputs.parent_requests), internal=True)

    def reset_caches(self) -> None:
        """Drop everything that was computed with weights: key-value blocks, pictures, their features."""
        self.llm.reset_prefix_cache()
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def install_adapter(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Put an adapter into the engine's buffers in the place of the one before, from memory to memory.

        Args:
            tensors: ``<module>.lora_A.weight`` and ``<module>.lora_B.weight`` by Hugging Face's module names, B times
                alpha / rank. Owned by the engine from here on.

        What a file on disk would go through is left out; the rest is vLLM's own way of adding an adapter: names and
        fused layers (q, k, v -> qkv) are its model's mapping, and ``activate_adapter`` copies into the slot that
        requests use.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self._adapter_manager()
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        for renames_alone in ("get_rename_mapper", "get_unstacked_mapper"):  # 0.32, 0.27: without fused layers
            if hasattr(mapper, renames_alone):
                mapper = getattr(mapper, renames_alone)()
                break
        adapter = LoRAModel.from_lora_tensors(
            lora_model_id=_ADAPTER,
            tensors={f"base_model.model.{name}": value for name, value in tensors.items()},
            peft_helper=PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # their ratio is 1: the scale is in B
            device=str(next(iter(tensors.values())).device),
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper,
        )
        manager.remove_adapter(_ADAPTER)
        manager.add_adapter(adapter)
        manager.activate_adapter(_ADAPTER)

    def held_adapter(self) -> Iterator[Tensor]:
        """Every adapter buffer that the engine computes with; what is padding, or of no adapted layer, holds zeros."""
        for module in self._adapter_manager().modules.values():
            yield from (*module.lora_a_stacked, *module.lora_b_stacked)

    def _adapter_manager(self) -> Any:
        """vLLM's LoRAModelManager of the worker that lives in this process."""
        (manager,) = self.llm.collective_rpc(lambda worker: worker.model_runner.lora_manager._adapter_manager)
        return manager

    def held_weights(self) -> Iterator[Tensor]:
        """Every weight that the engine computes with, a tied one once per use, as a Hugging Face state dict counts it.

        On CPU vLLM packs linear weights into its kernels' own format and keeps, or drops, the parameter beside it. What
        the kernel holds is read through the kernel: the identity matrix times the weight.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        modules = list(self.llm.apply_model(lambda model: model)[0].modules())
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


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record CUDA graphs for: above 64 sequences at most an eighth of a batch is padding."""
    above = [size * step // 8 for size in (64 << k for k in range(10)) for step in range(9, 17)]
    return sorted({size for size in (1, 2, 4, *range(8, 65, 8), *above) if size < max_num_seqs} | {max_num_seqs})


def set_engine_environment(device: str) -> None:
    """What vLLM and torch read from the environment; before vLLM is imported."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if device == "cpu":
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    else:
        # its runner that keeps requests on the device: steps can be queued behind each other, and all sequences draw
        # by seed and position in one kernel, where the other one calls a generator for each sequence and token
        defaults["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        defaults["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # as disable_custom_all_reduce
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        # torch may have read it already; vLLM would then have a C++ compiler at work for half a minute
        torch._dynamo.config.disable = True


def engine_dtype(device: str, asked: str = "auto") -> str:
    """What an engine computes in (``rollout.dtype``)."""
    if asked != "auto":
        return asked
    return "float32" if device == "cpu" else "bfloat16"


def sampling_params(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**options)


def engine_prompt(token_ids: Sequence[int], images: Sequence[ImageRef], store: ImageStore) -> dict[str, Any]:
    """vLLM's input for one prompt: one placeholder token per image, images named by their hash."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
    if images:
        prompt["multi_modal_data"] = {"image": [store.read(image) for image in images]}
        prompt["multi_modal_uuids"] = {"image": [image.sha256 for image in images]}
    return prompt


def over_engine(value: T) -> list[T]:
    """What each rank that holds this process's engine gives. Collective, on the host."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group().cpu_group
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def vllm_sequence_logprobs(
    model: Path, sequences: Sequence[ProbeSequence], dataset: Path, config: ExperimentConfig, device: str
) -> list[list[float]]:
    """Log-probs (nats, temperature 1) of each sequence's completion tokens under a model folder, as vLLM loads it."""
    update = {
        "seed": 0,
        "data": config.data.model_copy(update={"max_prompt_tokens": max(len(s.token_ids) for s in sequences)}),
        "model": config.model.model_copy(update={"lora": None}),
        "rollout": RolloutConfig(
            max_completion_tokens=8,
            max_sequences=16,
            gpu_memory_utilization=0.5,
            kv_cache_mib=64,
            enforce_eager=True,
            sleep="never",
        ),
    }
    llm = Engine(model, config.model_copy(update=update), device, join_world=False).llm
    store = ImageStore(dataset)
    placeholder = json.loads((model / "config.json").read_text()).get("image_token_id")
    prompts = [engine_prompt(collapse_images(s.token_ids, placeholder), s.images, store) for s in sequences]
    params = sampling_params(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    outputs: list[Any] = llm.generate(cast(Any, prompts), params, use_tqdm=False)
    return [
        [output.prompt_logprobs[t][s.token_ids[t]].logprob for t in range(s.completion_start, len(s.token_ids))]
        for s, output in zip(sequences, outputs, strict=True)
    ]


def collapse_images(token_ids: Sequence[int], image_token_id: int | None) -> list[int]:
    """One placeholder per run of image tokens, as vLLM takes prompts."""
    return [t for i, t in enumerate(token_ids) if t != image_token_id or i == 0 or token_ids[i - 1] != image_token_id]


def padded_rank(rank: int) -> int:
    """The rank that vLLM makes room for.

    Raises:
        SamplerError: vLLM has no buffers as wide as this.
    """
    for size in _RANKS:
        if rank <= size:
            return size
    raise SamplerError(f"model.lora.rank is {rank}; vLLM takes at most {_RANKS[-1]}. Lower it, or train all weights.")


def adapter_request(version: int) -> LoRARequest:
    """What a request carries to be answered with the adapter. The version in its name keys vLLM's prefix cache."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=f"policy-{version}", lora_int_id=_ADAPTER, lora_path="in memory, never read")


def _through_kernel(module: Any, kernel: Any, weight: Tensor) -> Tensor:
    if kernel is None:
        return weight
    inputs = module.embedding_dim if hasattr(module, "embedding_dim") else module.input_size_per_partition
    held: Tensor = kernel(torch.eye(inputs, dtype=weight.dtype), weight, None)
    return held


def _launcher() -> Any:
    """vLLM's external launcher on CPU, with ranks that talk through torch.distributed.

    By itself vLLM takes shared memory there, under a name that is the same for all engines of a machine and stays when
    a process is killed. It does not where the ranks disagree about that name, which comes from what is given here; the
    world that it would open exists already.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class GlooLauncher(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            method, rank, local_rank = super()._distributed_args()
            return f"{method}:{rank}", rank, local_rank

    return GlooLauncher


def _world_of_one() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _register_model_class(model: Path) -> None:
    """Tell vLLM the class itself: by name it would start a process that imports vLLM again, to look at it."""
    from vllm import ModelRegistry

    for name in json.loads((model / "config.json").read_text()).get("architectures", []):
        entry = ModelRegistry.models.get(name)
        if entry is not None and hasattr(entry, "load_model_cls"):
            ModelRegistry.register_model(name, entry.load_model_cls())
