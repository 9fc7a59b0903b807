"""One rank without a model, for the trainer's process: its weights are one number, which each update moves."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np

from rlcore.algorithms.loss import StepTotals
from rlcore.algorithms.objective import UpdateResult
from rlcore.config import ExperimentConfig
from rlcore.distributed.ranks import LocalRanks, Ranks
from rlcore.distributed.worker import Synced
from rlcore.flops import ModelShape
from rlcore.types import Completion, Floats, Grader, Problem, SampledGroup, SampleRequest, ScoredTokens, TrainingSample
from tests.unit import toy_run

Microbatches = list[list[TrainingSample]]


@dataclasses.dataclass
class ToyRank:
    """A rank's worker, and its policy. ``calls`` has the names of what ``WorkerGroup`` calls, in order."""

    before_update: Callable[[int], object] = lambda number: None  # gets the number of this process's update
    before_evaluation: Callable[[int], object] = lambda number: None
    weights: float = 1.0
    sampler_weights: float | None = None
    calls: list[str] = dataclasses.field(default_factory=list)
    seeds: list[int] = dataclasses.field(default_factory=list)
    microbatches: list[int] = dataclasses.field(default_factory=list)  # of each update
    folder: Path | None = None
    sleeps: bool = False  # whether the sampler gives its memory to training
    asleep: bool = False

    @property
    def policy(self) -> ToyRank:
        return self

    def device_name(self) -> str:
        return "cpu"

    def model_shape(self) -> ModelShape:
        return ModelShape(parameters=100, head_parameters=10, layers=1, width=4, weights_train=True, tower=None)

    def sync_weights(self, version: int) -> Synced:
        self.calls.append(f"sync_weights {version}")
        self.sampler_weights, self.asleep = self.weights, False
        return Synced(checksum=1, waking_seconds=0.0)

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        assert self.sampler_weights == self.weights, "the sampler does not hold the trainer's weights"
        assert not self.asleep, "the sampler sleeps"
        self.calls.append("generate" if requests[0].decoding is None else "evaluate")
        if self.calls[-1] == "evaluate":
            self.before_evaluation(self.calls.count("evaluate"))
        self.seeds += [request.seed for request in requests]
        yield {place: self._sampled(request) for place, request in enumerate(requests)}

    def _sampled(self, request: SampleRequest) -> SampledGroup:
        completions = tuple(
            Completion.one_turn(
                token_ids=np.array([3, 4 + (request.seed + which) % 7], np.int32),
                logprobs=np.full(2, -self.weights, np.float32),
                text=f"{request.problem.problem_id}/{which}",
                finish_reason="stop",
                policy_version=0,
            )
            for which in range(request.count)
        )
        return SampledGroup(np.array([1, int(request.problem.answer)], np.int32), completions)

    def add_images(self, dataset: Path) -> None:
        self.calls.append(f"add_images {dataset.name}")

    def reset_sampler_caches(self) -> None:
        self.calls.append("reset")

    def release_sampler(self) -> None:
        self.asleep = self.sleeps

    def sampler_sleeps(self) -> bool:
        return self.asleep

    def logprobs(self, microbatches: Microbatches, *, reference: bool) -> list[list[ScoredTokens]]:
        value = 1.0 if reference else self.weights
        return [
            [
                ScoredTokens(np.where(s.loss_mask, -value, 0).astype(np.float32), np.zeros(s.num_tokens, np.float32))
                for s in samples
            ]
            for samples in microbatches
        ]

    def update(
        self, microbatches: Microbatches, totals: StepTotals, learning_rate: float, kl_coefficient: float
    ) -> UpdateResult:
        self.calls.append("update")
        self.before_update(self.calls.count("update"))
        self.microbatches.append(len(microbatches))
        drawn = sum(int(s.token_ids[-1]) for samples in microbatches for s in samples)
        self.weights += learning_rate * drawn
        sums = toy_run.step_sums({"tokens": totals.tokens, "computed": totals.tokens, "policy_loss": self.weights})
        return UpdateResult(sums, grad_norm=float(drawn), skipped=False)

    def peak_memory_bytes(self) -> int:
        return 2**30

    def probe_samples(self, problems: Sequence[Problem]) -> list[TrainingSample]:
        return [
            TrainingSample(
                token_ids=np.array([1, int(problem.answer)], np.int32),
                loss_mask=np.array([False, True]),
                sampler_logprobs=np.zeros(2, np.float32),
                images=(),
                policy_version=0,
            )
            for problem in problems
        ]

    def raw_logprobs(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        return [np.array([0.0, -self.weights], np.float32) for _ in samples]

    def begin_save(self, folder: Path) -> None:
        (folder / "train_state").mkdir()
        (folder / "train_state" / "weights.json").write_text(json.dumps(self.weights))

    def saved(self) -> bool:
        return True

    def load(self, folder: Path) -> None:
        self.calls.append(f"load {folder.name}")
        self.weights = weights_in(folder)


def weights_in(checkpoint: Path) -> float:
    weights = json.loads((checkpoint / "train_state" / "weights.json").read_text())
    assert isinstance(weights, float)
    return weights


Started = Callable[..., AbstractContextManager[tuple[Ranks, Grader]]]


def started(rank: ToyRank, on_start: Callable[[ExperimentConfig], object] = lambda config: None) -> Started:
    """In place of ``rlcore.training.assemble.graded_ranks``, which starts Ray and the grading processes."""

    @contextmanager
    def graded_ranks(
        config: ExperimentConfig, make: object, *, model: Path, dataset: Path, stacks: Path, **others: object
    ) -> Iterator[tuple[Ranks, Grader]]:
        rank.folder = stacks
        on_start(config)
        yield LocalRanks(rank), toy_run.Grader({})
        rank.calls.append("closed")

    return graded_ranks
