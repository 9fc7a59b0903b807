"""``python -m rlcore.jobs.merge spec.json``: merge a checkpoint into a Hugging Face folder and verify the folder.

Verification computes the log-probs of the checkpoint's probe (fixed sequences) with transformers and with vLLM, and
compares them with those of the live trainer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from rlcore.artifacts import CheckpointRef, ModelRef
from rlcore.data.prepare.folder import PROMPT_FILES
from rlcore.data.probe import PROBE_FILE, ProbeSequence, read_probe
from rlcore.errors import ModelError
from rlcore.files import VERIFIED, building, folder_digest, remove_whole
from rlcore.jobs import job_main
from rlcore.models.checkpoint_weights import CheckpointWeights
from rlcore.models.comparison import Limits, Values, allowed_differences, difference, image_reader, sequence_logprobs
from rlcore.models.loading import empty_hf_model, exact_attention, load_hf_config, load_hf_model
from rlcore.models.stored_weights import StoredWeights, write_shards
from rlcore.process import Clock
from rlcore.segment.store import verify_checkpoint
from rlcore.specs import MergeSpec
from rlcore.types import ImageRef

_SHARD_BYTES = 4 << 30  # of a safetensors file, and the most that the merge holds in memory
# Files that a model folder needs besides config.json and weights. Nothing else of the base is copied.
_COPIED = (
    *PROMPT_FILES, "generation_config.json", "video_preprocessor_config.json", "vocab.txt", "*.tiktoken", "*.jinja",
    "*.py", "LICENSE*",
)  # fmt: skip


class VerifyReport(BaseModel):
    """Differences from the merged model in float32 through transformers, in nats."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_sequences: int
    num_tokens: int
    transformers_max_delta: float  # of the live policy
    vllm_max_delta: float | None  # of the merged model through vLLM; None: not checked
    allowed_max: float | None = None  # for one token
    allowed_rms: float | None = None  # root mean square over the tokens


class MergeRecord(BaseModel):
    """``verified.json``: a folder with this file is a whole and verified model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: CheckpointRef
    model: ModelRef
    report: VerifyReport
    seconds_of_parts: dict[str, float] = {}


LogProbsOf = Callable[[Path, list[ProbeSequence]], list[list[float]]]


def merge_checkpoint(checkpoint: Path, base: Path, out: Path, *, trust_remote_code: bool = False) -> int:
    """Fill ``out`` with the checkpoint's weights as a Hugging Face folder and return its number of parameters.

    Architecture, tokenizer, processor and chat template are those of ``base``. Weights are the checkpoint's in float32,
    or, if it holds adapters, ``base``'s with the adapters added. The result is read back and compared bit for bit.

    Raises:
        CheckpointError: names or shapes differ from the architecture's.
        ModelError: the written weights read back changed.
    """
    weights = CheckpointWeights(checkpoint, base, trust_remote_code=trust_remote_code)
    out.mkdir(parents=True, exist_ok=True)
    buckets = weights.buckets(_SHARD_BYTES)
    write_shards(({name: _float32(v) for name, v in bucket.items()} for bucket in buckets), weights.base, out)
    _copy_the_rest(base, out)
    _require_same_values(out, weights, trust_remote_code)
    return sum(parameter.numel() for parameter in weights.model.parameters())  # tied ones count once


def _float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def verify_merged(
    model_dir: Path,
    probe: Path,
    *,
    log_prob_with_vllm: LogProbsOf | None,
    read_image: Callable[[ImageRef], Image.Image],
    min_pixels: int,
    max_pixels: int,
    dtype: torch.dtype = torch.float32,
    vllm_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tolerance: float | None = None,
    trust_remote_code: bool = False,
    clock: Clock | None = None,
) -> VerifyReport:
    """Compare a model folder with a probe file, through transformers and, if given, through vLLM.

    Args:
        read_image: reads an image of the prepared dataset.
        dtype: in which the live trainer computed the probe.
        vllm_dtype: in which vLLM computes.
        tolerance: largest |delta log-prob| allowed, nats. None: derived, see ``allowed_differences``.
        clock: gets the seconds of each part.

    Raises:
        ModelError: the live policy or vLLM differs from the merged model in float32 by more than is allowed, or the
            probe is empty.
    """
    sequences, clock = read_probe(probe), clock or Clock()
    read = image_reader(model_dir, read_image, min_pixels, max_pixels)

    def through_transformers(dtype: torch.dtype, kinds: Sequence[str]) -> list[list[Values]]:
        """The log-probs with each kind of attention."""
        name = str(dtype).removeprefix("torch.")
        with clock(f"load in {name}"):
            model: Any = load_hf_model(
                model_dir, dtype, trust_remote_code, attn_implementation=kinds[0], spread_over_gpus=device == "cuda"
            )
        found = []
        with clock(f"transformers in {name}"), torch.no_grad():
            for kind in kinds:
                model.set_attn_implementation(kind)
                found.append([sequence_logprobs(model, item, read).double().cpu().numpy() for item in sequences])
        return found

    kinds = exact_attention(load_hf_config(model_dir, trust_remote_code))
    (exact,) = through_transformers(torch.float32, kinds[:1])

    def allowed(dtype: torch.dtype) -> Limits:
        if tolerance is not None:
            return tolerance, tolerance
        rounded = [] if dtype == torch.float32 else through_transformers(dtype, kinds)
        return allowed_differences([v - e for values in rounded for v, e in zip(values, exact, strict=True)])

    limits = allowed(dtype)
    vllm_limits = limits if vllm_dtype == dtype else allowed(vllm_dtype)
    if device == "cuda":
        torch.cuda.empty_cache()  # vLLM comes next and measures free memory
    live = [np.asarray(sequence.logprobs) for sequence in sequences]
    delta = _require_near(exact, live, "the trainer", model_dir, limits)
    vllm_delta = None
    if log_prob_with_vllm is not None:
        with clock("vLLM"):
            vllm = [np.asarray(values) for values in log_prob_with_vllm(model_dir, sequences)]
        vllm_delta = _require_near(exact, vllm, "vLLM", model_dir, vllm_limits)
    return VerifyReport(
        num_sequences=len(sequences),
        num_tokens=sum(map(len, exact)),
        transformers_max_delta=delta,
        vllm_max_delta=vllm_delta,
        allowed_max=max(limits[0], vllm_limits[0]),
        allowed_rms=max(limits[1], vllm_limits[1]),
    )


def merge(spec: MergeSpec) -> ModelRef:
    """The job: merge, verify with transformers and vLLM, and mark as verified. An existing verified merge is reused."""
    clock = Clock()
    verify, trusted = partial(_verify_for, spec, clock), spec.experiment.model.trust_remote_code
    return merge_once(spec.checkpoint, spec.base, spec.out, verify, trust_remote_code=trusted, clock=clock)


def merge_once(
    checkpoint: CheckpointRef,
    base: ModelRef,
    out: Path,
    verify: Callable[[Path], VerifyReport],
    *,
    trust_remote_code: bool = False,
    clock: Clock | None = None,
) -> ModelRef:
    """Merge ``checkpoint`` into ``out`` unless ``out`` already is a verified merge of the same checkpoint.

    ``out`` appears whole and verified. If two merges run at once, the first to finish counts.

    Raises:
        CheckpointError: the checkpoint does not match its manifest.
        ModelError: verification failed and nothing was written, or another process merged another checkpoint into
            ``out``.
    """
    known = _merged_before(checkpoint, out)
    if known is not None:
        return known
    clock = clock or Clock()
    with clock("hashes of the checkpoint"):
        verify_checkpoint(checkpoint)
    remove_whole(out)  # not verified, or merged from another checkpoint
    with building(out) as folder:
        with clock("write"):
            parameters = merge_checkpoint(
                Path(checkpoint.path), Path(base.path), folder, trust_remote_code=trust_remote_code
            )
        report = verify(folder)
        with clock("hashes of the model"):
            digest = folder_digest(folder)
        model = ModelRef(
            path=str(out),
            digest=digest,
            source=f"{checkpoint.run_id} step {checkpoint.step} ({base.source})",
            num_parameters=parameters,
        )
        parts = {name: round(value, 1) for name, value in clock.phases.items()}
        record = MergeRecord(checkpoint=checkpoint, model=model, report=report, seconds_of_parts=parts)
        (folder / VERIFIED).write_text(record.model_dump_json(indent=1))
    merged = _merged_before(checkpoint, out)
    if merged is None:
        raise ModelError(f"{out} was filled from another checkpoint while {checkpoint.path} was merged. Merge again.")
    return merged


def _merged_before(checkpoint: CheckpointRef, out: Path) -> ModelRef | None:
    """The verified merge of this checkpoint at ``out``, or None."""
    if not (out / VERIFIED).exists():
        return None
    record = MergeRecord.model_validate_json((out / VERIFIED).read_text())
    if record.checkpoint.manifest_sha256 != checkpoint.manifest_sha256:
        return None
    return record.model.model_copy(update={"path": str(out)})


def _verify_for(spec: MergeSpec, clock: Clock, out: Path) -> VerifyReport:
    from rlcore.data.pixels import ImageStore
    from rlcore.distributed.cluster import claim_device
    from rlcore.models.dtypes import compute_dtype
    from rlcore.sampler.engine import vllm_sequence_logprobs
    from rlcore.sampler.start import engine_dtype, set_engine_environment

    config, dataset = spec.experiment, Path(spec.dataset.path)
    device = claim_device(config, config.rollout.tensor_parallel)
    set_engine_environment(device)

    def with_vllm(model: Path, sequences: list[ProbeSequence]) -> list[list[float]]:
        return vllm_sequence_logprobs(model, sequences, dataset, config, device)

    return verify_merged(
        out,
        Path(spec.checkpoint.path) / PROBE_FILE,
        log_prob_with_vllm=with_vllm,
        read_image=ImageStore(dataset).read,
        min_pixels=config.data.min_pixels,
        max_pixels=config.data.max_pixels,
        dtype=compute_dtype(config, device),
        vllm_dtype=engine_dtype(config.rollout, device),
        device=device,
        trust_remote_code=config.model.trust_remote_code,
        clock=clock,
    )


def _require_near(exact: Sequence[Values], actual: Sequence[Values], by: str, model_dir: Path, limits: Limits) -> float:
    """The largest difference of one token.

    Args:
        exact, actual: log-probs [C] of each sequence's completion.

    Raises:
        ModelError: it, or the root mean square of all, is above its limit.
    """
    apart = difference(exact, actual)
    if not apart.is_within(limits):
        raise ModelError(
            f"{model_dir} is not the policy of its checkpoint: its log-probs in float32 and those of {by} differ by "
            f"{apart.spread:.3g} nats in root mean square over {sum(map(len, exact))} tokens (allowed are "
            f"{limits[1]:.3g}) and by up to {apart.largest:.3g} (allowed are {limits[0]:.3g}). Sequence "
            f"{apart.sequence}, completion token {apart.token}: found {actual[apart.sequence][apart.token]}, expected "
            f"{exact[apart.sequence][apart.token]}. Do not use this model: merge again, and check library versions "
            "against the checkpoint's manifest."
        )
    return apart.largest


def _require_same_values(folder: Path, weights: CheckpointWeights, trust_remote_code: bool) -> None:
    written = StoredWeights(folder, empty_hf_model(folder, trust_remote_code))
    different = sorted(
        name
        for bucket in weights.buckets(_SHARD_BYTES)
        for name, value in bucket.items()
        if not torch.equal(written.read(name), _float32(value))
    )
    if different:
        raise ModelError(
            f"{folder}: {len(different)} tensors read back other than they were saved: {different[:5]}. "
            "Check the disk and the transformers version, and merge again."
        )


def _copy_the_rest(base: Path, folder: Path) -> None:
    for path in sorted({path for pattern in _COPIED for path in base.glob(pattern)}):
        shutil.copyfile(path, folder / path.name)
    # The base's config, because the architecture is the same. Only the dtype is that of the merged weights.
    config: dict[str, Any] = json.loads((base / "config.json").read_text())
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in {"dtype", "torch_dtype"} & section.keys():
            section[key] = "float32"
    if not {"dtype", "torch_dtype"} & config.keys():
        config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    job_main(merge, MergeSpec)
