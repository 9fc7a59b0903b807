"""The real training loop without a model: workers and graders whose answers are written down."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from rlcore.algorithms.objective import StepSums, UpdateResult
from rlcore.config import ExperimentConfig, build_experiment
from rlcore.flops import NOTHING, Work
from rlcore.process import Clock
from rlcore.rollout import collect as rollout
from rlcore.rollout.collect import RolloutBatch
from rlcore.rollout.groups import Group
from rlcore.segment.journal import MetricJournal, read_journal
from rlcore.training.run import TrainingRun, TrainState
from rlcore.types import Completion, Problem, SampledGroup, SampleRequest, Score, ScoredTokens, TrainingSample
from tests.quiet_grader import QuietGrader


def result(abs_delta: float) -> UpdateResult:
    """Ten trained tokens whose sampler and trainer log-probs differ by ``abs_delta`` nats in all."""
    sums = step_sums(
        {"tokens": 10, "policy_loss": 0.5, "kl_loss": 2},
        {"loss/entropy": 30, "loss/clip_fraction": 3, "rollout/abs_delta_logprob_mean": abs_delta},
    )
    return UpdateResult(sums=sums, grad_norm=1.5, skipped=False)


def step_sums(totals: Mapping[str, float], means: Mapping[str, float] = MappingProxyType({})) -> StepSums:
    """The sums of an update, 0 where nothing is given."""
    nothing = torch.zeros(0)
    counted = nothing.bool()
    names = ("tokens", "computed", "policy_loss", "kl_loss", "kl_ref", "importance_ratio", "importance_ratio_squared")
    none = StepSums.of(
        counted,
        totals=dict.fromkeys(names, nothing),
        means={"rollout/abs_delta_logprob_mean": nothing},
        maxima={},
    )
    return none.merge(StepSums(*({n: torch.tensor(float(v)) for n, v in part.items()} for part in (totals, means))))


PROBLEMS = [Problem(f"p{i}", "?", (), str(i), "test") for i in range(24)]


MIXED, RIGHT, WRONG = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]


class Workers:
    """Completion j of a problem says which one it is; log-probs tell the pass they came from."""

    def __init__(self) -> None:
        self.version = 0
        self.disaggregated = False
        self.released = 0
        self.requests: list[SampleRequest] = []
        self.scored: list[int] = []  # sequences per log-prob pass

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        self.requests += requests
        groups = [
            SampledGroup(
                np.array([1, 2], np.int32),
                tuple(
                    Completion.one_turn(
                        np.array([3, 4 + j], np.int32),
                        np.array([-0.5, -0.25], np.float32),
                        f"{r.problem.problem_id}/{'greedy' if r.greedy else j}",
                        "length" if r.problem.problem_id == "p7" else "stop",
                        self.version,
                    )
                    for j in range(r.count)
                ),
            )
            for r in requests
        ]
        yield from ({place: groups[place]} for place in reversed(range(len(groups))))

    def release_sampler(self) -> None:
        self.released += 1

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[ScoredTokens]:
        self.scored.append(len(samples))
        return [
            ScoredTokens(np.where(s.loss_mask, -0.5 - self.version, 0).astype(np.float32), _zeros(s)) for s in samples
        ]

    def reference_logprobs(self, samples: Sequence[TrainingSample]) -> list[ScoredTokens]:
        return [ScoredTokens(np.where(s.loss_mask, -0.75, 0).astype(np.float32), _zeros(s)) for s in samples]


def _zeros(sample: TrainingSample) -> np.ndarray:
    return np.zeros(sample.num_tokens, np.float32)


class Grader(QuietGrader):
    """``rewards[problem id]`` in order; the greedy completion gets 0.5."""

    def __init__(self, rewards: dict[str, list[float]]) -> None:
        self.rewards = rewards

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        found = []
        for problem, completion in zip(problems, completions, strict=True):
            which = completion.text.partition("/")[2]
            value = 0.5 if which == "greedy" else self.rewards.get(problem.problem_id, MIXED)[int(which)]
            found.append(Score(value, {"accuracy": value}, graded=True))
        future.set_result(found)
        return future


def config(**parts: object) -> ExperimentConfig:
    base = {
        "name": "toy",
        "rollout": {"group_size": 2, "max_completion_tokens": 8},
        "training": {"problems_per_batch": 4, "steps": 8},
        "algorithm": {"kl": {"coefficient": 0.0}},
    }
    merged = {
        key: {**base.get(key, {}), **value} if isinstance(value, Mapping) else value for key, value in parts.items()
    }
    return build_experiment({**base, **merged})


def wired(settings: ExperimentConfig, rewards: dict[str, list[float]] | None = None) -> TrainingRun:
    return TrainingRun(settings, PROBLEMS, Workers(), Grader(rewards or {}), sink=None, on_batch=_ignore)


def _ignore(step: int, generated: Sequence[Group], trained: Sequence[Group]) -> None:
    return


def collect(run: TrainingRun, state: TrainState, clock: Clock) -> tuple[RolloutBatch, TrainState]:
    """The next batch, and the state without its groups."""
    batch = rollout.collect(run, state.rollouts, state.step, clock)
    return batch, replace(state, rollouts=batch.rollouts)


def with_prefetched(state: TrainState, batch: RolloutBatch, clock: Clock) -> tuple[TrainState, RolloutBatch]:
    """The state with the batch that is sampled ahead."""
    batch = rollout.with_prefetched(batch, clock)
    return replace(state, rollouts=batch.rollouts), batch


def surplus(state: TrainState) -> tuple[Group, ...]:
    return tuple(group for group in state.rollouts.groups if group.surplus)


def prefetched(state: TrainState) -> tuple[Group, ...]:
    return tuple(group for group in state.rollouts.groups if group.state == "ready" and not group.surplus)


def in_flight(state: TrainState) -> tuple[Group, ...]:
    return tuple(group for group in state.rollouts.groups if group.state != "ready")


def order(count: int) -> list[str]:
    """Ids in the order of the stream."""
    found, _ = collect(wired(config(training={"problems_per_batch": count, "steps": 1})), TrainState(), Clock())
    return [g.problem.problem_id for g in found.groups]


def ids(groups: Sequence[Group]) -> list[str]:
    return [group.problem.problem_id for group in groups]


class Trainers(Workers):
    """Each update has the next KL of ``kls`` per token; one that is not finite is skipped."""

    size = 1
    device_name = "cpu"

    def __init__(self, kls: Sequence[float]) -> None:
        super().__init__()
        self.kls = list(kls)
        self.coefficients: list[float] = []
        self.rates: list[float] = []
        self.updated: list[Sequence[TrainingSample]] = []

    def update(self, samples: Sequence[TrainingSample], learning_rate: float, kl_coefficient: float) -> UpdateResult:
        kl = self.kls.pop(0)
        self.coefficients.append(kl_coefficient)
        self.rates.append(learning_rate)
        self.updated.append(samples)
        tokens = float(sum(s.num_trained for s in samples))
        sums = step_sums({"computed": tokens, "kl_ref": kl * tokens, "tokens": tokens})
        return UpdateResult(sums, grad_norm=kl, skipped=not math.isfinite(kl))

    def work(self, samples: Sequence[TrainingSample]) -> Work:
        return NOTHING

    def sync_weights(self, version: int) -> float:
        self.version = version
        return 0.0

    def peak_memory_bytes(self) -> int:
        return 0


def with_updates(config: ExperimentConfig, kls: Sequence[float], journal: Path) -> TrainingRun:
    run = wired(config)
    return dataclasses.replace(run, workers=Trainers(kls), sink=MetricJournal(journal))


def never() -> bool:
    return False


def metrics_of(journal: Path) -> list[Mapping[str, float]]:
    return [record.metrics for record in read_journal(journal)]
