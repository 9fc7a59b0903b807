"""Builds a run: connects an ExperimentConfig, a model and a dataset with workers, graders and sinks.

Modules that import torch or SymPy are imported inside the functions, while Ray's processes start.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.adjustments import Adjustments
from rlcore.config import ExperimentConfig
from rlcore.config.reward import JudgeReward, ModelReward, RewardConfig
from rlcore.data.table import load_problems
from rlcore.distributed.actors import RayRanks, start_ranks, worker_environment
from rlcore.distributed.cluster import claim_for, cluster_address, has_gpus, pick_device, start_ray, stop_ray
from rlcore.distributed.ranks import LocalRanks, Ranks
from rlcore.distributed.worker import WorkerSpec, make_worker
from rlcore.errors import ConfigError
from rlcore.files import VERDICTS
from rlcore.process import in_background, making_what_stays
from rlcore.types import Grader, MetricSink

if TYPE_CHECKING:
    from rlcore.training.run import OnBatch, TrainingRun

logger = logging.getLogger(__name__)
_SLOW_IMPORTS = ("rlcore.training.run", "rlcore.distributed.group")


@contextmanager
def training_run(
    config: ExperimentConfig,
    *,
    model: Path,
    dataset: Path,
    sink: MetricSink,
    on_batch: OnBatch,
    on_progress: Callable[[], None],
    on_retry: Callable[[], None],
    adjustments: Adjustments,
    run_dir: Path,
    stacks: Path,
    teacher: Path | None = None,
) -> Iterator[TrainingRun]:
    """A run with started workers. On exit everything that was started here is stopped.

    Args:
        on_progress: called whenever a rank or the judge has finished something, and while the run waits for the judge.
        on_retry: called while calls of a judge are repeated, as ``JudgeGrader`` says.
        run_dir: folder in which traces are requested and written, and verdicts of a judge are journaled.
        stacks: folder for the stacks of a worker that gets SIGUSR1.
        teacher: folder of algorithm.teacher.
    """
    with graded_ranks(
        config,
        make_worker,
        model=model,
        dataset=dataset,
        verdicts=run_dir / VERDICTS,
        stacks=stacks,
        on_progress=on_progress,
        on_retry=on_retry,
        teacher=teacher,
    ) as (ranks, grader):
        from rlcore.distributed.group import WorkerGroup
        from rlcore.training.run import TrainingRun

        yield TrainingRun(
            config=config,
            problems=load_problems(dataset),
            workers=WorkerGroup(ranks, config, on_progress=on_progress, run_dir=run_dir),
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
    verdicts: Path,
    stacks: Path | None = None,
    on_progress: Callable[[], None] = lambda: None,
    on_retry: Callable[[], None] = lambda: None,
    teacher: Path | None = None,
) -> Iterator[tuple[RayRanks, Grader]]:
    """Start Ray, its workers and the grader. All stop on exit, except a cluster that was already running.

    Args:
        verdicts: folder of the journal of a judge.
        on_progress, on_retry: called by a judge, as ``JudgeGrader`` says.
        teacher: folder of algorithm.teacher.
    """
    address = cluster_address()
    imports = in_background(_import_slow_modules)
    grading = in_background(lambda: make_grader(config, model, verdicts, on_progress, on_retry))
    try:
        with making_what_stays():
            start_ray(address, num_cpus=config.resources.devices)
            logger.info("Ray is ready")
            grader = grading.result()  # a reward that cannot be loaded is reported before a model is
            # The driver's own machine may have no GPU while others of the cluster do.
            device = "cuda" if config.resources.device == "auto" and address and has_gpus() else pick_device(config)
            ranks = start_ranks(
                make, model=model, dataset=dataset, config=config, device=device, stacks=stacks, teacher=teacher
            )
            imports.result()
        starts = ranks.call(
            lambda worker, _: (getattr(worker.sampler, "ready_at", 0.0), worker.start_seconds), [None] * ranks.size
        )
        ready = max(at for at, _ in starts)  # an engine starts before its worker's policy is loaded
        logger.info("the workers are ready, %.1f s after the last engine", time.time() - ready)
        slowest = max((seconds for _, seconds in starts), key=lambda seconds: seconds["step"])
        logger.info("the slowest worker's start: %s", _parts_of(slowest))
        try:
            yield ranks, grader
        finally:
            ranks.close()
    finally:
        if grading.exception() is None:
            grading.result().close()
        stop_ray()


def _parts_of(seconds: Mapping[str, float]) -> str:
    """The seconds of a ``Clock`` as a line of text."""
    parts = {name: value for name, value in seconds.items() if name != "step"}
    rest = seconds["step"] - sum(parts.values())
    return ", ".join(f"{name} {value:.1f} s" for name, value in {**parts, "the rest": rest}.items())


@contextmanager
def graded_samplers(
    config: ExperimentConfig, make: Callable[[WorkerSpec], object], *, model: Path, dataset: Path, verdicts: Path
) -> Iterator[tuple[Ranks, Grader]]:
    """As ``graded_ranks``, for an evaluation. A single sampler on this machine runs in this process, because starting
    Ray takes about as long as starting the sampler."""
    claim_for(config)
    if cluster_address() or config.resources.devices > 1:
        with graded_ranks(config, make, model=model, dataset=dataset, verdicts=verdicts) as ranks_and_grader:
            yield ranks_and_grader
        return
    device = pick_device(config)
    os.environ.update(worker_environment(device, config.resources))
    grader = make_grader(config, model, verdicts)
    try:
        with making_what_stays():
            sampler = make(WorkerSpec.alone(model, dataset, config, device))
        yield LocalRanks(sampler), grader
    finally:
        grader.close()


def _import_slow_modules() -> None:
    for module in _SLOW_IMPORTS:
        importlib.import_module(module)


def make_grader(
    config: ExperimentConfig,
    model: Path,
    verdicts: Path,
    on_progress: Callable[[], None] = lambda: None,
    on_retry: Callable[[], None] = lambda: None,
) -> Grader:
    """The grader of an experiment for the model in this folder.

    Args:
        verdicts: folder of the journal of a judge; that of a source's own judge is a folder below it.
        on_progress, on_retry: called by a judge, as ``JudgeGrader`` says.

    Raises:
        RewardError: the reward cannot be loaded.
        ConfigError: it cannot find the end of this model's thoughts.
    """
    from rlcore.rewards.mixture import MixtureGrader

    if list(config.rewards) == [""]:
        return _make_grader(config.reward, config, model, verdicts, on_progress, on_retry)
    with ExitStack() as opened:
        graders = {}
        for name, reward in config.rewards.items():
            graders[name] = _make_grader(reward, config, model, verdicts / name, on_progress, on_retry)
            opened.callback(graders[name].close)
        opened.pop_all()
    return MixtureGrader(graders)


def _make_grader(
    reward: RewardConfig,
    config: ExperimentConfig,
    model: Path,
    verdicts: Path,
    on_progress: Callable[[], None],
    on_retry: Callable[[], None],
) -> Grader:
    from rlcore.rewards import environment_of, length_rule, make_reward, thought_rule
    from rlcore.rewards.judge import JudgeGrader
    from rlcore.rewards.model_grader import ModelGrader
    from rlcore.rewards.pool import GradingPool

    budget = config.rollout.max_completion_tokens
    opens = reward.thoughts == "strip" and _prompt_opens_thought(config, model)
    if isinstance(reward, JudgeReward):
        return JudgeGrader(
            reward.judge,
            verdicts,
            thoughts=thought_rule(reward, prompt_opens_thought=opens),
            length=length_rule(reward, budget),
            on_progress=on_progress,
            on_retry=on_retry,
        )
    if isinstance(reward, ModelReward):
        return ModelGrader(
            reward.model,
            verdicts,
            first_free_gpu=None if config.resources.device == "cpu" else config.resources.devices,
            thoughts=thought_rule(reward, prompt_opens_thought=opens),
            length=length_rule(reward, budget),
            on_progress=on_progress,
        )
    return GradingPool(
        make_reward(reward, max_completion_tokens=budget, prompt_opens_thought=opens),
        reward.processes,
        reward.deadline_seconds,
        environment=environment_of(reward),
    )


def _prompt_opens_thought(config: ExperimentConfig, model: Path) -> bool:
    """Whether the chat template ends each prompt with <think>, so that completions begin inside a thought.

    Raises:
        ConfigError: think tags are special tokens, which the texts of completions do not have.
    """
    from rlcore.data.prompts import load_prompts, opens_thought
    from rlcore.rewards.extract import EMPTY_THOUGHT

    prompts = load_prompts(config, model)
    if special := prompts.special_tokens_in(EMPTY_THOUGHT):
        raise ConfigError(
            f"reward.thoughts is strip, and the model's tokenizer has {', '.join(special)} as special tokens, "
            "which are removed from the text of a completion, so the end of a thought cannot be found. "
            "Set reward.thoughts=keep, or mark the tokens as not special in the tokenizer's files."
        )
    return opens_thought(prompts.chat_text("2 + 3 = ?", 0))
