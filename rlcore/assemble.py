"""Composition root: an ExperimentConfig and prepared artifacts become a wired run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlcore.config import ExperimentConfig
from rlcore.data.problems import load_problems
from rlcore.distributed.actors import RayRanks, start_ray, stop_ray
from rlcore.distributed.group import WatchedRanks, WorkerGroup
from rlcore.distributed.worker import Worker, WorkerSpec
from rlcore.ports import MetricSink
from rlcore.rewards import make_reward
from rlcore.rewards.pool import GradingPool
from rlcore.segment.adjustments import Adjustments
from rlcore.training.loop import TrainingRun
from rlcore.types import RolloutGroup


@contextmanager
def training_run(
    config: ExperimentConfig,
    *,
    model: Path,
    dataset: Path,
    sink: MetricSink,
    on_batch: Callable[[int, Sequence[RolloutGroup]], None],
    on_progress: Callable[[], None],
    adjustments: Adjustments,
    stacks: Path,
    ray_address: str | None = None,
) -> Iterator[TrainingRun]:
    """Workers up, run wired; on exit everything that was started here is gone.

    Args:
        on_progress: called after everything that all ranks have done.
        stacks: folder for the stacks of a worker that gets SIGUSR1.
    """
    with graded_ranks(config, Worker, model=model, dataset=dataset, stacks=stacks, ray_address=ray_address) as (
        ranks,
        grader,
    ):
        yield TrainingRun(
            config=config,
            problems=load_problems(dataset),
            workers=WorkerGroup(WatchedRanks(ranks, on_progress), config),
            grader=grader,
            sink=sink,
            on_batch=on_batch,
            adjustments=adjustments,
        )


@contextmanager
def graded_ranks(
    config: ExperimentConfig,
    make: Callable[[WorkerSpec], object],
    *,
    model: Path,
    dataset: Path,
    stacks: Path | None = None,
    ray_address: str | None = None,
) -> Iterator[tuple[RayRanks, GradingPool]]:
    """Ray, its workers and the grading processes; all gone on exit."""
    reward = make_reward(config.reward, max_completion_tokens=config.rollout.max_completion_tokens)
    grader = GradingPool(reward, config.reward.processes, config.reward.deadline_seconds)
    start_ray(ray_address, num_cpus=config.resources.workers)
    try:
        device = pick_device(config)
        yield RayRanks(make, model=model, dataset=dataset, config=config, device=device, stacks=stacks), grader
    finally:
        grader.close()
        stop_ray()


def pick_device(config: ExperimentConfig) -> str:
    """The device of ``resources.device``; auto takes CUDA where torch finds it."""
    if config.resources.device != "auto":
        return config.resources.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
