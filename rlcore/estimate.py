"""Estimates the memory per GPU and the seconds per rollout batch of a run before it starts. No torch, no weights.

Memory is computed from shapes. Constants for what kernels decide (saved activations, temporaries) were fitted on one
H200. Time is work divided by efficiencies measured there. ``tests/unit/test_estimate.py`` and docs/cost.md have the
errors of both.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from rlcore.config import ModelConfig
from rlcore.flops import GroupSize, ModelShape, Work, pass_work
from rlcore.specs import JobSpec

GIB = 2**30
_COMPUTE = 2  # bytes of bfloat16, for forward, backward and sampling
_LOGITS = 3 * GIB  # algorithms.logprobs.LOGIT_BYTES of float32 logits, and half as much for their gradient
_TEMPORARIES = 2 * GIB  # one block's forward and backward, and fragmentation
_SCORER = 2 * GIB  # CUDA and a batch of a reward model's process; an assumption, not measured
_STATES = 4 * GIB  # models.recurrence computes the rule of so many heads again at a time
_ENGINE = 2 * GIB  # vLLM's activations and CUDA graphs
_PIXELS = 4 * GIB  # vLLM's cache of processed images, mm_processor_cache_gb
_PROCESS = 4 * GIB  # host memory of a worker before it holds any tensor: torch, vLLM, CUDA's own
_STACK_COPIES = 3  # of a layer's experts while they are stacked: as stored, each kind stacked, all joined
_EAGER = 1.85  # saved activations relative to compiled blocks: norms in float32, every intermediate
_SELECTIVE = 0.55  # saved activations relative to no checkpointing: only matrix products and attention

MEMORY = {"H100": 79.1, "H200": 139.8, "A100": 79.2, "B200": 178.4}
"""GiB that torch sees of one device, by name."""
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12, "A100": 2.04e12, "B200": 8.0e12}
"""Bytes per second of device memory, from the vendors' data sheets."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peak, measured on one H200 with text models of 1.5 B and 7 B and a vision-language model of 3 B."""

    update_kept: float = 0.45  # model FLOPs utilisation without checkpointing, compiled; text, 41,000 to 135,000 tokens
    update_full: float = 0.345  # with every block recomputed
    update_selective: float = 0.44  # measured with 7 B in bfloat16
    update_tower: float = 0.88  # factor for models with a trained tower
    forward: float = 0.45  # log-prob passes; not measured separately
    decode: float = 0.54  # of bandwidth and FLOPs together, with 256 to 1,024 sequences at a time
    sync_bytes_per_second: float = 75e9
    sleep_and_wake: float = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a model, from its config.json."""

    shape: ModelShape
    parameters: int  # of the whole model; tied weights count once
    trained_parameters: int
    tower_parameters: int
    hidden: int
    intermediate: int  # of the feed-forward layer; the sum over the experts that a token uses
    key_value_width: int  # key-value heads * head size
    vocabulary: int
    decoder_parameters: int  # of the decoder's layers, with all experts
    largest_parameter: int  # elements: of the embedding, or of the stacked experts of a layer
    experts_per_token: int = 1
    largest_stack: int = 0  # elements of the largest parameter that the files store in parts: the experts of a layer
    tower_hidden: int = 0
    tower_intermediate: int = 0
    tower_layers: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings that decide memory and time. Tokens per sequence are means, except ``longest``."""

    workers: int
    rollout_workers: int
    engine_workers: int  # workers that share one sampler
    group_size: int
    problems: int  # per rollout batch
    passes: int  # PPO epochs
    prompt_tokens: float
    completion_tokens: float
    longest: int
    image_size: tuple[int, int] | None  # pixels of each problem's image, if it has one
    tokens_per_microbatch: int
    checkpointing: str  # none, selective, full
    compiled: bool
    bf16_optimizer: bool
    reshard: bool
    offload: bool
    adapters: bool  # LoRA trains, and all else is frozen
    sleeps: bool  # the sampler frees its GPU memory while the policy trains
    reference: bool
    old_logprobs: float  # share of a batch for which they are computed in a separate pass
    sampler_share: float  # of the GPU's memory
    max_sequences: int  # of one sampler
    in_flight: float  # unfinished sequences per sequence of a batch; above 1 with partial rollouts
    overlapped: bool  # other GPUs sample the next batch while this one trains
    device: str  # a key of MEMORY
    reward_model: int = 0  # bytes of a reward model on the policy's first GPU
    teacher: Architecture | None = None


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes per GPU."""

    weights: int
    gradients: int
    optimizer: int
    whole_copy: int  # unsharded weights in the compute dtype: of the model, or of two blocks at a time
    reference: int
    activations: int
    head: int  # logits and their gradients
    temporaries: int
    sampler_weights: int
    kv_cache: int  # the rest of the sampler's share
    kv_cache_wanted: int  # for max_sequences of the greatest length
    device: int
    largest_tensor: int  # rows of one worker, as the files store them
    host_stack: int  # while experts are loaded: each worker reads all of a layer, and keeps its own rows
    host_checkpoint: int  # a worker's copy of its part of the train state, written in the background
    host_offload: int
    host_sampler: int  # weights of an engine that sleeps and keeps them, as one with adapters does; processed images
    reward_model: int = 0  # in a process of its own on the same GPU, with what that process needs
    teacher: int = 0

    @property
    def loading(self) -> int:
        """While the policy is loaded: a worker reads its own rows, one tensor at a time."""
        return self.weights + self.reference + self.teacher + self.largest_tensor + _ENGINE + self.reward_model

    @property
    def host(self) -> int:
        """Bytes of host memory per worker. Pages of the model's files that the system caches are not counted."""
        loaded = self.largest_tensor + self.host_stack
        return _PROCESS + loaded + self.host_checkpoint + self.host_offload + self.host_sampler

    @property
    def training(self) -> int:
        """During an update, while the engine sleeps."""
        parts = (self.weights, self.gradients, self.optimizer, self.whole_copy, self.reference, self.activations)
        return sum(parts) + self.teacher + self.head + self.temporaries + self.reward_model

    def sampling(self, offload: bool) -> int:
        """During sampling, on a GPU that also trains."""
        trainer = 0 if offload else self.weights + self.optimizer + self.reference + self.teacher
        return trainer + self.sampler_weights + max(0, self.kv_cache) + _ENGINE + self.reward_model


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Seconds of one rollout batch."""

    generate: float
    logprobs: float  # old, reference and teacher
    update: float
    weight_sync: float
    sleep_and_wake: float
    overlapped: bool

    @property
    def total(self) -> float:
        training = self.logprobs + self.update
        longest = max(self.generate, training) if self.overlapped else self.generate + training
        return longest + self.weight_sync + self.sleep_and_wake


def estimate_memory(model: Architecture, plan: Plan) -> MemoryEstimate:
    """Memory of a GPU that trains. ``kv_cache`` is negative if the sampler's share cannot hold the weights.

    Weights, gradients and moments are sharded over the workers; frozen weights are in the compute dtype. Without
    resharding a worker also holds the whole model in the compute dtype and its gradient in float32.
    """
    trained, frozen = model.trained_parameters, model.parameters - model.trained_parameters
    master = 2 if plan.bf16_optimizer else 4
    moments = 3 * 2 if plan.bf16_optimizer else 2 * 4
    blocks = model.shape.layers + model.tower_layers
    if plan.reshard:
        two_blocks = 2 * model.parameters * _COMPUTE // max(1, blocks)
        whole_copy, gradients = two_blocks, trained * master // plan.workers + 2 * two_blocks
    else:
        whole_copy, gradients = model.parameters * _COMPUTE, trained * 4
    device = int(MEMORY[plan.device] * GIB)
    sampler = model.parameters * _COMPUTE // plan.engine_workers
    head_width = model.vocabulary * model.hidden
    state = whole_state = trained * moments
    if plan.offload:
        state = min(state, model.largest_parameter * moments)
    weights = (trained * master + frozen * _COMPUTE) // plan.workers
    saved = trained * master if plan.adapters else trained * master + frozen * _COMPUTE
    reference = model.parameters * _COMPUTE // plan.workers if plan.reference else 0
    teacher = plan.teacher.parameters * _COMPUTE // plan.workers if plan.teacher is not None else 0
    read = [model] if plan.teacher is None else [model, plan.teacher]
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=state // plan.workers,
        whole_copy=whole_copy,
        reference=reference,
        activations=_activations(model, plan),
        head=_LOGITS + head_width * (4 + _COMPUTE),
        temporaries=_TEMPORARIES + (_STATES if model.shape.recurrent_layers else 0),
        sampler_weights=sampler,
        kv_cache=int(plan.sampler_share * device) - sampler - _ENGINE,
        kv_cache_wanted=plan.max_sequences * _sequence_bytes(model, plan.longest) // plan.engine_workers,
        device=device,
        largest_tensor=max(each.largest_parameter for each in read) * _COMPUTE // plan.workers,
        host_stack=_STACK_COPIES * max(each.largest_stack for each in read) * _COMPUTE,
        host_checkpoint=(saved + whole_state) // plan.workers,
        host_offload=weights + reference + teacher + whole_state // plan.workers if plan.offload else 0,
        host_sampler=(sampler if plan.sleeps and plan.adapters else 0) + (_PIXELS if model.tower_parameters else 0),
        reward_model=plan.reward_model + _SCORER if plan.reward_model else 0,
        teacher=teacher,
    )


def _activations(model: Architecture, plan: Plan) -> int:
    """Saved activations of a full microbatch when its backward pass begins.

    A recomputed block saves its input. Other blocks save, per token, queries, keys, values, the outputs of attention
    and norms, and three widths of the feed-forward layer. Each expert but the first also has an input and an output of
    its own.
    """
    tokens, layers = plan.tokens_per_microbatch, model.shape.layers
    inputs = tokens * layers * model.hidden * _COMPUTE
    widths = 3 * model.intermediate + 4 * model.hidden + 2 * model.key_value_width
    widths += 2 * (model.experts_per_token - 1) * model.hidden
    kept = tokens * layers * widths * _COMPUTE
    tower, shape = 0, model.shape.tower
    if shape is not None and shape.trains and plan.image_size is not None:
        images = tokens / (plan.prompt_tokens + plan.group_size * plan.completion_tokens)
        patches = images * shape.patches(*plan.image_size)
        per_patch = 3 * model.tower_intermediate + 7 * model.tower_hidden
        tower = int(patches * model.tower_layers * _COMPUTE)
        inputs += tower * model.tower_hidden
        kept += tower * per_patch
    share = {"none": 1.0, "selective": _SELECTIVE, "full": 0.0}[plan.checkpointing]
    return int(inputs + share * kept * (1.0 if plan.compiled else _EAGER))


def _sequence_bytes(model: Architecture, tokens: float) -> int:
    """Of the sampler's cache: a key and a value for each token in each layer with attention, and the states of the
    other layers."""
    with_attention = model.shape.layers - model.shape.recurrent_layers
    keys_and_values = 2 * with_attention * model.key_value_width * tokens
    return int((keys_and_values + model.shape.state_elements) * _COMPUTE)


def batch_work(model: Architecture, plan: Plan) -> Work:
    """The work of one pass over a rollout batch, with each prompt computed once for its group."""
    completion, prompt = round(plan.completion_tokens), round(plan.prompt_tokens)
    group = GroupSize(prompt, (completion,) * plan.group_size, completion * plan.group_size)
    images = [plan.image_size] * plan.problems if plan.image_size is not None else []
    return pass_work(model.shape, [group] * plan.problems, images)


def estimate_seconds(
    model: Architecture, plan: Plan, peak: float, bandwidth: float, efficiency: Efficiency | None = None
) -> TimeEstimate:
    """
    Args:
        peak: dense bfloat16 FLOP/s of one device.
        bandwidth: of its memory, bytes per second.
    """
    rates = efficiency or Efficiency()
    work = batch_work(model, plan)
    rate = {"none": rates.update_kept, "selective": rates.update_selective, "full": rates.update_full}
    share = rate[plan.checkpointing]
    if model.shape.tower is not None and model.shape.tower.trains:
        share *= rates.update_tower
    scored = (plan.old_logprobs + int(plan.reference)) * work.forward_flops
    if plan.teacher is not None:
        scored += batch_work(plan.teacher, plan).forward_flops
    return TimeEstimate(
        generate=_generate(model, plan, peak, bandwidth) / rates.decode,
        logprobs=scored / (plan.workers * peak * rates.forward),
        update=plan.passes * (work.forward_flops + work.backward_flops) / (plan.workers * peak * share),
        weight_sync=model.parameters * _COMPUTE / rates.sync_bytes_per_second,
        sleep_and_wake=0.0 if plan.rollout_workers else rates.sleep_and_wake,
        overlapped=plan.overlapped,
    )


def _generate(model: Architecture, plan: Plan, peak: float, bandwidth: float) -> float:
    """Seconds at full efficiency. Each decoding step reads weights and cache and computes the layers. Of experts it
    reads at most those that its sequences use. Before that, every prompt and every continued completion is computed
    once. Communication within a sampler is not counted."""
    samplers = (plan.rollout_workers or plan.workers) / plan.engine_workers
    peak, bandwidth = plan.engine_workers * peak, plan.engine_workers * bandwidth
    sequences = plan.problems * plan.group_size / samplers
    together = min(plan.in_flight * sequences, plan.max_sequences)
    decoder = model.shape.parameters + model.shape.head_parameters
    context = plan.prompt_tokens + plan.completion_tokens / 2
    layers = min(model.decoder_parameters, together * model.shape.parameters)
    read = (layers + model.shape.head_parameters) * _COMPUTE + together * _sequence_bytes(model, context)
    step = read / bandwidth + 2 * decoder * together / peak
    begun = (plan.in_flight - 1) * sequences * context
    prompts = 2 * decoder * (plan.problems / samplers * plan.prompt_tokens + begun) / peak
    return sequences / together * plan.completion_tokens * step + prompts


class ArchitectureSpec(JobSpec):
    """rlcore.jobs.architecture: ModelConfig -> ArchitectureRef, from config.json alone."""

    model: ModelConfig


class ArchitectureRef(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: Architecture
