"""A teacher beside the policy: which models can be one, and the tokens that it lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from rlcore.config import ModelConfig
from rlcore.data.processor import load_processor
from rlcore.errors import ModelError
from rlcore.families import images_of
from rlcore.models.loading import load_hf_config
from rlcore.models.stored_weights import Values
from rlcore.types import ScoredTokens, TrainingSample

_ADVICE = (
    "Set algorithm.teacher.path to a model of the policy's family, which has the same tokens, or change model.path."
)
_LISTED = 3  # of the differing tokens or settings


class Teacher(NamedTuple):
    """An architecture with its parameters on the meta device, and their values."""

    hf: nn.Module
    weights: Values


def require_same_tokens(policy: Path, teacher: Path, *, trust_policy: bool, trust_teacher: bool) -> None:
    """Refuse a teacher that reads other tokens or other pixels than the policy.

    Logits may have different sizes, which is padding: only tokens of the tokenizer count.

    Raises:
        ModelError: another vocabulary, too few logits for it, another image placeholder or image processor, or a
            teacher without images for a policy with some.
    """
    own, other = (
        load_processor(ModelConfig(path=str(folder), trust_remote_code=trusted))
        for folder, trusted in ((policy, trust_policy), (teacher, trust_teacher))
    )
    ours, theirs = own.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    if ours != theirs:
        differ = sorted(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
        listed = ", ".join(f"{token!r} ({ours.get(token)} and {theirs.get(token)})" for token in differ[:_LISTED])
        raise ModelError(
            f"the teacher {teacher} and the policy {policy} have different tokens: {len(differ)} of {len(ours)} and "
            f"{len(theirs)}, for example {listed}. Log-probs of a token can be compared only if it is the same token. "
            f"{_ADVICE}"
        )
    logits, needed = load_hf_config(teacher, trust_teacher).get_text_config().vocab_size, max(theirs.values()) + 1
    if logits < needed:
        raise ModelError(
            f"the teacher {teacher} has {logits} logits, and its tokenizer has token ids up to {needed - 1}. Use the "
            f"tokenizer that was saved with the weights. {_ADVICE}"
        )
    if own.image_processor is None:
        return
    if other.image_processor is None:
        raise ModelError(f"the policy {policy} takes images, and the teacher {teacher} takes none. {_ADVICE}")
    reads, teacher_reads = _reading(own), _reading(other)
    if reads != teacher_reads:
        names = [name for name, value in reads.items() if teacher_reads[name] != value]
        listed = ", ".join(f"{name} ({reads[name]} and {teacher_reads[name]})" for name in names[:_LISTED])
        raise ModelError(f"the policy {policy} and the teacher {teacher} read images differently: {listed}. {_ADVICE}")


def _reading(processor: Any) -> dict[str, Any]:
    """What decides the pixels and tokens of an image. The bounds of its size are settings of data."""
    settings = processor.image_processor
    images = images_of(settings)
    names = ("patch_size", "merge_size", "temporal_patch_size", "rescale_factor")
    return {
        "kind": type(images).__name__,
        "image placeholder": processor.image_token_id,
        "tile": f"{settings.size} {getattr(settings, 'max_image_size', '')}" if images.takes_tiles else None,
        **{name: getattr(settings, name, None) for name in names},
        **{name: [*map(float, getattr(settings, name))] for name in ("image_mean", "image_std")},
    }


def within_vocabulary(sample: TrainingSample, size: int) -> TrainingSample:
    """The sample with 0 in place of each token id that the teacher lacks: the policy's logits have more padding."""
    outside = sample.token_ids >= size
    return replace(sample, token_ids=np.where(outside, np.int32(0), sample.token_ids)) if outside.any() else sample


def without_unknown(scored: Sequence[ScoredTokens], samples: Sequence[TrainingSample], size: int) -> list[ScoredTokens]:
    """The log-probs, -inf for trained tokens that the teacher lacks."""
    return [
        replace(s, logprobs=np.where((sample.token_ids >= size) & sample.loss_mask, np.float32(-np.inf), s.logprobs))
        for s, sample in zip(scored, samples, strict=True)
    ]
