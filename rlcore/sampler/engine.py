"""A vLLM engine in this process, its weights, adapter and caches. Only this file and ``kernels`` import vLLM (0.26 to
0.32)."""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.config import ExperimentConfig, RolloutConfig
from rlcore.data.pixels import ImageStore, frames_in
from rlcore.data.prompts import load_prompts
from rlcore.errors import ModelError, SamplerError
from rlcore.families import family_in, has_states, images_in
from rlcore.families.protocol import Family
from rlcore.process import importing_vllm
from rlcore.sampler.decoding import ReadRoutes
from rlcore.sampler.kernels import BATCH_INVARIANT
from rlcore.sampler.quantised import QuantisedLayers, is_quantised
from rlcore.sampler.routes import RouteRecorder
from rlcore.types import ImageRef

if TYPE_CHECKING:
    from PIL import Image
    from vllm.lora.request import LoRARequest

    from rlcore.data.probe import ProbeSequence

T = TypeVar("T")

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's adapter buffers; smaller ranks are padded
_ADAPTER = 1  # the one adapter's id
_ZEROS = "zeros"  # vLLM's name of our load format
_BACKEND = "vllm.model_executor.models.transformers"  # computes transformers' modules with vLLM's attention
# vLLM's names of vision towers, and of what connects them to decoders
_TOWERS = ("visual", "vision_tower", "vision_model", "mlp1", "multi_modal_projector", "connector")


class Engine:
    """One vLLM engine, in this process."""

    def __init__(
        self,
        model: Path,
        config: ExperimentConfig,
        device: str,
        *,
        join_world: bool,
        starts_workers: bool = False,
        reads_weights: bool = True,
    ) -> None:
        """
        Args:
            reads_weights: from the files of ``model``. Otherwise all weights are 0 until the first weight sync, and the
                engine starts sooner.
            starts_workers: with ``rollout.tensor_parallel`` vLLM starts processes for the parts of the engine.
            join_world: join the world that RANK, WORLD_SIZE and MASTER_* describe; else create a world of one rank.
                With ``rollout.tensor_parallel`` as many consecutive ranks of the world hold one engine: each builds it
                and makes the same calls.
        """
        set_engine_environment(device)
        if config.rollout.exact:
            os.environ[BATCH_INVARIANT] = "1"
        with importing_vllm():
            from vllm import LLM

        require_pictures(model, device)
        rollout, self.config, self.device, self._folder = config.rollout, config, device, model
        self.dtype = cast(torch.dtype, getattr(torch, engine_dtype(device, rollout.dtype)))
        states = has_states(model)
        if states and device == "cpu" and self.dtype != torch.bfloat16:
            raise ModelError(
                f"the sampler's dtype is {str(self.dtype).removeprefix('torch.')}, and on a CPU vLLM computes layers "
                "with a recurrent state in bfloat16 only. Set rollout.dtype to bfloat16."
            )
        _register_model_class(model, config.model.trust_remote_code)
        gc.freeze()  # vLLM collects garbage five times while it starts; the objects made by imports never are
        if not join_world and not starts_workers:
            _world_of_one()
        options: dict[str, Any] = {}
        if images_in(model) is not None:
            most = config.data.max_images
            self._prompts = load_prompts(config, model)
            videos = most if self._prompts.video_token_id is not None else 0
            options["limit_mm_per_prompt"] = {"image": most, "video": videos}
            options["mm_processor_kwargs"] = self._prompts.engine_options
            options["skip_mm_profiling"] = True
        if device == "cpu":
            options["kv_cache_memory_bytes"] = rollout.kv_cache_mib << 20
            # a chunk of a prompt samples a token, and vLLM then undoes it by rewinding the request's generator,
            # which CPU generators cannot do
            options["enable_chunked_prefill"] = False
        else:
            options["enable_sleep_mode"] = rollout.sleep != "never"
            options["gpu_memory_utilization"] = rollout.gpu_memory_utilization
            # its custom kernels look for the other devices in this process, which sees only one
            options["disable_custom_all_reduce"] = rollout.tensor_parallel > 1
            # other kernels of experts keep weights in a layout of their own, which plain copies of a sync do not give
            options["moe_backend"] = "triton"
            # vLLM's default sizes end at 512 sequences; above the largest size it launches every kernel separately
            compilation: dict[str, Any] = {"cudagraph_capture_sizes": capture_sizes(rollout.max_sequences)}
            if rollout.exact or not rollout.compile_engine:  # a compiler fuses kernels, which rounds elsewhere
                compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            options["compilation_config"] = compilation
        if rollout.quantization == "fp8":
            options |= {"quantization": "online", "quantization_config": fp8_of_decoder(model)}
        if (lora := config.model.lora) is not None:
            options |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": padded_rank(lora.rank)}
            if (adapted := self.family.adapted) is not None:
                options["lora_target_modules"] = list(adapted)
            if lora.vision_tower:
                options["enable_tower_connector_lora"] = True
        gloo = device == "cpu" and rollout.tensor_parallel > 1
        self.read_routes: ReadRoutes | None = None
        recording = _before_graphs(self._record_routes) if rollout.replay_routes else nullcontext()
        with _compiler_kept(device, config.resources.devices), one_tokenizer(), recording:
            self.llm = LLM(
                model=str(model),
                load_format="auto" if reads_weights else _zeros(),
                dtype=cast(Any, engine_dtype(device, rollout.dtype)),
                max_model_len=config.max_sequence_tokens,
                max_num_seqs=rollout.max_sequences,
                max_num_batched_tokens=max(8192 if device == "cpu" else 16384, config.max_sequence_tokens),
                enforce_eager=rollout.enforce_eager or device == "cpu",
                # vLLM caches states at the ends of long blocks only, and on a CPU needs chunks of prompts for it
                enable_prefix_caching=not states,
                logprobs_mode="processed_logprobs",
                seed=config.seed,
                trust_remote_code=config.model.trust_remote_code,
                disable_log_stats=True,
                tensor_parallel_size=rollout.tensor_parallel,
                # except with ``starts_workers`` this process is the worker: vLLM starts no other
                distributed_executor_backend="mp" if starts_workers else _launcher() if gloo else "external_launcher",
                **options,
            )

    def _record_routes(self, model_runner: Any) -> None:
        from vllm.forward_context import get_forward_context

        recorder = RouteRecorder(model_runner, lambda: cast(Mapping[str, Tensor], get_forward_context().slot_mapping))
        self.read_routes = recorder.read

    @cached_property
    def family(self) -> Family:
        """
        Raises:
            ModelError: the model can only be sampled from.
        """
        return family_in(self._folder)

    @property
    def core(self) -> Any:
        """vLLM's EngineCore, which schedules and runs the requests in this process."""
        return cast(Any, self.llm.llm_engine.engine_core).engine_core

    def enqueue(
        self, prompts: Sequence[dict[str, Any]], params: Sequence[Any], adapter: LoRARequest | None
    ) -> list[list[str]]:
        """Add requests to the engine without running it; return the names of the samples of each.

        A prompt that stands in ``prompts`` more than once, as the same object, is processed once.
        """
        from vllm.sampling_params import RequestOutputKind

        if not prompts:
            return []
        engine, distinct = self.llm.llm_engine, {id(prompt): prompt for prompt in prompts}
        inputs = dict(zip(distinct, engine.renderer.render_cmpl(cast(Any, list(distinct.values()))), strict=True))
        names = []
        for prompt, of in zip(prompts, params, strict=True):
            of.output_kind = RequestOutputKind.FINAL_ONLY
            request = str(next(self.llm.request_counter))
            names.append(engine.add_request(request, inputs[id(prompt)], of, lora_request=adapter))
        return [
            [name] if of.n == 1 else [f"{sample}_{name}" for sample in range(of.n)]
            for name, of in zip(names, params, strict=True)
        ]

    def waiting_prompt(self, name: str) -> Sequence[int]:
        """The prompt of an enqueued sample, with image tokens as the engine expanded them."""
        return cast(Sequence[int], self.core.scheduler.requests[name].prompt_token_ids)

    def prompt_logprobs(
        self, sequences: Sequence[ProbeSequence], images: ImageStore, adapter: LoRARequest | None = None
    ) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of each sequence's completion tokens."""
        prompts = [
            engine_prompt(self._prompts.collapse(s.token_ids, s.images) if s.images else s.token_ids, s.images, images)
            for s in sequences
        ]
        params = sampling_params(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        outputs: list[Any] = self.llm.generate(cast(Any, prompts), params, use_tqdm=False, lora_request=adapter)
        return [
            [output.prompt_logprobs[t][s.token_ids[t]].logprob for t in range(s.completion_start, len(s.token_ids))]
            for s, output in zip(sequences, outputs, strict=True)
        ]

    def decoder_layers(self, count: int) -> nn.ModuleList | None:
        """The ``count`` decoder layers of the engine's model in this process; None if they are not found."""
        model = self.llm.apply_model(lambda model: model)[0]
        lists = [m for name, m in model.named_modules() if name.endswith("layers") and isinstance(m, nn.ModuleList)]
        return next((layers for layers in reversed(lists) if len(layers) == count), None)

    def quantised_layers(self) -> QuantisedLayers | None:
        """
        Raises:
            SamplerError: ``rollout.quantization`` is set, and vLLM quantised no layer.
        """
        if self.config.rollout.quantization is None:
            return None
        layers = QuantisedLayers(self.llm.apply_model(lambda model: model)[0])
        if not len(layers):
            raise SamplerError(
                f"rollout.quantization is {self.config.rollout.quantization}, and vLLM quantised no layer of this "
                "model. Set it to null."
            )
        return layers

    def forget_outputs(self) -> None:
        """Drop the engine's records of samples, which it would need to build its own outputs."""
        outputs = self.llm.llm_engine.output_processor
        outputs.abort_requests(list(outputs.request_states), internal=True)
        outputs.abort_requests(list(outputs.parent_requests), internal=True)

    def reset_caches(self) -> None:
        """Drop everything that was computed with the weights: key-value blocks and features of images. Processed pixels
        stay: they depend on the image alone, and each epoch and each evaluation asks for the same images again."""
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def install_adapter(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Replace the adapter in the engine's buffers.

        vLLM's own way of adding an adapter, without a file: its model maps names and fused layers (q, k, v -> qkv), and
        ``activate_adapter`` copies the adapter into the slot that requests use.

        Args:
            tensors: ``<module>.lora_A.weight`` and ``<module>.lora_B.weight`` by Hugging Face's module names, B times
                alpha / rank. The engine keeps them.
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
            peft_helper=PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # scale 1: B contains the scale
            device=str(next(iter(tensors.values())).device),
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper,
        )
        manager.remove_adapter(_ADAPTER)
        manager.add_adapter(adapter)
        manager.activate_adapter(_ADAPTER)

    @contextmanager
    def without_adapter_layers(self) -> Iterator[None]:
        """Inside the block the model has vLLM's own layers in place of those with adapters, which change the names of
        its parameters."""
        from vllm.lora.layers import BaseLayerWithLoRA

        model = self.llm.apply_model(lambda model: model)[0]
        wrapped = [(name, m) for name, m in model.named_modules() if isinstance(m, BaseLayerWithLoRA)]
        for name, module in wrapped:
            _replace(model, name, cast(Any, module).base_layer)
        try:
            yield
        finally:
            for name, module in wrapped:
                _replace(model, name, module)

    def held_adapter(self) -> Iterator[Tensor]:
        """Every adapter buffer of the engine. Padding and layers without an adapter are zeros."""
        for module in self._adapter_manager().modules.values():
            yield from (*module.lora_a_stacked, *module.lora_b_stacked)

    def _adapter_manager(self) -> Any:
        """vLLM's LoRAModelManager of this process."""
        (manager,) = self.llm.collective_rpc(lambda worker: worker.model_runner.lora_manager._adapter_manager)
        return manager

    def held_weights(self) -> Iterator[Tensor]:
        """Every weight that the engine computes with; a tied one once per use, as in a Hugging Face state dict.

        On a CPU vLLM packs linear weights into the format of its kernels. The result is read through the kernel, as the
        identity matrix times the weight, because the parameter may be stale or empty.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        modules = list(self.llm.apply_model(lambda model: model)[0].modules())
        tied = not any(isinstance(module, ParallelLMHead) for module in modules)
        for module in modules:
            for name, value in module.named_parameters(recurse=False):
                packed = getattr(module, "cpu_linear", None) if name == "weight" else None
                if is_quantised(module) and name in ("weight", "weight_scale"):
                    yield value
                    continue
                if isinstance(module, ParallelLMHead) or value.numel() == 0:
                    yield _through_kernel(module, packed, value)
                    continue
                yield _as_sent(value, self.dtype)
                if tied and isinstance(module, VocabParallelEmbedding):
                    yield _through_kernel(module, packed, value)


def fp8_of_decoder(model: Path) -> dict[str, Any]:
    """vLLM's settings: a scale for each row of a weight, and for each token of an input. Experts, what chooses them,
    the head, and a vision tower stay as they are."""
    towers = [] if images_in(model) is None else [rf"re:(.*\.)?({'|'.join(_TOWERS)})\..*"]
    return {"linear": "fp8_per_channel", "ignore": [r"re:.*\.(gate|router|shared_expert_gate)$", *towers]}


def _as_sent(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight that vLLM keeps in another dtype, in the one in which the trainer sends it. Unchanged where that would
    round it: then it is not what was sent."""
    if value.dtype == dtype:
        return value
    narrow = value.to(dtype)
    return narrow if torch.equal(narrow.to(value.dtype), value) else value


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


@contextmanager
def _compiler_kept(device: str, devices: int) -> Iterator[None]:
    """On exit, let torch.compile use several processes and the cache folders from before. vLLM sets one process and its
    own folders for everything in this process, and the policy would compile for several times as long."""
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
def _before_graphs(attach: Callable[[Any], None]) -> Iterator[None]:
    """While an engine is built inside the block, call ``attach`` with its model runner once the key-value cache exists
    and before CUDA graphs are captured. A later change of the model would not be in the graphs."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    executor: Any = UniProcExecutor
    call = executor.collective_rpc

    def call_after_attaching(self: Any, method: Any, *arguments: Any, **named: Any) -> Any:
        if method == "compile_or_warm_up_model":
            attach(self.driver_worker.worker.model_runner)
        return call(self, method, *arguments, **named)

    executor.collective_rpc = call_after_attaching
    try:
        yield
    finally:
        executor.collective_rpc = call


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


def require_pictures(model: Path, device: str) -> None:
    """
    Raises:
        ModelError: vLLM masks the pictures of this model otherwise on this device.
    """
    images = images_in(model)
    if device == "cpu" and images is not None and images.both_ways:
        raise ModelError(
            "the tokens of a picture attend to each other in both directions, and vLLM 0.32 on a CPU lets them attend "
            "only to those before them: it would sample from another model. Use a GPU (resources.device), or set "
            "model.path to a model without it."
        )


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes of CUDA graphs: above 64 sequences, at most an eighth of a batch is padding."""
    above = [size * step // 8 for size in (64 << k for k in range(10)) for step in range(9, 17)]
    return sorted({size for size in (1, 2, 4, *range(8, 65, 8), *above) if size < max_num_seqs} | {max_num_seqs})


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


def engine_dtype(device: str, asked: str = "auto") -> str:
    """The dtype that an engine computes in, for ``rollout.dtype``."""
    if asked != "auto":
        return asked
    return "float32" if device == "cpu" else "bfloat16"


def sampling_params(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**options)


def engine_prompt(token_ids: Sequence[int], images: Sequence[ImageRef], store: ImageStore) -> dict[str, Any]:
    """vLLM's input for one prompt: one placeholder token per image or video, and these, named by hash and size."""
    prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
    kinds = {"image": [i for i in images if not i.is_video], "video": [i for i in images if i.is_video]}
    if images:
        prompt["multi_modal_data"] = {
            kind: [_engine_video(store.read(i), i) if i.is_video else store.read(i) for i in those]
            for kind, those in kinds.items()
            if those
        }
        # two datasets may hold one picture in two sizes
        prompt["multi_modal_uuids"] = {
            kind: [f"{i.sha256}-{i.width}x{i.height}" for i in those] for kind, those in kinds.items() if those
        }
    return prompt


def _engine_video(image: Image.Image, ref: ImageRef) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """[frames, height, width, 3], and vLLM's facts about a video: one of a frame per second, of which those at
    ``moments`` were taken. So no rounding is between them and vLLM's times."""
    seconds = ref.frames * ref.seconds_per_frame
    facts = {
        "fps": 1.0,
        "duration": seconds,
        "total_num_frames": seconds,
        "frames_indices": list(ref.moments),
        "video_backend": "rlflow",
        "do_sample_frames": False,
    }
    return np.stack([np.asarray(frame) for frame in frames_in(image, ref)]), facts


def over_engine(value: T) -> list[T]:
    """The values of all ranks that hold this process's engine. Collective, on the host."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group().cpu_group
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def vllm_sequence_logprobs(
    model: Path, sequences: Sequence[ProbeSequence], dataset: Path, config: ExperimentConfig, device: str
) -> list[list[float]]:
    """vLLM's log-probs (nats, temperature 1) of each sequence's completion tokens, for a model folder.

    With ``rollout.tensor_parallel`` several processes hold the engine, unless this machine has fewer GPUs.
    """
    together = config.rollout.tensor_parallel
    if device == "cuda" and together > torch.cuda.device_count():
        together = 1
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
            tensor_parallel=together,
            dtype=config.rollout.dtype,
        ),
    }
    engine = Engine(model, config.model_copy(update=update), device, join_world=False, starts_workers=together > 1)
    return engine.prompt_logprobs(sequences, ImageStore(dataset))


def padded_rank(rank: int) -> int:
    """The rank of vLLM's buffers for an adapter of this rank.

    Raises:
        SamplerError: vLLM has no buffers of this rank.
    """
    for size in _RANKS:
        if rank <= size:
            return size
    raise SamplerError(f"model.lora.rank is {rank}; vLLM takes at most {_RANKS[-1]}. Lower it, or train all weights.")


def adapter_request(version: int) -> LoRARequest:
    """Makes a request use the adapter. vLLM's prefix cache distinguishes versions by the name."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=f"policy-{version}", lora_int_id=_ADAPTER, lora_path="in memory, never read")


def _replace(model: Any, name: str, module: Any) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _through_kernel(module: Any, kernel: Any, weight: Tensor) -> Tensor:
    if kernel is None:
        return weight
    sizes = ("embedding_dim", "input_size_per_partition", "input_size")  # the last of a layer that is never split
    inputs = next(getattr(module, size) for size in sizes if hasattr(module, size))
    packed: Tensor = kernel(torch.eye(inputs, dtype=weight.dtype), weight, None)
    return packed


def _launcher() -> Any:
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


def _world_of_one() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _register_model_class(model: Path, trust_remote_code: bool) -> None:
    """Register the class itself. vLLM would start a process that imports vLLM again to inspect a class by its name."""
    from vllm import ModelRegistry

    for name in json.loads((model / "config.json").read_text()).get("architectures", []):
        entry = ModelRegistry.models.get(name)
        if entry is not None and hasattr(entry, "load_model_cls"):
            ModelRegistry.register_model(name, implementation := entry.load_model_cls())
            if implementation.__module__.startswith(_BACKEND):
                _give_own_class(model, trust_remote_code)


def _give_own_class(model: Path, trust_remote_code: bool) -> None:
    """Let the engine build a subclass of transformers' model. vLLM changes the class that it builds, and the trainer's
    model in this process has transformers' own."""
    from transformers import AutoConfig, AutoModel

    config = type(AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=True))
    shared: Any = AutoModel._model_mapping.get(config, None)
    if shared is not None and shared.__module__ != __name__:
        AutoModel.register(config, type(shared.__name__, (shared,), {"__module__": __name__}), exist_ok=True)
