"""The worker of one rank: a shard of the policy and a sampler on the same device, or only one of them if disaggregated.

Runs with or without Ray.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlcore.config import DataConfig, ExperimentConfig
from rlcore.distributed.tensor_parallel import Answer, answers
from rlcore.distributed.trace import Trace
from rlcore.errors import SamplerError
from rlcore.process import Clock
from rlcore.types import ImageRef, Problem, SampleRequest, TrainingSample

if TYPE_CHECKING:
    from rlcore.algorithms.loss import StepTotals
    from rlcore.algorithms.objective import UpdateResult
    from rlcore.batch import ImageFeatures
    from rlcore.data.prompts import PromptBuilder
    from rlcore.sampler.channel import WeightChannel, WeightSender
    from rlcore.sampler.vllm_sampler import VllmSampler


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything that a rank needs to build its worker. Picklable, without torch."""

    rank: int  # ranks that train come first, then ranks that only sample
    world_size: int  # number of ranks that train
    local_rank: int
    device: str  # "cpu" or "cuda"
    threads: int
    master_address: str
    master_port: int
    model: Path
    dataset: Path
    config: ExperimentConfig
    channel_port: int = 0  # at the master's address, for weights to ranks that only sample
    # where ranks that hold one engine together, and do not train, find each other
    engine_address: str = ""
    engine_port: int = 0
    teacher: Path | None = None  # of algorithm.teacher

    @classmethod
    def alone(
        cls, model: Path, dataset: Path, config: ExperimentConfig, device: str, master_port: int = 0
    ) -> WorkerSpec:
        """The spec of a single rank on the first device of this machine. Training needs a free port."""
        threads = config.resources.threads_per_worker
        return cls(0, 1, 0, device, threads, "127.0.0.1", master_port, model, dataset, config)


class Synced(NamedTuple):
    """The result of one rank's weight sync."""

    checksum: int  # of the tensors sent, and of those that the engine has
    waking_seconds: float  # until the engine had its memory back


def _seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def make_worker(spec: WorkerSpec) -> Worker | RolloutWorker:
    """The worker of this rank in the experiment's placement."""
    return Worker(spec) if spec.rank < spec.world_size else RolloutWorker(spec)


class Worker:
    """One rank that trains, and samples unless other ranks do.

    Everything that uses the policy is collective: all ranks that train call it in the same order.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        clock = Clock()
        with clock("torch and process group"):
            _enter_world(spec, spec.rank, spec.world_size, spec.master_address, spec.master_port)
        with clock("imports"):
            import torch
            from torch.distributed.device_mesh import init_device_mesh

            from rlcore.data.pixels import ImageStore
            from rlcore.models.exact import require_exact
            from rlcore.models.flash import require_kernel
            from rlcore.models.loading import empty_hf_model, load_hf_config, require_supported, stores_buffers
            from rlcore.models.stored_weights import StoredWeights
            from rlcore.models.teacher import Teacher
            from rlcore.models.torch_policy import TorchPolicy
            from rlcore.models.vision import ReadAhead
            from rlcore.sampler.engine import Engine
            from rlcore.sampler.kernels import VllmKernels
            from rlcore.sampler.vllm_sampler import VllmSampler

        config = spec.config
        self._spec = spec
        hf_config = load_hf_config(spec.model, config.model.trust_remote_code)
        require_supported(  # the policy checks both too, but only after the engine has started
            hf_config,
            sequence_parallel=config.training.sequence_parallel,
            tensor_parallel=config.rollout.tensor_parallel,
            lora=config.model.lora,
            replay_routes=config.rollout.replay_routes,
        )
        require_kernel(hf_config, config, spec.device)
        if config.rollout.exact:
            require_exact(hf_config, spec.device)
        self._prompts = prompts = _prompts(spec)
        self._images = ImageStore(spec.dataset)
        self._features = ReadAhead(self._read_features)
        self._has_trained = False
        self._sender: WeightSender | None = None
        self.trace = Trace()
        self.sampler: VllmSampler | None = None
        hf = empty_hf_model(spec.model, config.model.trust_remote_code)
        if not config.resources.rollout_workers:
            # before the policy: on a GPU the engine measures free memory, and a shard would reduce it
            reads = stores_buffers(hf)
            engine = Engine(spec.model, config, spec.device, join_world=True, reads_weights=reads, clock=clock)
            self.sampler = VllmSampler(engine, prompts=prompts, images=self._images)
            self.sampler.memory.sleep()
        torch.set_num_threads(spec.threads)  # vLLM changes it
        teacher = None
        if config.algorithm.teacher is not None and spec.teacher is not None:
            architecture = empty_hf_model(spec.teacher, config.algorithm.teacher.trust_remote_code)
            teacher = Teacher(architecture, StoredWeights(spec.teacher, architecture).read)
        exact = VllmKernels(hf.config, torch.device(spec.device), torch.bfloat16) if config.rollout.exact else None
        with clock("policy"):
            self.policy = TorchPolicy(
                hf,
                config,
                weights=StoredWeights(spec.model, hf).read,
                mesh=init_device_mesh(spec.device, (spec.world_size,)),
                banned_token_ids=prompts.banned_token_ids,
                features=self._features.of,
                teacher=teacher,
                kernels=exact,
            )
        self.start_seconds = clock.seconds

    def _read_features(self, image: ImageRef) -> ImageFeatures:
        from rlcore.batch import ImageFeatures

        return ImageFeatures(*self._prompts.read(self._images.read(image), image))

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, Answer]]:
        """The groups of this rank's engine (``tensor_parallel.answers``)."""
        for request in requests:
            if request.decoding is None:  # read these images for training while the engine samples
                for image in request.problem.images:
                    self._features.start(image)
        groups = self._own_sampler.generate(requests)
        return answers(groups, self._spec.rank, self._spec.config.rollout.tensor_parallel)

    def add_images(self, dataset: Path) -> None:
        """``ImageStore.add``"""
        self._images.add(dataset)

    def reset_sampler_caches(self) -> None:
        """``VllmSampler.reset_caches``"""
        self._own_sampler.reset_caches()

    def release_sampler(self) -> None:
        """Free the sampler's memory for training."""
        self._own_sampler.memory.sleep()

    def sampler_sleeps(self) -> bool:
        """Whether this rank's sampler has given its memory to training."""
        return self.sampler is not None and self.sampler.memory.asleep

    @property
    def _own_sampler(self) -> VllmSampler:
        if self.sampler is None:
            raise SamplerError(f"rank {self._spec.rank} only trains: call the ranks from {self._spec.world_size} on")
        return self.sampler

    def update(
        self,
        microbatches: Sequence[Sequence[TrainingSample]],
        totals: StepTotals,
        learning_rate: float,
        kl_coefficient: float,
    ) -> UpdateResult:
        """``TorchPolicy.update``, followed by a synchronisation with the device."""
        self._has_trained = True
        result = self.policy.update(microbatches, totals, learning_rate, kl_coefficient)
        if self._spec.device == "cuda":  # so that the time of the optimizer's kernels counts in this phase
            import torch

            torch.cuda.synchronize()
        return result

    def sync_weights(self, version: int) -> Synced:
        """Send the policy's weights, or its adapters if it has any, to this rank's sampler or the ranks that sample."""
        if self.sampler is None:
            self._sender = self._sender or self._make_sender()
            checksum = self._send_to(self._sender, version)
            self.policy.offload()
            return Synced(checksum, 0.0)
        memory = self.sampler.memory
        if self._has_trained:
            memory.decide()
        waking = _seconds_of(memory.wake_weights)
        checksum = self._send_to(self.sampler, version)
        self.policy.offload()  # frees the memory that the engine needs for its cache
        return Synced(checksum, waking + _seconds_of(memory.wake_cache))

    def _make_sender(self) -> WeightSender:
        """Called at the first sync, when all ranks are running: it waits for the ranks that sample."""
        from rlcore.sampler.channel import WeightSender
        from rlcore.sampler.start import engine_dtype

        channel = _channel(self._spec, 0) if self._spec.rank == 0 else None
        return WeightSender(channel, engine_dtype(self._spec.config.rollout, self._spec.device))

    def _send_to(self, taker: VllmSampler | WeightSender, version: int) -> int:
        from rlcore.models.sharding import unsharded

        dtype = None if self._spec.device == "cpu" else self.policy.sync_dtype
        if self._spec.config.model.lora is not None:
            if taker.needs_base:
                taker.load_base(self.policy.full_weights(dtype))
            return taker.load_adapter(self.policy.adapter_weights(dtype), version)
        if self._spec.world_size == 1:
            return taker.load_weights(unsharded(self.policy.tensors().items(), dtype), version)
        return taker.load_weights(self.policy.full_weights(dtype), version)

    def probe_samples(self, problems: Sequence[Problem]) -> list[TrainingSample]:
        from rlcore.data.probe import probe_samples

        return probe_samples(problems, self._prompts)

    def peak_memory_bytes(self) -> int:
        if self.sampler is None or self._spec.device == "cpu":
            return _peak_memory_bytes(self._spec.device)
        return self.sampler.memory.take_peak_bytes()


class RolloutWorker:
    """One rank that samples and does not train: an engine, or a part of one.

    ``sync_weights`` is collective over all ranks, ``generate`` over the ranks of one engine.
    """

    def __init__(self, spec: WorkerSpec, *, reads_weights: bool = False) -> None:
        """
        Args:
            reads_weights: from ``spec.model``; otherwise the first weight sync brings them.
        """
        clock = Clock()
        from rlcore.sampler.engine import Engine
        from rlcore.sampler.start import set_engine_environment

        set_engine_environment(spec.device)
        import torch

        from rlcore.data.pixels import ImageStore
        from rlcore.models.loading import empty_hf_model, stores_buffers
        from rlcore.sampler.vllm_sampler import VllmSampler

        torch.set_num_threads(spec.threads)
        self._spec = spec
        self._channel: WeightChannel | None = None
        engine = Engine(
            spec.model,
            spec.config,
            spec.device,
            join_world=_joined_engine_world(spec),
            reads_weights=reads_weights
            or stores_buffers(empty_hf_model(spec.model, spec.config.model.trust_remote_code)),
            clock=clock,
        )
        self._images = ImageStore(spec.dataset)
        self.sampler = VllmSampler(engine, prompts=_prompts(spec), images=self._images)
        self.start_seconds = clock.seconds

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, Answer]]:
        """The groups of this rank's engine (``tensor_parallel.answers``)."""
        return answers(self.sampler.generate(requests), self._spec.rank, self._spec.config.rollout.tensor_parallel)

    def add_images(self, dataset: Path) -> None:
        """``ImageStore.add``"""
        self._images.add(dataset)

    def read_problems(self, dataset: Path, data: DataConfig) -> None:
        """Sample problems of this dataset from here on, with prompts as ``data`` says, as if no other was sampled."""
        from rlcore.data.pixels import ImageStore

        config = self._spec.config.model_copy(update={"data": data})
        self._images = ImageStore(dataset)
        self.sampler.read_problems(_prompts(replace(self._spec, config=config)), self._images)
        self.sampler.reset_caches()

    def reset_sampler_caches(self) -> None:
        """``VllmSampler.reset_caches``"""
        self.sampler.reset_caches()

    def sync_weights(self, version: int) -> Synced:
        """Receive the tensors that rank 0 sends in ``Worker.sync_weights``."""
        if self._channel is None:
            self._channel = _channel(self._spec, 1 + self._spec.rank - self._spec.world_size)
        if self._spec.config.model.lora is None:
            return Synced(self.sampler.load_weights(self._channel.receive(), version), 0.0)
        if self.sampler.needs_base:
            self.sampler.load_base(self._channel.receive())
        return Synced(self.sampler.load_adapter(self._channel.receive(), version), 0.0)

    def peak_memory_bytes(self) -> int:
        return _peak_memory_bytes(self._spec.device)


def evaluation_worker(spec: WorkerSpec, *, checkpoint: Path | None, version: int) -> RolloutWorker:
    """One rank of an evaluation, with the weights to evaluate.

    Args:
        checkpoint: committed checkpoint with the weights; None: those of ``spec.model``.
        version: policy version of the completions.
    """
    from rlcore.models.checkpoint_weights import CheckpointWeights

    # a checkpoint's adapters are merged into its weights below
    config = spec.config.model_copy(update={"model": spec.config.model.model_copy(update={"lora": None})})
    worker = RolloutWorker(replace(spec, config=config), reads_weights=checkpoint is None)
    if checkpoint is None:
        worker.sampler.keep_loaded_weights(version)
    else:
        weights = CheckpointWeights(checkpoint, spec.model, trust_remote_code=config.model.trust_remote_code)
        worker.sampler.load_weights(weights.tensors(), version)
    return worker


def _channel(spec: WorkerSpec, member: int) -> WeightChannel:
    from rlcore.sampler.channel import WeightChannel
    from rlcore.sampler.start import engine_dtype

    return WeightChannel(
        member,
        1 + spec.config.resources.rollout_workers,
        address=spec.master_address,
        port=spec.channel_port,
        device=spec.device,
        dtype=engine_dtype(spec.config.rollout, spec.device),
    )


def _peak_memory_bytes(device: str) -> int:
    """On a GPU since the last call; on a CPU the process's peak so far."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return int(peak)


def _prompts(spec: WorkerSpec) -> PromptBuilder:
    from rlcore.data.prompts import load_prompts

    return load_prompts(spec.config, spec.model)


def _joined_engine_world(spec: WorkerSpec) -> bool:
    """With tensor parallelism, join the world of the ranks that hold this rank's engine. Returns whether it did."""
    ranks = spec.config.rollout.tensor_parallel
    if ranks > 1:
        _enter_world(spec, spec.rank % ranks, ranks, spec.engine_address, spec.engine_port)
    return ranks > 1


def _enter_world(spec: WorkerSpec, rank: int, world_size: int, address: str, port: int) -> None:
    """Join torch.distributed in the way that vLLM's external launcher expects."""
    from rlcore.sampler.start import set_engine_environment

    set_engine_environment(spec.device)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(spec.local_rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
    import torch
    import torch.distributed as dist

    if spec.device == "cuda":
        torch.cuda.set_device(spec.local_rank)
        # warn only, because vLLM samples with an operation (cumsum) that has no deterministic kernel
        torch.use_deterministic_algorithms(spec.config.resources.deterministic, warn_only=True)
    torch.set_num_threads(spec.threads)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if spec.device == "cpu" else "cpu:gloo,cuda:nccl", init_method="env://")
