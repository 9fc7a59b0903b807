"""All ranks as one: what the loop calls, planned and spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

from rlcore.algorithms.aggregation import StepTotals
from rlcore.algorithms.flops import NOTHING, GroupSize, ModelShape, Work, pass_work
from rlcore.batch import prompt_key
from rlcore.config import ExperimentConfig
from rlcore.distributed.plan import SequenceSize, plan_microbatches
from rlcore.errors import SamplerError
from rlcore.models.torch_policy import UpdateResult
from rlcore.ports import SampledGroup, SampleRequest, ScoredTokens
from rlcore.types import Floats, TrainingSample


class Ranks(Protocol):
    """How the ranks are reached: Ray actors, or one object in this process."""

    size: int

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call ``method(*arguments[rank])`` on every rank at once; results by rank. The first failure is raised."""


class LocalRanks:
    """One rank in this process."""

    size = 1

    def __init__(self, worker: object) -> None:
        self._worker = worker

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        (only,) = arguments
        return [getattr(self._worker, method)(*only)]


class WatchedRanks:
    """Ranks that say after every call that there was progress."""

    def __init__(self, ranks: Ranks, on_progress: Callable[[], None]) -> None:
        self._ranks = ranks
        self._on_progress = on_progress
        self.size = ranks.size

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        results = self._ranks.call(method, arguments)
        self._on_progress()
        return results


class SamplerGroup:
    """The samplers of all ranks as one. Implements ``ports.Sampler``."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def generate(self, requests: Sequence[SampleRequest]) -> list[SampledGroup]:
        """Rank r takes requests r, r + W, ...: neighbours in the stream spread over the ranks."""
        size = self._ranks.size
        parts = self._ranks.call("generate", [(list(requests[rank::size]),) for rank in range(size)])
        groups: list[SampledGroup | None] = [None] * len(requests)
        for rank, part in enumerate(parts):
            groups[rank::size] = part
        return [group for group in groups if group is not None]


class WorkerGroup:
    """Policy and samplers of all ranks as one. Implements ``ports.Sampler`` and ``ports.Policy``."""

    def __init__(self, ranks: Ranks, config: ExperimentConfig) -> None:
        self._ranks = ranks
        self._config = config

    @cached_property
    def _model_shape(self) -> ModelShape:
        return cast(ModelShape, self._everywhere("model_shape")[0])

    @cached_property
    def device_name(self) -> str:
        """Of rank 0's device; the others are taken to be the same."""
        return str(self._everywhere("device_name")[0])

    @property
    def size(self) -> int:
        return self._ranks.size

    def _everywhere(self, method: str, *arguments: Any) -> list[Any]:
        return self._ranks.call(method, [arguments] * self._ranks.size)

    def generate(self, requests: Sequence[SampleRequest]) -> list[SampledGroup]:
        groups = SamplerGroup(self._ranks).generate(requests)
        self._everywhere("release_sampler")
        return groups

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[ScoredTokens]:
        return self._logprobs(samples, reference=False)

    def reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[ScoredTokens]:
        return self._logprobs(samples, reference=True)

    def _logprobs(self, samples: Sequence[TrainingSample], *, reference: bool) -> list[ScoredTokens]:
        plan = self._plan(samples)
        results = self._ranks.call("logprobs", [(_pick(samples, rank), reference) for rank in plan])
        values: list[ScoredTokens | None] = [None] * len(samples)
        for rank, result in zip(plan, results, strict=True):
            for indices, found in zip(rank, result, strict=True):
                for index, value in zip(indices, found, strict=True):
                    values[index] = value
        return [value for value in values if value is not None]

    def update(self, samples: Sequence[TrainingSample], learning_rate: float, kl_coefficient: float) -> UpdateResult:
        """One optimizer step; the same plan as ``logprobs`` makes for the same samples, so old and new log-probs
        come out of identical kernels.

        Samples that cannot move the policy (``has_gradient``) count in the denominators and are not computed.
        """
        trained = sum(s.num_trained for s in samples)
        totals = StepTotals(tokens=max(1, trained), sequences=len(samples))  # 0 where every completion is masked
        samples = [s for s in samples if has_gradient(s)] or samples[:1]  # AdamW's own step goes on without gradient
        plan = self._plan(samples)
        arguments = [(_pick(samples, rank), totals, learning_rate, kl_coefficient) for rank in plan]
        result: UpdateResult = self._ranks.call("update", arguments)[0]
        return result

    def work(self, samples: Sequence[TrainingSample]) -> Work:
        """What ``update`` computes for these samples, on all ranks together."""
        samples = [s for s in samples if has_gradient(s)] or samples[:1]
        microbatches = [[samples[i] for i in micro] for rank in self._plan(samples) for micro in rank if micro]
        return sum((microbatch_work(self._model_shape, micro) for micro in microbatches), NOTHING)

    def _plan(self, samples: Sequence[TrainingSample]) -> list[list[list[int]]]:
        return plan_microbatches(
            [SequenceSize(s.num_prompt, s.num_tokens - s.num_prompt) for s in samples],
            [prompt_key(s) for s in samples],
            num_ranks=self._ranks.size,
            token_budget=self._config.training.tokens_per_microbatch,
            attention_weight=self._model_shape.attention_weight,
        )

    def sync_weights(self, version: int) -> None:
        """
        Raises:
            SamplerError: the ranks' samplers do not all hold the same weights.
        """
        checksums = set(self._everywhere("sync_weights", version))
        if len(checksums) != 1:
            raise SamplerError(f"the ranks sent different weights at version {version}: checksums {sorted(checksums)}")

    def canary(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """[L] log-probs of fixed inputs at temperature 1 with no token banned, to know these weights by."""
        results: list[list[Floats]] = self._everywhere("canary", list(samples))
        return results[0]

    def begin_save(self, folder: Path) -> None:
        self._everywhere("begin_save", folder)

    def saved(self) -> bool:
        return all(self._everywhere("saved"))

    def load(self, folder: Path) -> None:
        self._everywhere("load", folder)

    def peak_memory_bytes(self) -> int:
        return max(self._everywhere("peak_memory_bytes"))


def has_gradient(sample: TrainingSample) -> bool:
    """False where the loss is 0 whatever the policy does: no advantage, no KL term, and a ratio of exactly 1."""
    moved = sample.advantages is not None and bool(sample.advantages.any())
    return moved or sample.old_logprobs is not None or sample.ref_logprobs is not None


def microbatch_work(shape: ModelShape, samples: Sequence[TrainingSample]) -> Work:
    """What one pass over a packed microbatch computes."""
    groups: dict[Hashable, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(prompt_key(sample), []).append(sample)
    sizes = [
        GroupSize(
            prompt=members[0].num_prompt,
            completions=tuple(s.num_tokens - s.num_prompt for s in members),
            trained=sum(s.num_trained for s in members),
        )
        for members in groups.values()
    ]
    images = {image.sha256: (image.width, image.height) for sample in samples for image in sample.images}
    return pass_work(shape, sizes, list(images.values()))


def _pick(samples: Sequence[TrainingSample], microbatches: Sequence[Sequence[int]]) -> list[list[TrainingSample]]:
    return [[samples[i] for i in indices] for indices in microbatches]
