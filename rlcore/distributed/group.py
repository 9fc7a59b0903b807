"""All ranks as one object for the training loop: it plans microbatches and spreads them over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from rlcore.algorithms.loss import StepTotals, high_entropy
from rlcore.algorithms.objective import UpdateResult
from rlcore.batch import prompt_key
from rlcore.config import ExperimentConfig
from rlcore.distributed.ranks import RankRange, Ranks
from rlcore.distributed.tensor_parallel import verify_answers
from rlcore.distributed.trace import StepTrace
from rlcore.distributed.worker import RolloutWorker, Worker
from rlcore.errors import SamplerError
from rlcore.flops import NOTHING, GroupSize, ModelShape, Work, pass_work
from rlcore.types import Floats, Problem, SampledGroup, SampleRequest, ScoredTokens, TrainingSample

_Score = Callable[[Worker, Sequence[Sequence[TrainingSample]]], list[list[ScoredTokens]]]
"""The log-probs of one rank's microbatches."""


class SamplerGroup:
    """The samplers of all ranks. Implements ``types.Sampler``."""

    def __init__(self, ranks: RankRange[Worker | RolloutWorker], tensor_parallel: int = 1) -> None:
        """
        Args:
            tensor_parallel: consecutive ranks that hold each engine together.
        """
        self._ranks, self._tensor_parallel = ranks, tensor_parallel

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        """Engine e of E takes requests e, e + E, ..., so that similar neighbours are spread over the engines.

        Raises:
            SamplerError: ranks of one engine sampled different tokens.
        """
        size, width = self._ranks.size, self._tensor_parallel
        parts = [list(requests[rank // width :: size // width]) for rank in range(size)]
        answers = self._ranks.stream(lambda worker, own: worker.generate(own), parts)
        yield from verify_answers(answers, requests, size, width)


class WorkerGroup:
    """The policy and the samplers of all ranks, colocated or disaggregated. Implements ``types.Sampler``."""

    def __init__(
        self,
        ranks: Ranks,
        config: ExperimentConfig,
        *,
        on_progress: Callable[[], None] = lambda: None,
        run_dir: Path | None = None,
    ) -> None:
        """
        Args:
            on_progress: called whenever the ranks have finished a call.
            run_dir: where traces are requested and written; None: no traces.
        """
        self._config = config
        resources = config.resources
        # sampling and training can then run at the same time
        self.disaggregated = resources.rollout_workers > 0
        self._everyone = RankRange[Worker | RolloutWorker](ranks, 0, ranks.size, on_progress)
        self._trainers = RankRange[Worker](
            ranks, 0, resources.workers if self.disaggregated else ranks.size, on_progress
        )
        samplers = self._everyone
        if self.disaggregated:
            samplers = RankRange(ranks, resources.workers, resources.rollout_workers, on_progress)
        self._samplers = samplers
        self._sampler = SamplerGroup(samplers, config.rollout.tensor_parallel)
        self._trace = StepTrace(self._trainers, run_dir)
        self._version: int | None = None  # of the weights that the samplers have

    @cached_property
    def _model_shape(self) -> ModelShape:
        return self._trainers.each(lambda worker: worker.policy.model_shape())[0]

    @cached_property
    def device_name(self) -> str:
        """Name of rank 0's device. The other ranks should have the same."""
        return self._trainers.each(lambda worker: worker.policy.device_name())[0]

    @property
    def size(self) -> int:
        """Ranks that train."""
        return self._trainers.size

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        return self._sampler.generate(requests)

    def add_images(self, dataset: Path) -> None:
        """Let every rank read the images of this dataset too, which was resized with the same settings."""
        self._everyone.each(lambda worker: worker.add_images(dataset))

    def reset_sampler_caches(self) -> None:
        """Make the samplers forget all earlier requests, as a weight sync does."""
        self._samplers.each(lambda worker: worker.reset_sampler_caches())

    def release_sampler(self) -> None:
        """Free the samplers' memory for training until the next sync, if they share devices."""
        if not self.disaggregated:
            self._trainers.each(lambda worker: worker.release_sampler())

    @contextmanager
    def samplers_released(self) -> Iterator[None]:
        """``release_sampler`` for the block. After it the samplers have the weights of the last sync again."""
        self.release_sampler()
        yield
        if self._version is not None and any(self._trainers.each(lambda worker: worker.sampler_sleeps())):
            self.sync_weights(self._version)

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[ScoredTokens]:
        return self._score(samples, lambda worker, own: worker.policy.logprobs(own, reference=False))

    def reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[ScoredTokens]:
        """The reference chooses its own experts, as ``teacher_logprobs``: it is a fixed policy."""
        return self._score(for_another_policy(samples), lambda worker, own: worker.policy.logprobs(own, reference=True))

    def teacher_logprobs(self, samples: Sequence[TrainingSample]) -> list[ScoredTokens]:
        return self._score(for_another_policy(samples), lambda worker, own: worker.policy.teacher_logprobs(own))

    def _score(self, samples: Sequence[TrainingSample], score: _Score) -> list[ScoredTokens]:
        plan = self._plan(samples)
        self._trace.begin()
        results = self._trainers.call(score, self._for_each_rank(samples, plan))
        values: list[ScoredTokens | None] = [None] * len(samples)
        for rank, result in zip(plan, results[:: self._config.training.sequence_parallel], strict=True):
            for indices, scored in zip(rank, result, strict=True):
                for index, value in zip(indices, scored, strict=True):
                    values[index] = value
        return [value for value in values if value is not None]

    def update(self, samples: Sequence[TrainingSample], learning_rate: float, kl_coefficient: float) -> UpdateResult:
        """One optimizer step. ``logprobs`` makes the same plan for the same samples, so old and new log-probs come from
        the same kernels.

        Samples without a gradient (``has_gradient``) count in the denominators and are not computed.
        """
        mask = self._config.algorithm.entropy_mask
        samples = samples if mask is None else with_high_entropy(samples, mask.share)
        trained = sum(s.num_trained for s in samples)
        totals = StepTotals(tokens=max(1, trained), sequences=len(samples))  # 0 tokens if all completions are masked
        # without any gradient one sample is still computed, because AdamW's state has to take its step
        samples = [s for s in samples if has_gradient(s)] or samples[:1]
        microbatches_of_ranks = self._for_each_rank(samples, self._plan(samples))
        self._trace.begin()
        results = self._trainers.call(
            lambda worker, microbatches: worker.update(microbatches, totals, learning_rate, kl_coefficient),
            microbatches_of_ranks,
        )
        return results[0]

    def work(self, samples: Sequence[TrainingSample]) -> Work:
        """The FLOPs of ``update`` for these samples, on all ranks together."""
        samples = [s for s in samples if has_gradient(s)] or samples[:1]
        microbatches = [[samples[i] for i in micro] for rank in self._plan(samples) for micro in rank if micro]
        return sum((microbatch_work(self._model_shape, micro) for micro in microbatches), NOTHING)

    def _plan(self, samples: Sequence[TrainingSample]) -> list[list[list[int]]]:
        """Microbatches of each sequence group."""
        return plan_microbatches(
            [SequenceSize(s.num_prompt, s.num_tokens - s.num_prompt) for s in samples],
            [prompt_key(s) for s in samples],
            num_ranks=self._trainers.size // self._config.training.sequence_parallel,
            token_budget=self._config.training.tokens_per_row,
            attention_weight=self._model_shape.attention_weight,
        )

    def _for_each_rank(
        self, samples: Sequence[TrainingSample], plan: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[list[TrainingSample]]]:
        """Microbatches of each rank. The ranks of a sequence group get the same ones; the first result is used."""
        return [
            [[samples[i] for i in indices] for indices in microbatches]
            for microbatches in plan
            for _ in range(self._config.training.sequence_parallel)
        ]

    def sync_weights(self, version: int) -> float:
        """Send the policy's weights to the samplers. Returns the seconds that the slowest engine needed to wake up.

        Raises:
            SamplerError: not all samplers have the same weights.
        """
        synced = self._everyone.each(lambda worker: worker.sync_weights(version))
        self._version = version
        self._trace.end(version)
        checksums = {rank.checksum for rank in synced}
        if len(checksums) != 1:
            raise SamplerError(
                f"at version {version} not all ranks sent or hold the same weights: checksums {sorted(checksums)}"
            )
        return max(rank.waking_seconds for rank in synced)

    def probe_samples(self, problems: Sequence[Problem]) -> list[TrainingSample]:
        """Fixed inputs from ``problems``; see ``data/probe.py``."""
        chosen = list(problems)
        return self._trainers.each(lambda worker: worker.probe_samples(chosen))[0]

    def probe_logprobs(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Log-probs [L] of each fixed input at temperature 1 with no token banned. They identify these weights."""
        chosen = list(samples)
        return self._trainers.each(lambda worker: worker.policy.raw_logprobs(chosen))[0]

    def begin_save(self, folder: Path) -> None:
        self._trainers.each(lambda worker: worker.policy.begin_save(folder))

    def saved(self) -> bool:
        return all(self._trainers.ask(lambda worker: worker.policy.saved()))

    def load(self, folder: Path) -> None:
        self._trainers.each(lambda worker: worker.policy.load(folder))

    def peak_memory_bytes(self) -> int:
        return max(self._everyone.each(lambda worker: worker.peak_memory_bytes()))


def with_high_entropy(samples: Sequence[TrainingSample], share: float) -> list[TrainingSample]:
    """The samples of one optimizer step with the mask of their tokens of high entropy (``loss.high_entropy``).

    Raises:
        ValueError: a sample has no entropies.
    """
    entropies = [s.entropies[s.loss_mask] for s in samples if s.entropies is not None]
    if len(entropies) != len(samples):
        raise ValueError(
            f"{len(samples) - len(entropies)} of {len(samples)} samples have no entropies, and algorithm.entropy_mask "
            "needs them. Compute their old log-probs before the update."
        )
    kept = high_entropy(torch.from_numpy(np.concatenate(entropies)), share).numpy()
    parts = np.split(kept, np.cumsum([len(part) for part in entropies])[:-1])
    masks = [np.zeros_like(s.loss_mask) for s in samples]
    for mask, part, sample in zip(masks, parts, samples, strict=True):
        mask[sample.loss_mask] = part
    return [replace(s, high_entropy=mask) for s, mask in zip(samples, masks, strict=True)]


def for_another_policy(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples without what belongs to the policy that trains: the experts that its sampler chose, and its old
    log-probs, which not all of them may have."""
    return [
        s
        if s.routes is None and s.old_logprobs is None
        else replace(s, routes=None, old_logprobs=None, truncation_logprobs=None, entropies=None)
        for s in samples
    ]


def has_gradient(sample: TrainingSample) -> bool:
    """False if the gradient is 0: no advantage, no KL term, and a ratio of exactly 1."""
    moved = sample.advantages is not None and bool(sample.advantages.any())
    return moved or sample.old_logprobs is not None or sample.ref_logprobs is not None


def microbatch_work(shape: ModelShape, samples: Sequence[TrainingSample]) -> Work:
    """The FLOPs of one pass over a packed microbatch."""
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
    images = {image.sha256: image for sample in samples for image in sample.images}
    # a pair of frames costs as much as an image, and attends to itself alone
    passes = [(image.width, image.height) for image in images.values() for _ in range(image.frame_pairs)]
    return pass_work(shape, sizes, passes)


# --- which sequences share a forward pass, and on which rank ---


@dataclass(frozen=True, slots=True)
class SequenceSize:
    """Tokens of one sequence."""

    prompt: int
    completion: int


def plan_microbatches(
    sizes: Sequence[SequenceSize],
    keys: Sequence[Hashable],
    *,
    num_ranks: int,
    token_budget: int,
    attention_weight: float,
) -> list[list[list[int]]]:
    """Spread sequences over ranks and microbatches: ``plan[rank][microbatch]`` lists indices into ``sizes``.

    Every rank gets the same number of microbatches, because they have collectives. A microbatch has at most
    ``token_budget`` tokens. Sequences of one key have the same prompt and stay together if the budget allows, because a
    microbatch computes a prompt once. Ranks are balanced by cost, and so are the microbatches of one rank. The plan
    depends on the arguments only. A microbatch may be empty on a rank with little work.

    Args:
        attention_weight: cost of a token's attention to another one. The cost of a token's matrix products is 1.

    Raises:
        ValueError: a single sequence exceeds the budget.
    """
    longest = max((size.prompt + size.completion for size in sizes), default=0)
    if longest > token_budget:
        raise ValueError(f"a sequence of {longest} tokens exceeds the budget of {token_budget} per microbatch")

    def tokens(unit: Sequence[int]) -> int:
        return sizes[unit[0]].prompt + sum(sizes[i].completion for i in unit)

    def cost(unit: Sequence[int]) -> float:
        pairs = sum(sizes[i].completion * (sizes[unit[0]].prompt + sizes[i].completion / 2) for i in unit)
        return tokens(unit) + attention_weight * (pairs + sizes[unit[0]].prompt ** 2 / 2)

    per_rank = _spread(_units(sizes, keys, token_budget), cost, num_ranks)
    count = max(1, *(-(-sum(map(tokens, rank)) // token_budget) for rank in per_rank))
    while True:
        plan = [_spread(rank, cost, count) for rank in per_rank]
        if all(sum(map(tokens, micro)) <= token_budget for rank in plan for micro in rank):
            return [[sorted(i for unit in micro for i in unit) for micro in rank] for rank in plan]
        count += 1


def _units(sizes: Sequence[SequenceSize], keys: Sequence[Hashable], token_budget: int) -> list[list[int]]:
    """Sequences of one key, in parts within the budget. Each part computes the prompt again."""
    by_key: dict[Hashable, list[list[int]]] = {}
    room: dict[Hashable, int] = {}
    for index, (size, key) in enumerate(zip(sizes, keys, strict=True)):
        runs = by_key.setdefault(key, [])
        if not runs or room[key] < size.completion:
            runs.append([])
            room[key] = token_budget - size.prompt
        runs[-1].append(index)
        room[key] -= size.completion
    return [run for runs in by_key.values() for run in runs]


def _spread(units: Sequence[list[int]], cost: Callable[[list[int]], float], bins: int) -> list[list[list[int]]]:
    """Puts the most expensive unit first, each into the cheapest bin. Ties go to the lower index."""
    loads = [0.0] * bins
    chosen: list[list[list[int]]] = [[] for _ in range(bins)]
    for price, unit in sorted(((cost(unit), unit) for unit in units), key=lambda item: (-item[0], item[1][0])):
        bin_ = loads.index(min(loads))
        loads[bin_] += price
        chosen[bin_].append(unit)
    return chosen
