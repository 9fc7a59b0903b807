"""Does every algorithm learn? A run of the text demo (sums) for each of them and three seeds, one budget for all.

``python -m tests.bench.algorithms [--only NAME ...] [--seeds N] [--out FOLDER]`` (make demo-algorithms). Each run is a
process on one core with the real policy (FSDP2, one rank) and the real sampler (vLLM); no Ray and no servers, whose
start would take longer than the training. Prints a table of held-out accuracy before and after, writes it with all
numbers to FOLDER (results.json, table.md, curves.png), and ends with 1 if an algorithm did not learn. Runs that
results.json already holds are not run again. ``--tiny`` trains one algorithm on a batch, which need not learn.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

BATCHES = 24  # rollout batches of 32 problems x 8 completions: the budget
BASE = (
    "rollout.max_sequences=256",
    "evaluation.samples=4",
    "resources.workers=1",
)
WINDOW = 5  # batches of the running mean in the curves
TINY = ("model.tiny.warm_start_steps=0", "data.synthetic_problems=32", "evaluation.samples=1")
_TWO = ("training.mini_batches=2",)  # losses differ from each other only where the ratio is not 1
_SEQUENCES = ("algorithm.aggregation=sequence_mean_token_mean",)

ALGORITHMS: Mapping[str, Sequence[str]] = {
    "grpo": (),
    "dr_grpo": ("algorithm.advantage.name=dr_grpo", "algorithm.aggregation=constant"),
    "batch_std": ("algorithm.advantage.name=batch_std",),
    "rloo": ("algorithm.advantage.name=rloo",),
    "bnpo": ("algorithm.advantage.name=bnpo",),
    "pass_at_k, k = 2": ("algorithm.advantage.name=pass_at_k", "algorithm.advantage.k=2"),
    "reinforce++": ("algorithm.advantage.name=reinforce_plus_plus",),
    "reinforce++ baseline": ("algorithm.advantage.name=reinforce_plus_plus_baseline",),
    "remax": ("algorithm.advantage.name=remax",),
    "ppo, dual clip": (*_TWO, "algorithm.loss.dual_clip=3"),
    "gspo": (
        *_TWO,
        *_SEQUENCES,
        "algorithm.loss.name=gspo",
        "algorithm.loss.clip_low=0.1",
        "algorithm.loss.clip_high=0.1",
    ),
    "gspo_token": (
        *_TWO,
        *_SEQUENCES,
        "algorithm.loss.name=gspo_token",
        "algorithm.loss.clip_low=0.1",
        "algorithm.loss.clip_high=0.1",
    ),
    "luspo": (
        *_TWO,
        "algorithm.aggregation=sequence_mean_token_sum",
        "algorithm.loss.name=gspo",
        "algorithm.loss.clip_low=0.1",
        "algorithm.loss.clip_high=0.1",
    ),
    "cispo": (*_TWO, "algorithm.loss.name=cispo"),
    "sapo": (*_TWO, "algorithm.loss.name=sapo"),
    "vespo": (*_TWO, "algorithm.loss.name=vespo"),
    "dapo": (
        *_TWO,
        "algorithm.dynamic_sampling.max_rounds=4",
        "reward.overlong.buffer_tokens=8",
        "reward.overlong.penalty=0.5",
    ),
    "kl in the loss, adaptive": (
        "algorithm.kl.coefficient=0.01",
        "algorithm.kl.estimator=straight_through",
        "algorithm.kl.adaptive.target=0.05",
    ),
    "kl in the reward": (
        "algorithm.kl.coefficient=0.002",
        "algorithm.kl.estimator=k1",
        "algorithm.kl.place=reward",
    ),
    "off-policy, 2 updates x 2 passes": (*_TWO, "training.ppo_epochs=2", "training.learning_rate=2e-4"),
    "top-p 0.95 with TIS": ("rollout.top_p=0.95", "algorithm.correction.name=truncate"),
    "lora": ("model.lora.rank=16", "model.lora.alpha=32", "training.learning_rate=2e-3"),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One algorithm and seed, or (``algorithm`` None) the policy that the runs of the seed start from."""

    algorithm: str | None
    seed: int
    model: str
    dataset: str
    held_out: str
    tiny: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    algorithm: str | None
    seed: int
    accuracy: float
    interval: tuple[float, float]
    rewards: tuple[float, ...]  # of each rollout batch
    completions: int
    seconds: float
    core_seconds: float  # of this process and its graders, whatever else the machine does


def run(trial: Trial) -> Outcome:
    """Train (unless the trial is the starting policy) and evaluate, in this process."""
    started = time.perf_counter()
    os.environ["OMP_NUM_THREADS"] = "1"
    from infra.stack.servers import free_port
    from rlcore.data.table import load_problems
    from rlcore.distributed.group import WorkerGroup
    from rlcore.distributed.ranks import LocalRanks
    from rlcore.distributed.worker import Worker, WorkerSpec
    from rlcore.jobs.evaluate import evaluate, summarise
    from rlcore.rewards import make_reward
    from rlcore.rewards.pool import GradingPool
    from rlcore.training.loop import train
    from rlcore.training.run import TrainingRun, TrainState

    config = experiment(trial.algorithm or "grpo", trial.seed, tiny=trial.tiny)
    spec = WorkerSpec.alone(Path(trial.model), Path(trial.dataset), config, "cpu", free_port())
    sink = Rewards()
    reward = make_reward(config.reward, max_completion_tokens=config.rollout.max_completion_tokens)
    with GradingPool(reward, 1, config.reward.deadline_seconds) as grader:
        workers = WorkerGroup(LocalRanks(Worker(spec)), config)
        workers.sync_weights(0)
        if trial.algorithm is not None:
            problems = load_problems(Path(trial.dataset))
            wired = TrainingRun(config, problems, workers, grader, sink, on_batch=lambda step, generated, trained: None)
            state = train(wired, TrainState(), until_step=config.training.steps, should_stop=lambda: False)
            workers.sync_weights(state.step)
        rows = evaluate(workers, grader, load_problems(Path(trial.held_out)), config.evaluation)
    seconds = time.perf_counter() - started
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    report = summarise(rows, policy="", step=0, dataset_digest="", table="", seconds=seconds, at=time.time())
    return Outcome(
        trial.algorithm,
        trial.seed,
        report.accuracy,
        (report.accuracy_low, report.accuracy_high),
        tuple(sink.rewards),
        sink.completions,
        seconds,
        sum(each.ru_utime + each.ru_stime for each in used),
    )


class Rewards:
    """A metric sink that keeps the mean reward of each rollout batch."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.completions = 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
            self.completions += int(metrics["rollout/groups_generated"]) * 8


def experiment(algorithm: str, seed: int, *, tiny: bool) -> Any:
    from rlcore.config import build_experiment
    from tasks.experiments import experiment_values

    values = experiment_values()["grpo-gsm8k-tiny"]
    seeds = [f"seed={seed}", f"model.tiny.seed={seed}", f"data.synthetic_seed={seed}", f"data.shuffle_seed={seed}"]
    overrides = [*BASE, *seeds, *ALGORITHMS[algorithm], *(TINY if tiny else ())]
    per_batch = build_experiment(values, [*overrides, "training.steps=240", "segment.steps=240"])
    steps = (1 if tiny else BATCHES) * per_batch.training.steps_per_batch
    return build_experiment(values, [*overrides, f"training.steps={steps}", f"segment.steps={steps}"])


def prepare(seed: int, folder: Path, *, tiny: bool) -> Trial:
    """The seed's policy and problems; the trial that measures where its runs start from."""
    from rlcore.jobs.bootstrap import bootstrap
    from rlcore.jobs.prepare import prepare as prepare_source
    from rlcore.jobs.resize import resize
    from rlcore.specs import BootstrapSpec, PrepareSpec, ResizeSpec

    config = experiment("grpo", seed, tiny=tiny)
    model = bootstrap(BootstrapSpec(result=folder / "model.json", model=config.model, models_dir=folder / "models"))
    found = []
    for split, source in (("train", config.data.train), ("validation", config.data.validation)):
        raw = prepare_source(
            PrepareSpec(
                result=folder / "raw.json",
                source=source,
                source_path=None,
                split=split,
                data=config.data,
                model=config.model,
                datasets_dir=folder / "datasets",
            )
        )
        resized = resize(
            ResizeSpec(
                result=folder / "resized.json",
                dataset=raw,
                data=config.data,
                model=config.model,
                datasets_dir=folder / "datasets",
                processes=2,
            )
        )
        found.append(Path(resized.path))
    train, held_out = found
    return Trial(None, seed, model.path, str(train), str(held_out), tiny)


def table(outcomes: Sequence[Outcome]) -> tuple[str, list[str]]:
    """The table as Markdown, and the algorithms that did not learn."""
    import numpy as np

    before = {o.seed: o.accuracy for o in outcomes if o.algorithm is None}
    lines = [
        "| algorithm | before | after | gain | lowest gain of a seed | completions | core seconds a run |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    failed = []
    for name in ALGORITHMS:
        runs = [o for o in outcomes if o.algorithm == name]
        if not runs:
            continue
        gains = [o.accuracy - before[o.seed] for o in runs]
        after = [o.accuracy for o in runs]
        if min(gains) <= 0:
            failed.append(name)
        lines.append(
            f"| {name} | {np.mean([before[o.seed] for o in runs]):.3f} | {np.mean(after):.3f} "
            f"({', '.join(f'{value:.3f}' for value in after)}) | {np.mean(gains):+.3f} | {min(gains):+.3f} "
            f"| {np.mean([o.completions for o in runs]):.0f} | {np.mean([o.core_seconds for o in runs]):.0f} |"
        )
    return "\n".join(lines), failed


def draw_curves(outcomes: Sequence[Outcome], file: Path) -> None:
    """One small plot per algorithm: reward of each rollout batch, mean and range over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    names = [name for name in ALGORITHMS if any(o.algorithm == name for o in outcomes)]
    columns = 5
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(14, 2.2 * rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for name, axis in zip(names, axes.flat, strict=False):
        curves = np.array([_smooth(o.rewards) for o in outcomes if o.algorithm == name])
        axis.fill_between(range(curves.shape[1]), curves.min(0), curves.max(0), alpha=0.25)
        axis.plot(curves.mean(0))
        axis.set_title(name, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(names) :]:
        axis.axis("off")
    figure.supxlabel("rollout batch")
    figure.supylabel(f"reward, mean of {WINDOW} batches; band: all seeds")
    figure.savefig(file, dpi=110)


def _smooth(rewards: Sequence[float]) -> Any:
    import numpy as np

    return np.convolve(rewards, np.ones(WINDOW) / WINDOW, mode="valid")


def main() -> int:
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(ALGORITHMS), choices=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("data/algorithms"))
    parser.add_argument("--tiny", action="store_true", help="one algorithm and seed, one batch, from random weights")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.only, arguments.seeds = ["grpo"], 1
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.json"
    outcomes = [Outcome(**row) for row in json.loads(results.read_text())] if results.exists() else []
    started = time.perf_counter()
    starts = [prepare(seed, out, tiny=arguments.tiny) for seed in range(arguments.seeds)]
    done = {(o.algorithm, o.seed) for o in outcomes}
    trials = [
        replace(start, algorithm=name)
        for name in (None, *arguments.only)
        for start in starts
        if (name, start.seed) not in done
    ]
    context = get_context("forkserver")
    context.set_forkserver_preload(["vllm", "rlcore.distributed.worker", "rlcore.training.loop"])  # 10 s of imports
    with (
        Progress(*Progress.get_default_columns()[:-1]) as bar,
        ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=context, max_tasks_per_child=1) as pool,
    ):
        shown = bar.add_task("training", total=len(trials))
        for future in as_completed([pool.submit(run, trial) for trial in trials]):
            outcomes.append(future.result())
            results.write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
            last = outcomes[-1]
            bar.update(shown, advance=1, description=f"{last.algorithm or 'start'}/{last.seed}: {last.accuracy:.3f}")
    text, failed = table(outcomes)
    draw_curves(outcomes, out / "curves.png")
    (out / "table.md").write_text(text + "\n")
    minutes = sum(o.core_seconds for o in outcomes) / 60
    sys.stdout.write(f"{text}\n\n{time.perf_counter() - started:.0f} s, {minutes:.0f} core minutes of runs; {out}\n")
    if failed:
        sys.stdout.write(f"did not learn with every seed: {', '.join(failed)}\n")
    return bool(failed) and not arguments.tiny


if __name__ == "__main__":
    sys.exit(main())
