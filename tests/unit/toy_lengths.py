"""The real collection around a sampler whose completions have known lengths, and may be sampled in pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from rlcore.config import ExperimentConfig, build_experiment
from rlcore.process import Clock
from rlcore.rollout.collect import RolloutBatch
from rlcore.rollout.groups import Group
from rlcore.training.run import TrainingRun, TrainState
from rlcore.types import Completion, Problem, SampledGroup, SampleRequest, Score, ScoredTokens, TrainingSample
from tests.quiet_grader import QuietGrader
from tests.unit.toy_run import collect, with_prefetched

PROBLEMS = [Problem(f"p{i}", "?", (), str(i), "test") for i in range(24)]
BUDGET = 12
Lengths = Callable[[str, int], int]  # of completion ``which`` of a problem, if there were no budget


class Workers:
    """Token n of completion i is 100 i + n, and its log-prob -0.5 less the version that sampled it."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.version = 0
        self.disaggregated = False
        self.requests: list[SampleRequest] = []
        self.rounds: list[list[str]] = []  # problems asked for, request by request

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        self.requests += requests
        self.rounds.append([request.problem.problem_id for request in requests])
        for place in reversed(range(len(requests))):
            request = requests[place]
            first = int(request.so_far[0]) // 100 if len(request.so_far) else 0
            pieces = tuple(self._piece(request, first + i) for i in range(request.count))
            yield {place: SampledGroup(np.array([1, 2], np.int32), pieces)}

    def _piece(self, request: SampleRequest, which: int) -> Completion:
        own = self.lengths(request.problem.problem_id, which)
        start, end = len(request.so_far), min(own, BUDGET)
        stop = end if request.max_tokens is None else min(end, start + request.max_tokens)
        ended = "stop" if own <= BUDGET else "length"
        return Completion.one_turn(
            np.arange(100 * which + start, 100 * which + stop, dtype=np.int32),
            np.full(stop - start, -0.5 - self.version, np.float32),
            f"{request.problem.problem_id}/{which}/{stop}",
            ended if stop == end else "unfinished",
            self.version,
        )

    def release_sampler(self) -> None:
        return

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[ScoredTokens]:
        return [ScoredTokens(np.zeros(s.num_tokens, np.float32), np.zeros(s.num_tokens, np.float32)) for s in samples]


class Grader(QuietGrader):
    """The reward of completion i is i, or 0 for ``equal`` problems; counts what it is asked for."""

    def __init__(self, equal: Collection[str] = ()) -> None:
        self.asked: Counter[str] = Counter()
        self.equal = equal

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        future: Future[list[Score]] = Future()
        self.asked.update(completion.text for completion in completions)
        rewards = [
            0.0 if problem.problem_id in self.equal else float(completion.text.split("/")[1])
            for problem, completion in zip(problems, completions, strict=True)
        ]
        future.set_result([Score(reward, {"accuracy": reward}, graded=True) for reward in rewards])
        return future


def config(partial: dict[str, object] | None, staleness: int = 1, **parts: dict[str, object]) -> ExperimentConfig:
    base: dict[str, dict[str, object]] = {
        "rollout": {"group_size": 2, "max_completion_tokens": BUDGET, "partial": partial},
        "training": {"problems_per_batch": 2, "steps": 24, "max_staleness": staleness},
        "algorithm": {"kl": {"coefficient": 0.0}, "correction": {}},
    }
    return build_experiment(
        {"name": "toy", **base, **{key: {**base.get(key, {}), **value} for key, value in parts.items()}}
    )


def wired(settings: ExperimentConfig, lengths: Lengths, equal: Collection[str] = ()) -> TrainingRun:
    return TrainingRun(settings, PROBLEMS, Workers(lengths), Grader(equal), sink=None, on_batch=_ignore)


def _ignore(step: int, generated: Sequence[Group], trained: Sequence[Group]) -> None:
    return


def batches(run: TrainingRun, state: TrainState, count: int) -> tuple[list[RolloutBatch], TrainState]:
    """``count`` times: collect, the batch's optimizer steps, take the prefetched batch, sync."""
    found = []
    for _ in range(count):
        run.workers.version = state.step
        collected, state = collect(run, state, Clock())
        state = replace(state, step=state.step + run.config.training.steps_per_batch)
        state, collected = with_prefetched(state, collected, Clock())
        found.append(collected)
    return found, state


def ids(found: RolloutBatch) -> list[str]:
    return [group.problem.problem_id for group in found.groups]


def stream(count: int = 24) -> list[str]:
    """Ids in the order of the stream."""
    settings = config(None, 0, training={"problems_per_batch": count, "max_staleness": 0})
    return ids(collect(wired(settings, lambda *_: 1), TrainState(), Clock())[0])


def by_first(*lengths: int) -> Lengths:
    """Lengths of the first completions, in the order of the stream; the others have one token."""
    known = dict(zip(stream(), lengths, strict=False))
    return lambda problem, which: 1 if which else known.get(problem, 1)


def versions(found: RolloutBatch) -> list[list[int]]:
    """Which policies sampled the tokens of each group's first completion."""
    firsts = [group.samples[0] for group in found.groups]
    return [(-0.5 - s.sampler_logprobs[s.loss_mask]).astype(int).tolist() for s in firsts]


def same(one: RolloutBatch, other: RolloutBatch) -> None:
    """To the last bit."""
    assert ids(one) == ids(other)
    for left, right in zip(one.groups, other.groups, strict=True):
        for a, b in zip(left.samples, right.samples, strict=True):
            assert a.policy_version == b.policy_version
            for name in ("token_ids", "loss_mask", "sampler_logprobs"):
                assert np.array_equal(getattr(a, name), getattr(b, name))
                assert getattr(a, name).dtype == getattr(b, name).dtype
        for a, b in zip(left.rollouts, right.rollouts, strict=True):
            assert (a.score, a.completion.text, a.completion.finish_reason) == (
                b.score,
                b.completion.text,
                b.completion.finish_reason,
            )
