"""Starts a vLLM engine in this process: its environment, vLLM's settings, and patches of vLLM during the start."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch import nn

from rlcore.config import ExperimentConfig, RolloutConfig
from rlcore.data.prompts import PromptBuilder
from rlcore.errors import ModelError, SamplerError
from rlcore.families import (
    family_in,
    has_states,
    images_in,
    known_family_in,
    require_adapters,
    require_pictures,
)
from rlcore.process import Clock, free_port, importing_vllm
from rlcore.sampler.kernels import BATCH_INVARIANT

if TYPE_CHECKING:
    from vllm import LLM

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's adapter buffers; smaller ranks are padded
_ZEROS = "zeros"  # the name under which vLLM knows our load format
_BACKEND = "vllm.model_executor.models.transformers"  # computes transformers' modules with vLLM's attention
_ENGINE = "engine"  # a part of the start: building the engine, without these calls of vLLM's executor
_CALLS = {
    "determine_available_memory": "memory profile",
    "initialize_from_config": "key-value cache",
    "compile_or_warm_up_model": "warm-up and CUDA graphs",
}
# vLLM's names of vision towers, and of what connects them to decoders
_TOWERS = ("visual", "vision_tower", "vision_model", "mlp1", "multi_modal_projector", "connector")


def start_engine(
    model: Path,
    config: ExperimentConfig,
    device: str,
    prompts: PromptBuilder | None,
    *,
    join_world: bool,
    starts_workers: bool,
    reads_weights: bool,
    before_graphs: Callable[[Any], None],
    clock: Clock,
) -> LLM:
    """vLLM's engine for a model folder. ``Engine`` describes the other arguments.

    Args:
        prompts: of a model that takes images; None for a text model.
        clock: gets the seconds of each part of the start.
        before_graphs: with ``rollout.replay_routes``, called with vLLM's model runner before it captures CUDA graphs.

    Raises:
        ModelError: vLLM does not compute this model correctly on this device.
        SamplerError: as ``padded_rank``.
    """
    rollout = config.rollout
    set_engine_environment(device)
    if device != "cpu" and rollout.tensor_parallel == 1:
        # The next start reads the size of the key-value cache from a file, and need not profile memory. vLLM decides so
        # for each rank alone, but ranks that share an engine must all profile or none of them.
        os.environ.setdefault("VLLM_ENABLE_STARTUP_PLAN", "1")
    if rollout.exact:
        os.environ[BATCH_INVARIANT] = "1"
    with clock("vLLM's imports"), importing_vllm():
        from vllm import LLM

    require_pictures(images_in(model), device)
    if config.model.lora is not None:
        require_adapters(known_family_in(model), device)
    _require_states(model, rollout, device)
    _register_model_class(model, config.model.trust_remote_code)
    gc.freeze()  # vLLM collects garbage five times while it starts; the objects made by imports are never garbage
    if not join_world and not starts_workers:
        _make_world_of_one()
    executor: Any = "external_launcher"  # this process is the worker: vLLM starts no other
    if starts_workers:
        executor = "mp"
    elif device == "cpu" and rollout.tensor_parallel > 1:
        executor = _gloo_launcher()
    calls = _watched_calls(clock, before_graphs if rollout.replay_routes else None)
    compilers = _compiler_settings_restored(device, config.resources.devices)
    graphs = graphs_with_adapter() if config.model.lora is not None and device != "cpu" else nullcontext()
    with clock(_ENGINE), compilers, one_tokenizer(), calls, warmed_up_as_sampled(rollout), graphs:
        return LLM(
            model=str(model),
            load_format="auto" if reads_weights else _zeros(),
            distributed_executor_backend=executor,
            **_settings(model, config, device),
            **_device_settings(config, device),
            **({} if prompts is None else _image_settings(config, prompts)),
            **_adapter_settings(model, config),
        )


def set_engine_environment(device: str) -> None:
    """Set the variables that vLLM and torch read. Call it before vLLM is imported."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    if device == "cpu":
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    else:
        # this runner keeps requests on the device: steps can be queued, and one kernel samples for all sequences by
        # seed and position. The other runner calls a generator for each sequence and token
        defaults["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        defaults["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"  # as disable_custom_all_reduce
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        # torch may have read the variable already, and vLLM would then compile C++ for half a minute
        torch._dynamo.config.disable = True


def engine_dtype(rollout: RolloutConfig, device: str) -> torch.dtype:
    """The dtype that an engine computes in."""
    if rollout.dtype == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[rollout.dtype]


def _require_states(model: Path, rollout: RolloutConfig, device: str) -> None:
    """
    Raises:
        ModelError: vLLM cannot compute the recurrent states of this model in the engine's dtype.
    """
    dtype = engine_dtype(rollout, device)
    if has_states(model) and device == "cpu" and dtype != torch.bfloat16:
        raise ModelError(
            f"the sampler's dtype is {str(dtype).removeprefix('torch.')}, and on a CPU vLLM computes layers "
            "with a recurrent state in bfloat16 only. Set rollout.dtype to bfloat16."
        )


def _settings(model: Path, config: ExperimentConfig, device: str) -> dict[str, Any]:
    """vLLM's settings for every model and device."""
    rollout = config.rollout
    settings: dict[str, Any] = {
        "dtype": engine_dtype(rollout, device),
        "max_model_len": config.max_sequence_tokens,
        "max_num_seqs": rollout.max_sequences,
        "max_num_batched_tokens": max(8192 if device == "cpu" else 16384, config.max_sequence_tokens),
        "enforce_eager": rollout.enforce_eager or device == "cpu",
        # vLLM caches states at the ends of long blocks only, and on a CPU needs chunks of prompts for it
        "enable_prefix_caching": not has_states(model),
        "logprobs_mode": "processed_logprobs",
        "seed": config.seed,
        "trust_remote_code": config.model.trust_remote_code,
        "disable_log_stats": True,
        "tensor_parallel_size": rollout.tensor_parallel,
    }
    if rollout.quantization == "fp8":
        settings |= {"quantization": "online", "quantization_config": fp8_of_decoder(model)}
    return settings


def _device_settings(config: ExperimentConfig, device: str) -> dict[str, Any]:
    rollout = config.rollout
    if device == "cpu":
        return {
            "kv_cache_memory_bytes": rollout.kv_cache_mib << 20,
            # a chunk of a prompt samples a token, and vLLM then undoes it by rewinding the request's generator,
            # which CPU generators cannot do
            "enable_chunked_prefill": False,
        }
    compilation: dict[str, Any] = {
        # vLLM's default sizes end at 512 sequences; above the largest size it launches every kernel separately
        "cudagraph_capture_sizes": capture_sizes(rollout.max_sequences, _sequences_of_step(config)),
        # no graphs for batches with a prompt, which mostly have more tokens than the largest size
        "cudagraph_mode": "FULL_DECODE_ONLY",
    }
    if rollout.exact or not rollout.compile_engine:  # a compiler fuses kernels, and fused kernels round differently
        compilation |= {"mode": 0}
    return {
        "enable_sleep_mode": rollout.sleep != "never",
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        # its custom kernels look for the other devices in this process, which sees only one
        "disable_custom_all_reduce": rollout.tensor_parallel > 1,
        # other kernels of experts keep weights in their own layout, into which a weight sync cannot copy them
        "moe_backend": "triton",
        # where FlashInfer is installed, vLLM 0.32 times its kernels: on an H100 that ended in an illegal memory access
        "enable_flashinfer_autotune": False,
        # of layers with a recurrent state; FlashInfer's are compiled at the first prompt
        "gdn_prefill_backend": "triton",
        "compilation_config": compilation,
    }


def _image_settings(config: ExperimentConfig, prompts: PromptBuilder) -> dict[str, Any]:
    most = config.data.max_images
    return {
        "limit_mm_per_prompt": {"image": most, "video": most if prompts.placeholders.video_token_id is not None else 0},
        "mm_processor_kwargs": prompts.engine_options,
        "skip_mm_profiling": True,
    }


def _adapter_settings(model: Path, config: ExperimentConfig) -> dict[str, Any]:
    if (lora := config.model.lora) is None:
        return {}
    settings: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": padded_rank(lora.rank)}
    if (adapted := family_in(model).adapted) is not None:
        settings["lora_target_modules"] = list(adapted)
    if lora.vision_tower:
        settings["enable_tower_connector_lora"] = True
    return settings


def _sequences_of_step(config: ExperimentConfig) -> int:
    """How many sequences one engine samples at once while it trains, at most."""
    if config.rollout.partial is not None:
        return config.rollout.max_sequences  # more than one batch is in flight
    resources = config.resources
    engines = max(1, (resources.rollout_workers or resources.workers) // config.rollout.tensor_parallel)
    return -(-config.training.problems_per_batch * config.rollout.group_size // engines)


def capture_sizes(max_num_seqs: int, in_step: int) -> list[int]:
    """Batch sizes of CUDA graphs. Above 64 sequences, at most an eighth of a batch is padding, and at most a third of
    one with more than ``in_step`` sequences. Only evaluations are that large, and each graph takes time at the start.
    """

    def above_64(parts: int) -> list[int]:
        """64 to 128, 128 to 256 and so on, each in this many equal parts."""
        return [(64 << k) * part // parts for k in range(10) for part in range(parts + 1, 2 * parts + 1)]

    fine = [size for size in above_64(8) if size < in_step]
    sizes = {1, 2, 4, *range(8, 65, 8), *fine, in_step, *above_64(2)}
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


def fp8_of_decoder(model: Path) -> dict[str, Any]:
    """vLLM's settings of 8-bit weights: one scale for each row of a weight, and one for each token of an input.
    Experts, what chooses them, the head, and a vision tower are not quantised."""
    towers = [] if images_in(model) is None else [rf"re:(.*\.)?({'|'.join(_TOWERS)})\..*"]
    return {"linear": "fp8_per_channel", "ignore": [r"re:.*\.(gate|router|shared_expert_gate)$", *towers]}


def padded_rank(rank: int) -> int:
    """The rank of vLLM's buffers for an adapter of this rank.

    Raises:
        SamplerError: vLLM has no buffers of this rank.
    """
    for size in _RANKS:
        if rank <= size:
            return size
    raise SamplerError(f"model.lora.rank is {rank}; vLLM takes at most {_RANKS[-1]}. Lower it, or train all weights.")


def _zeros() -> str:
    """The load format of an engine whose weights are 0. vLLM's own "dummy" also fills buffers with random values, such
    as the means and deviations that normalise images, and no weight sync corrects them."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class Zeros(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            for parameter in model.parameters():
                parameter.data.zero_()

    register_model_loader(_ZEROS)(Zeros)
    return _ZEROS


def _gloo_launcher() -> Any:
    """vLLM's external launcher on a CPU, with ranks that communicate through torch.distributed.

    vLLM would use shared memory, under a name that is the same for all engines of a machine and remains after a crash.
    It does not if the ranks disagree about the name, which it derives from the distributed arguments. They are not used
    otherwise, because the world exists already.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class GlooLauncher(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            method, rank, local_rank = super()._distributed_args()
            return f"{method}:{rank}", rank, local_rank

    return GlooLauncher


def _make_world_of_one() -> None:
    port = str(free_port())
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def _register_model_class(model: Path, trust_remote_code: bool) -> None:
    """Register the class itself. vLLM would start a process that imports vLLM again to inspect a class by its name."""
    from vllm import ModelRegistry

    for name in json.loads((model / "config.json").read_text()).get("architectures", []):
        entry = ModelRegistry.models.get(name)
        if entry is not None and hasattr(entry, "load_model_cls"):
            ModelRegistry.register_model(name, implementation := entry.load_model_cls())
            if implementation.__module__.startswith(_BACKEND):
                give_own_class(model, trust_remote_code)


def give_own_class(model: Path, trust_remote_code: bool) -> None:
    """Let the engine build a subclass of transformers' model. vLLM changes the class that it builds, and the trainer's
    model in this process must keep transformers' class."""
    from transformers import AutoConfig, AutoModel

    config = type(AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=True))
    shared: Any = AutoModel._model_mapping.get(config, None)
    if shared is not None and shared.__module__ != __name__:
        AutoModel.register(config, type(shared.__name__, (shared,), {"__module__": __name__}), exist_ok=True)


@contextmanager
def _compiler_settings_restored(device: str, devices: int) -> Iterator[None]:
    """On exit, let torch.compile use several processes and the cache folders from before. vLLM sets one process and its
    own folders for everything in this process, and compiling the policy would take several times as long."""
    if device == "cpu":  # nothing is compiled
        yield
        return
    import torch._inductor.config

    folders = {name: os.environ.get(name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    yield
    for name, folder in folders.items():
        if folder is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = folder
    cores = len(os.sched_getaffinity(0))
    torch._inductor.config.compile_threads = max(1, min(16, cores // devices))


@contextmanager
def one_tokenizer() -> Iterator[None]:
    """Inside the block a deep copy of a tokenizer is the tokenizer itself. vLLM copies it about ten times while it
    starts, for other threads and processors, and a copy of 150,000 entries takes about a second. This process calls
    its tokenizers from one thread."""
    from transformers import PreTrainedTokenizerBase

    tokenizers: Any = PreTrainedTokenizerBase
    tokenizers.__deepcopy__ = lambda self, memo: self
    try:
        yield
    finally:
        del tokenizers.__deepcopy__


@contextmanager
def warmed_up_as_sampled(rollout: RolloutConfig) -> Iterator[None]:
    """While an engine is built inside the block, vLLM warms up the kernels that this run samples with. By default it
    warms up every feature of its sampler, such as penalties, min-p and watermarks. Compiling those kernels was 16 s of
    the 58 s that the first engine and policy of text 1.5B took to start on an H200."""
    from vllm import SamplingParams

    of_run = SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        logprobs=0,
        logit_bias={0: -100.0},
        seed=0,
        detokenize=False,
    )
    params: Any = SamplingParams
    of_vllm = vars(params)["for_sampler_warmup"]
    params.for_sampler_warmup = staticmethod(lambda: of_run)
    try:
        yield
    finally:
        params.for_sampler_warmup = of_vllm


@contextmanager
def graphs_with_adapter() -> Iterator[None]:
    """While an engine is built inside the block, vLLM captures CUDA graphs only for requests with an adapter. A run
    with adapters has no others, and the graphs of both kinds take twice as long."""
    from vllm.v1.worker.gpu import model_runner

    runner: Any = model_runner
    of_vllm = runner.get_lora_capture_cases
    runner.get_lora_capture_cases = lambda lora, compilation: [n for n in of_vllm(lora, compilation) if n > 0]
    try:
        yield
    finally:
        runner.get_lora_capture_cases = of_vllm


@contextmanager
def _watched_calls(clock: Clock, before_graphs: Callable[[Any], None] | None) -> Iterator[None]:
    """While an engine is built inside the block, count the seconds of its calls apart from those of the whole engine.

    ``before_graphs`` is called with the engine's model runner once the key-value cache exists and before CUDA graphs
    are captured. A later change of the model would not be in the graphs.
    """
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    executor: Any = UniProcExecutor
    call = executor.collective_rpc

    def watched(self: Any, method: Any, *arguments: Any, **named: Any) -> Any:
        if method == "compile_or_warm_up_model" and before_graphs is not None:
            before_graphs(self.driver_worker.worker.model_runner)
        start = time.perf_counter()
        try:
            return call(self, method, *arguments, **named)
        finally:
            if method in _CALLS:
                clock.move(time.perf_counter() - start, _ENGINE, _CALLS[method])

    executor.collective_rpc = watched
    try:
        yield
    finally:
        executor.collective_rpc = call
