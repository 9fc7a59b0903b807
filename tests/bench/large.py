"""Memory and seconds while a large policy loads and takes its first steps, through Ray on this machine's devices.

``python -m tests.bench.large --shape vl-32b --workers 2 --set model.lora.rank=32 rollout.tensor_parallel=2`` makes a
model of that shape with random weights (``tests.downloaded``), starts the workers, sends the weights to the sampler and
runs ``--steps`` whole GRPO steps. The table has a row for each of these, with the peaks of memory in it: of this run's
processes (pages of the model's files count once for each process), of the machine (without the page cache) and of the
GPUs.

Pictures are random, and the reward is a checksum of the tokens, so that it varies within a group.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from tests.bench.cases import CrcGrader, common_arguments, experiment, random_case, write
from tests.downloaded import SHAPES, make_downloaded
from tests.stages import MemoryWatch, Stage, table


class LastMetrics:
    """Keeps the metrics of the last step. Implements ``types.MetricSink``."""

    def __init__(self) -> None:
        self.values: Mapping[str, float] = {}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.values = dict(metrics)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the table is written
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="vl-32b")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--cap", type=int, default=256)
    parser.add_argument("--side-pixels", type=int, default=504)
    common_arguments(parser, "/tmp/large-bench")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.shape = "tiny-vl" if arguments.shape.startswith("vl") else "tiny-text"
        arguments.problems, arguments.prompt_tokens, arguments.cap, arguments.side_pixels = 2, 96, 8, 56
    arguments.folder.mkdir(parents=True, exist_ok=True)
    stages: list[Stage] = []
    metrics: dict[str, Any] = {}
    try:
        with MemoryWatch().running() as memory:
            metrics = run(arguments, stages)
    finally:  # a run that fails or is ended by a limit has loaded something, too
        rows = memory.measured(stages)
        _tell(f"\n{table(rows)}\n")
        write(arguments.out, {"shape": arguments.shape, "stages": [asdict(row) for row in rows], "metrics": metrics})


def _tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextmanager
def stage(stages: list[Stage], name: str) -> Iterator[None]:
    began = time.time()
    _tell(f"{name} ...")
    try:
        yield
    finally:
        stages.append(Stage(name, began, time.time()))
        _tell(f"{name}: {stages[-1].seconds:.1f} s")


def run(arguments: argparse.Namespace, stages: list[Stage]) -> dict[str, Any]:
    """The metrics of the last step."""
    import torch

    from rlcore.distributed.actors import start_ranks
    from rlcore.distributed.cluster import pick_device, start_ray, stop_ray
    from rlcore.distributed.group import WorkerGroup
    from rlcore.distributed.worker import make_worker
    from rlcore.training.loop import train
    from rlcore.training.run import TrainingRun, TrainState

    model = arguments.folder / arguments.shape
    with stage(stages, "make the random model"):
        if not model.exists():
            make_downloaded(model, arguments.shape, device="cuda" if torch.cuda.is_available() else "cpu")
    sees = SHAPES[arguments.shape].mrope is not None
    case = random_case(
        "vl" if sees else "text",
        arguments.folder,
        problems=arguments.problems * arguments.steps,
        prompt_tokens=arguments.prompt_tokens,
        side=arguments.side_pixels if sees else 0,
        tiny=arguments.tiny,
        model=model,
    )
    config = experiment(
        case,
        [
            f"resources.workers={arguments.workers}",
            f"training.problems_per_batch={arguments.problems}",
            f"rollout.group_size={arguments.group}",
            f"rollout.max_completion_tokens={arguments.cap}",
            *arguments.set,
        ],
    )
    with stage(stages, "start Ray"):
        start_ray(None, config.resources.devices)
    try:
        with stage(stages, "start engines and load the policy"):
            ranks = start_ranks(
                make_worker, model=model, dataset=case.dataset, config=config, device=pick_device(config)
            )
        workers, sink = WorkerGroup(ranks, config), LastMetrics()
        with stage(stages, "send the weights to the sampler"):
            workers.sync_weights(0)
        training = TrainingRun(
            config, case.problems, workers, CrcGrader(), sink, on_batch=lambda step, generated, trained: None
        )
        state = TrainState()
        for step in range(1, arguments.steps + 1):
            with stage(stages, f"step {step}"):
                state = train(training, state, until_step=step, should_stop=lambda: False)
        ranks.close()
    finally:
        stop_ray()
    return dict(sink.values)


if __name__ == "__main__":
    main()
