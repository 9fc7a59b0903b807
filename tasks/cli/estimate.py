"""Memory per GPU and time per step of an experiment, without a GPU, weights or data."""

from __future__ import annotations

import sys

from pydantic import BaseModel, ConfigDict

from infra.settings import Settings
from rlcore.config import ExperimentConfig, ModelConfig
from rlcore.config.reward import ModelReward
from rlcore.errors import ConfigError
from rlcore.estimate import (
    BANDWIDTH,
    GIB,
    MEMORY,
    Architecture,
    ArchitectureRef,
    ArchitectureSpec,
    Plan,
    estimate_memory,
    estimate_seconds,
)
from rlcore.flops import PEAK_BF16
from rlcore.rewards.scoring import require_scoring_model, weight_bytes
from tasks.driver.jobs import new_result_path, run_job

MEAN_SHARE = 0.5
"""Assumed mean length of prompts and completions as a share of their limits; only a run can measure it."""
_HOUR = 3600.0


class DryRun(BaseModel):
    """The estimate in numbers. Memory in GiB per GPU, times in seconds of one rollout batch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experiment: str
    device: str
    devices: int
    parameters: int
    trained_parameters: int
    tower_parameters: int
    memory: dict[str, float]
    loading_gib: float
    training_gib: float
    sampling_gib: float
    device_gib: float
    host_gib: float  # per worker
    fits: bool
    asks_for_cpu: bool  # the times are still those of the GPU
    kv_cache_wanted_gib: float
    seconds: dict[str, float]
    seconds_per_batch: float
    batches: int
    hours: float
    gpu_hours: float

    def text(self) -> str:
        """The estimate as lines of text."""
        parts = [f"  {name:<34}{value:>9.2f} GiB" for name, value in self.memory.items()]
        phases = [f"  {name:<34}{value:>9.1f} s" for name, value in self.seconds.items()]
        verdict = "fits" if self.fits else (
            "DOES NOT FIT: training.tokens_per_microbatch, model.gradient_checkpointing, training.offload, "
            "training.optimizer=adamw_bf16, more workers or rollout.gpu_memory_utilization change it"
        )  # fmt: skip
        return "\n".join(
            [
                f"{self.experiment}: {self.parameters / 1e9:.2f} B parameters, {self.trained_parameters / 1e9:.2f} B "
                f"trained, {self.tower_parameters / 1e9:.2f} B in a vision tower, on {self.devices} x {self.device}",
                "Memory per GPU:",
                *parts,
                f"  {'while loading':<34}{self.loading_gib:>9.2f} GiB",
                f"  {'while updating':<34}{self.training_gib:>9.2f} GiB of {self.device_gib:.1f}",
                f"  {'while sampling':<34}{self.sampling_gib:>9.2f} GiB: {verdict}",
                f"  {'host memory per worker':<34}{self.host_gib:>9.2f} GiB, with its part of a checkpoint",
                f"  {'cache, all sequences at full length':<36}{self.kv_cache_wanted_gib:>7.1f} GiB; what does not fit "
                "waits its turn",
                f"Time per rollout batch, prompts and completions {100 * MEAN_SHARE:.0f} % of their limits on average:",
                *phases,
                f"  {'all':<34}{self.seconds_per_batch:>9.1f} s; {self.batches} batches: {self.hours:.1f} h, "
                f"{self.gpu_hours:.0f} GPU-hours, without evaluation, starts and checkpoints",
                *(["The experiment asks for the CPU; these are figures of the GPU."] if self.asks_for_cpu else []),
                "How far off such estimates are: docs/cost.md.",
            ]
        )


def dry_run(experiment: ExperimentConfig, device: str) -> DryRun:
    """Estimate, and print the estimate for people to stderr.

    Raises:
        ConfigError: no such device.
        ModelError: the model's config.json cannot be read.
    """
    if device not in MEMORY:
        raise ConfigError(f"no device {device!r}. Allowed: {', '.join(sorted(MEMORY))}.")
    settings = Settings()
    chosen = experiment.algorithm.teacher
    teacher = None if chosen is None else _architecture(chosen.model, settings)
    estimate = compute_estimate(experiment, _architecture(experiment.model, settings), device, teacher)
    sys.stderr.write(f"{estimate.text()}\n")
    return estimate


def _architecture(model: ModelConfig, settings: Settings) -> Architecture:
    spec = ArchitectureSpec(result=new_result_path(settings, "architecture"), model=model)
    return run_job("rlcore.jobs.architecture", spec, ArchitectureRef, settings, quiet=True).architecture


def compute_estimate(
    experiment: ExperimentConfig, model: Architecture, device: str, teacher: Architecture | None = None
) -> DryRun:
    plan = plan_of(experiment, model, device, teacher)
    memory = estimate_memory(model, plan)
    times = estimate_seconds(model, plan, PEAK_BF16[device], BANDWIDTH[device])
    training, sampling = memory.training, memory.sampling(plan.offload)
    batches = experiment.training.steps // experiment.training.steps_per_batch
    hours = times.total * batches / _HOUR
    parts = {
        "weights (model.path, sharded)": memory.weights,
        "gradients": memory.gradients,
        "optimizer state": memory.optimizer,
        "weights in the compute dtype": memory.whole_copy,
        "reference policy": memory.reference,
        **({} if teacher is None else {"teacher (algorithm.teacher.path)": memory.teacher}),
        "activations": memory.activations,
        "logits and their gradients": memory.head,
        "temporaries": memory.temporaries,
        "sampler weights": memory.sampler_weights,
        "sampler KV cache": memory.kv_cache,
    }
    if memory.reward_model:
        parts["reward model, in its own process"] = memory.reward_model
    return DryRun(
        experiment=experiment.name,
        device=device,
        devices=experiment.resources.devices,
        parameters=model.parameters,
        trained_parameters=model.trained_parameters,
        tower_parameters=model.tower_parameters,
        memory={name: size / GIB for name, size in parts.items()},
        loading_gib=memory.loading / GIB,
        training_gib=training / GIB,
        sampling_gib=sampling / GIB,
        device_gib=memory.device / GIB,
        host_gib=memory.host / GIB,
        asks_for_cpu=experiment.resources.device == "cpu",
        fits=max(memory.loading, training, sampling) <= memory.device and memory.kv_cache > 0,
        kv_cache_wanted_gib=memory.kv_cache_wanted / GIB,
        seconds={
            "generate": times.generate,
            f"old{'' if teacher is None else ', teacher'} and reference log-probs": times.logprobs,
            "update": times.update,
            "weight sync": times.weight_sync,
            "sleep and wake": times.sleep_and_wake,
        },
        seconds_per_batch=times.total,
        batches=batches,
        hours=hours,
        gpu_hours=hours * experiment.resources.devices,
    )


def plan_of(
    experiment: ExperimentConfig, model: Architecture, device: str, teacher: Architecture | None = None
) -> Plan:
    training, rollout, data = experiment.training, experiment.rollout, experiment.data
    algorithm, resources = experiment.algorithm, experiment.resources
    earlier = algorithm.kl.place == "reward" or algorithm.teacher is not None or algorithm.entropy_mask is not None
    all_old = earlier or training.ppo_epochs > 1 or algorithm.recompute_old_logprobs
    return Plan(
        reward_model=_reward_model_bytes(experiment),
        workers=resources.workers,
        rollout_workers=resources.rollout_workers,
        engine_workers=rollout.tensor_parallel,
        group_size=rollout.group_size,
        problems=training.problems_per_batch,
        passes=training.ppo_epochs,
        prompt_tokens=MEAN_SHARE * data.max_prompt_tokens,
        completion_tokens=MEAN_SHARE * rollout.max_completion_tokens,
        longest=experiment.max_sequence_tokens,
        image_size=_image_size(experiment, model),
        tokens_per_microbatch=training.tokens_per_microbatch,
        checkpointing=experiment.model.gradient_checkpointing,
        compiled=training.compile_blocks != "off",
        bf16_optimizer=training.optimizer == "adamw_bf16",
        reshard={"on": True, "off": False, "auto": resources.workers > 1}[training.reshard_after_forward],
        offload=training.offload,
        adapters=experiment.model.lora is not None,
        sleeps=rollout.sleep != "never" and not resources.rollout_workers,
        reference=algorithm.kl.coefficient > 0 and experiment.model.lora is None,
        old_logprobs=1.0 if all_old else 1 - 1 / training.mini_batches,
        sampler_share=rollout.gpu_memory_utilization,
        max_sequences=rollout.max_sequences,
        in_flight=rollout.partial.in_flight if rollout.partial is not None else 1.0,
        overlapped=experiment.prefetch and resources.rollout_workers > 0,
        device=device,
        teacher=teacher,
    )


def _image_size(experiment: ExperimentConfig, model: Architecture) -> tuple[int, int] | None:
    """Size of a square image that fills the mean prompt, at most data.max_pixels."""
    tower = model.shape.tower
    if tower is None:
        return None
    pixels_per_token = tower.patch_size**2 * tower.merged
    pixels = min(experiment.data.max_pixels, MEAN_SHARE * experiment.data.max_prompt_tokens * pixels_per_token)
    unit = round((tower.patch_size**2 * tower.merged) ** 0.5)
    side = max(1, int(pixels**0.5) // unit) * unit
    return side, side


def _reward_model_bytes(experiment: ExperimentConfig) -> int:
    """Weights of the reward models on GPUs that train; 0 if they have other places.

    Raises:
        RewardError: a folder is no reward model.
    """
    models = [reward.model for reward in experiment.rewards.values() if isinstance(reward, ModelReward)]
    shared = [model for model in models if _trains(model.device, experiment.resources.devices)]
    for model in shared:
        require_scoring_model(model)
    return sum(weight_bytes(model.path, model.dtype) for model in shared)


def _trains(device: str, devices: int) -> bool:
    return device.startswith("cuda:") and int(device.partition(":")[2]) < devices
