"""A vLLM engine in this process, its weights, adapter and caches. Only this file, ``start`` and ``kernels`` import
vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlcore.config import ExperimentConfig, RolloutConfig
from rlcore.data.pixels import ImageStore, frames_in
from rlcore.data.prompts import PromptBuilder, load_prompts
from rlcore.errors import SamplerError
from rlcore.families import family_in, images_in
from rlcore.families.protocol import Family
from rlcore.process import Clock
from rlcore.sampler.decoding import ReadRoutes
from rlcore.sampler.quantised import QuantisedLayers, is_quantised
from rlcore.sampler.routes import RouteRecorder
from rlcore.sampler.start import engine_dtype, start_engine
from rlcore.types import ImageRef

if TYPE_CHECKING:
    from PIL import Image
    from vllm.lora.request import LoRARequest

    from rlcore.data.probe import ProbeSequence

T = TypeVar("T")

_ADAPTER = 1  # the one adapter's id


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
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            clock: gets the seconds of each part of the start.
            reads_weights: from the files of ``model``. Otherwise all weights are 0 until the first weight sync, and the
                engine starts sooner.
            starts_workers: with ``rollout.tensor_parallel`` vLLM starts processes for the parts of the engine.
            join_world: join the world that RANK, WORLD_SIZE and MASTER_* describe; else create a world of one rank.
                With ``rollout.tensor_parallel`` as many consecutive ranks of the world hold one engine: each builds it
                and makes the same calls.
        """
        self.config, self.device, self._folder = config, device, model
        self.dtype = engine_dtype(config.rollout, device)
        self.read_routes: ReadRoutes | None = None
        self.llm = start_engine(
            model,
            config,
            device,
            None if images_in(model) is None else self._prompts,
            join_world=join_world,
            starts_workers=starts_workers,
            reads_weights=reads_weights,
            before_graphs=self._record_routes,
            clock=clock or Clock(),
        )

    def _record_routes(self, model_runner: Any) -> None:
        from vllm.forward_context import get_forward_context

        recorder = RouteRecorder(model_runner, lambda: cast(Mapping[str, Tensor], get_forward_context().slot_mapping))
        self.read_routes = recorder.read

    @cached_property
    def _prompts(self) -> PromptBuilder:
        return load_prompts(self.config, self._folder)

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

    @property
    def _model(self) -> nn.Module:
        """This process's part of the engine's model."""
        return self.llm.apply_model(lambda model: model)[0]

    def sleeping_bytes(self) -> int:
        """GPU memory that torch counts as allocated although the engine has given it up, because it sleeps."""
        from vllm.device_allocator.cumem import CuMemAllocator

        allocator = CuMemAllocator.instance
        if allocator is None:  # this engine never sleeps
            return 0
        return sum(data.handle[1] for data in allocator.pointer_to_data.values() if data.is_asleep)

    def enqueue(
        self, prompts: Sequence[dict[str, Any]], params: Sequence[Any], adapter: LoRARequest | None
    ) -> list[list[str]]:
        """Add requests to the engine without running it; return the names of the samples of each.

        A prompt that is in ``prompts`` several times as the same object is processed once.
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
            engine_prompt(
                self._prompts.placeholders.collapse(s.token_ids, s.images) if s.images else s.token_ids,
                s.images,
                images,
            )
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
        named = self._model.named_modules()
        lists = [m for name, m in named if name.endswith("layers") and isinstance(m, nn.ModuleList)]
        return next((layers for layers in reversed(lists) if len(layers) == count), None)

    def quantised_layers(self) -> QuantisedLayers | None:
        """
        Raises:
            SamplerError: ``rollout.quantization`` is set, and vLLM quantised no layer.
        """
        if self.config.rollout.quantization is None:
            return None
        layers = QuantisedLayers(self._model)
        if not len(layers):
            raise SamplerError(
                f"rollout.quantization is {self.config.rollout.quantization}, and vLLM quantised no layer of this "
                "model. Set it to null."
            )
        return layers

    def forget_outputs(self) -> None:
        """Drop the engine's records of samples, from which it would build its own outputs."""
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
        if mapper is not None:
            mapper = mapper.get_rename_mapper()  # the manager itself joins the parts of fused layers
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

        model = self._model
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

        modules = list(self._model.modules())
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


def _as_sent(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in ``dtype``, in which the trainer sends it: vLLM keeps some weights in a finer one. Unchanged if the
    conversion would round it, because then it is not what was sent."""
    if value.dtype == dtype:
        return value
    narrow = value.to(dtype)
    return narrow if torch.equal(narrow.to(value.dtype), value) else value


def sampling_params(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**options)


def engine_prompt(token_ids: Sequence[int], images: Sequence[ImageRef], store: ImageStore) -> dict[str, Any]:
    """vLLM's input for one prompt.

    Args:
        token_ids: with one placeholder per image or video.
        images: images and videos, which vLLM's caches distinguish by hash and size.
    """
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
    """[frames, height, width, 3], and vLLM's facts about the video. They describe a video of one frame per second from
    which the frames at ``moments`` were taken, so that vLLM computes their times without rounding."""
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


def adapter_request(version: int) -> LoRARequest:
    """What makes a request use the adapter. vLLM's prefix cache distinguishes versions by the name."""
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
