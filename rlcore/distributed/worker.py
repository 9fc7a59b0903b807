"""What one rank holds: a shard of the policy and, on the same device, a sampler. Runs with or without Ray."""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.config import ExperimentConfig
from rlcore.ports import SampledGroup, SampleRequest, ScoredTokens
from rlcore.types import Floats, ImageRef, TrainingSample

if TYPE_CHECKING:
    from rlcore.algorithms.aggregation import StepTotals
    from rlcore.algorithms.flops import ModelShape
    from rlcore.batch import ImageFeatures
    from rlcore.data.prompts import PromptBuilder
    from rlcore.models.torch_policy import UpdateResult


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything a rank needs to build itself. Picklable; no torch."""

    rank: int
    world_size: int
    local_rank: int
    device: str  # "cpu" or "cuda"
    threads: int
    master_address: str
    master_port: int
    model: Path
    dataset: Path
    config: ExperimentConfig


class ReadAhead:
    """What ``read`` makes of an image, made by a thread from ``start`` on; the last ``kept`` ones stay."""

    def __init__(self, read: Callable[[ImageRef], ImageFeatures], kept: int = 4096) -> None:
        self._read, self._kept = read, kept
        self._pool = ThreadPoolExecutor(1)  # what reads images is not made for several threads
        self._found: OrderedDict[ImageRef, Future[ImageFeatures]] = OrderedDict()

    def start(self, image: ImageRef) -> None:
        if image not in self._found:
            self._found[image] = self._pool.submit(self._read, image)
            if len(self._found) > self._kept:
                self._found.popitem(last=False)

    def of(self, image: ImageRef) -> ImageFeatures:
        """Waits for it; raises what reading it raised."""
        self.start(image)
        self._found.move_to_end(image)
        return self._found[image].result()


class Worker:
    """One rank. Every method that touches the policy is collective: all ranks call it in the same order."""

    def __init__(self, spec: WorkerSpec) -> None:
        _enter_world(spec)
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        from rlcore.data.images import ImageStore
        from rlcore.models.loading import load_hf_model
        from rlcore.models.torch_policy import TorchPolicy, weights_dtype
        from rlcore.rollout.vllm_sampler import VllmSampler

        config = spec.config
        self._spec = spec
        prompts = _prompts(spec)
        self._image_processor = prompts.image_processor
        self._images = ImageStore(spec.dataset)
        self._features = ReadAhead(self._read_features)
        # the engine first: on a GPU it measures free memory, which the policy's shard must not have taken yet
        self.sampler = VllmSampler(
            spec.model, config, prompts=prompts, images=self._images, device=spec.device, lora=config.model.lora
        )
        self._base_checked = self._has_trained = False
        self.sampler.sleep()
        torch.set_num_threads(spec.threads)  # vLLM changes it
        self.policy = TorchPolicy(
            load_hf_model(
                spec.model, weights_dtype(config, spec.device), trust_remote_code=config.model.trust_remote_code
            ),
            config,
            mesh=init_device_mesh(spec.device, (spec.world_size,)),
            banned_token_ids=prompts.banned_token_ids,
            features=self._features.of,
        )

    def _read_features(self, image: ImageRef) -> ImageFeatures:
        from rlcore.batch import ImageFeatures

        data = self._spec.config.data
        out = self._image_processor(
            images=[self._images.read(image)],
            size={"shortest_edge": data.min_pixels, "longest_edge": data.max_pixels},  # pixels per image
            return_tensors="pt",
        )
        time_, height, width = out["image_grid_thw"][0].tolist()
        return ImageFeatures(out["pixel_values"], (time_, height, width))

    def generate(self, requests: Sequence[SampleRequest]) -> list[SampledGroup]:
        for request in requests:  # what training will want of these images is made while the sampler draws
            for image in request.problem.images:
                self._features.start(image)
        return self.sampler.generate(requests)

    def release_sampler(self) -> None:
        """Hand the sampler's memory to training."""
        self.sampler.sleep()

    def logprobs(self, microbatches: Sequence[Sequence[TrainingSample]], reference: bool) -> list[list[ScoredTokens]]:
        return self.policy.logprobs(microbatches, reference=reference)

    def model_shape(self) -> ModelShape:
        return self.policy.model_shape()

    def device_name(self) -> str:
        return self.policy.device_name()

    def canary(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        return self.policy.raw_logprobs(samples)

    def update(
        self,
        microbatches: Sequence[Sequence[TrainingSample]],
        totals: StepTotals,
        learning_rate: float,
        kl_coefficient: float,
    ) -> UpdateResult:
        self._has_trained = True
        result = self.policy.update(microbatches, totals, learning_rate, kl_coefficient)
        if self._spec.device == "cuda":  # the optimizer's kernels are only queued: they belong to this phase's time
            import torch

            torch.cuda.synchronize()
        return result

    def sync_weights(self, version: int) -> int:
        """Policy -> sampler, in place: all weights, or the adapters if these are what trains. Returns the checksum of
        what was sent."""
        from rlcore.rollout.weights import unsharded

        if self._has_trained:
            self.sampler.sleep_no_more_if_there_is_room()
        stops = self.sampler.wake()
        next(stops)
        dtype = None if self._spec.device == "cpu" else self.policy.sync_dtype
        if self._spec.config.model.lora is None:
            whole = self.policy.full_weights(dtype)
            if self._spec.world_size == 1:
                whole = unsharded(self.policy.model.hf.state_dict().items(), dtype)
            checksum = self.sampler.load_weights(whole, version)
        else:
            if not self._base_checked:
                self.sampler.check_base(self.policy.full_weights(dtype))
                self._base_checked = True
            checksum = self.sampler.load_adapter(self.policy.adapter_weights(dtype), version)
        next(stops)
        return checksum

    def begin_save(self, folder: Path) -> None:
        self.policy.begin_save(folder)

    def saved(self) -> bool:
        return self.policy.saved()

    def load(self, folder: Path) -> None:
        self.policy.load(folder)

    def peak_memory_bytes(self) -> int:
        """Since the last call on a GPU; of the whole process so far on CPU."""
        if self._spec.device == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        import torch

        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return int(peak)


class SamplingWorker:
    """One rank of an evaluation: an engine of its own and no policy. Nothing is collective."""

    def __init__(
        self, spec: WorkerSpec, *, checkpoint: Path | None, version: int, temperature: float, top_p: float
    ) -> None:
        """
        Args:
            checkpoint: committed checkpoint whose weights are sampled from; None: those of ``spec.model``.
            version: policy version to stamp completions with.
        """
        from rlcore.rollout.engine import set_engine_environment
        from rlcore.rollout.vllm_sampler import VllmSampler

        set_engine_environment(spec.device)
        import torch

        from rlcore.data.images import ImageStore
        from rlcore.models.checkpoint import load_full_weights

        torch.set_num_threads(spec.threads)
        self.sampler = VllmSampler(
            spec.model,
            spec.config,
            prompts=_prompts(spec),
            images=ImageStore(spec.dataset),
            device=spec.device,
            temperature=temperature,
            top_p=top_p,
            join_world=False,
        )
        if checkpoint is None:
            self.sampler.keep_loaded_weights(version)
        else:
            # adapters merged: nothing is to be synced later, and the engine needs no second kernel
            weights = load_full_weights(checkpoint, spec.model, trust_remote_code=spec.config.model.trust_remote_code)
            self.sampler.load_weights(weights.items(), version)

    def generate(self, requests: Sequence[SampleRequest]) -> list[SampledGroup]:
        return self.sampler.generate(requests)


def _prompts(spec: WorkerSpec) -> PromptBuilder:
    from rlcore.data.prompts import PromptBuilder, load_processor

    config = spec.config
    processor = load_processor(config.model.model_copy(update={"path": str(spec.model), "revision": None}))
    return PromptBuilder(
        processor, config.data.template, min_pixels=config.data.min_pixels, max_pixels=config.data.max_pixels
    )


def _enter_world(spec: WorkerSpec) -> None:
    """Join torch.distributed, the way vLLM's external launcher expects to find it."""
    from rlcore.rollout.engine import set_engine_environment

    set_engine_environment(spec.device)
    os.environ.update(
        RANK=str(spec.rank),
        LOCAL_RANK=str(spec.local_rank),
        WORLD_SIZE=str(spec.world_size),
        MASTER_ADDR=spec.master_address,
        MASTER_PORT=str(spec.master_port),
    )
    import torch
    import torch.distributed as dist

    if spec.device == "cuda":
        torch.cuda.set_device(spec.local_rank)
        # only a warning, because vLLM's sampling has an operation (cumsum) without a deterministic kernel
        torch.use_deterministic_algorithms(spec.config.resources.deterministic, warn_only=True)
    torch.set_num_threads(spec.threads)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if spec.device == "cpu" else "cpu:gloo,cuda:nccl", init_method="env://")
