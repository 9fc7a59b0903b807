"""Where trainers and samplers are placed on N devices: seconds of a step, and the share of it that each rank is idle.

``python -m tests.bench.placement [--workers 4] [--rollout-workers 1] [--regime ragged] [--tiny] --out FILE`` runs, one
after the other, through real Ray on this machine's devices:

- ``colocated``: every worker trains and samples by turns;
- ``apart``: ``--rollout-workers`` of the N sample, the others train, each waiting for the other;
- ``apart, one step off``: the same with ``training.max_staleness: 1``, so that both go on at once.

``--workers 1 --only colocated`` is one device alone, to see what several are worth: give it its share of
``--problems``.

All with the same model, problems, grader and importance weights. A rank is busy while it is in a call, so that waiting
for other ranks in a collective counts as busy: the idle share is a lower bound. Medians over the counted steps.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tests.bench.cases import Case, CrcGrader, common_arguments, end_bias, experiment, random_case, write

PLACEMENTS = ("colocated", "apart", "apart, one step off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="devices, N")
    parser.add_argument("--rollout-workers", type=int, default=1, help="of the N, where they are apart")
    parser.add_argument("--only", nargs="+", choices=PLACEMENTS, help="these of the placements, by name")
    parser.add_argument("--regime", choices=("fixed", "ragged"), default="ragged")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--counted", type=int, default=8)
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--cap", type=int, default=1024)
    parser.add_argument("--mean", type=float, help="tokens of a ragged completion; default: half the cap")
    parser.add_argument("--tokens-per-microbatch", type=int, default=32768)
    common_arguments(parser, "/tmp/placement-bench")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.tiny:
        arguments.cap, arguments.problems, arguments.group, arguments.prompt_tokens = 32, 4, 4, 32
        arguments.warmup, arguments.counted = 0, 2
    arguments.mean = arguments.mean or arguments.cap / 2
    case = random_case(
        "text",
        arguments.folder,
        problems=arguments.problems * (arguments.warmup + arguments.counted + 1),
        prompt_tokens=arguments.prompt_tokens,
        side=0,
        tiny=arguments.tiny,
    )
    found = {name: placed(arguments, case, overrides) for name, overrides in placements(arguments).items()}
    seconds = {name: result["seconds"]["step"] for name, result in found.items()}
    first = next(iter(seconds))
    times = {f"{name} / {first}": value / seconds[first] for name, value in seconds.items()}
    write(arguments.out, {"regime": arguments.regime, "step time": times, "placements": found})


def placements(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Overrides of each placement."""
    together = [f"resources.workers={arguments.workers}"]
    apart = [
        f"resources.workers={arguments.workers - arguments.rollout_workers}",
        f"resources.rollout_workers={arguments.rollout_workers}",
    ]
    every = dict(zip(PLACEMENTS, (together, apart, [*apart, "training.max_staleness=1"]), strict=True))
    return {name: every[name] for name in arguments.only or PLACEMENTS}


class Timed:
    """What a worker holds, with the seconds of its calls counted by the worker."""

    def __init__(self, timed: TimedWorker, part: Any) -> None:
        self._timed, self._part = timed, part

    def __getattr__(self, name: str) -> Any:
        return self._timed.counted(getattr(self._part, name))


class TimedWorker:
    """A worker that counts the seconds of its calls."""

    def __init__(self, regime: str, bias: float, spec: Any) -> None:
        from rlcore.distributed.worker import make_worker

        self._worker: Any = make_worker(spec)
        self._busy = 0.0
        if self._worker.sampler is not None:  # no experiment has settings for these two
            params = self._worker.sampler._params
            params["ignore_eos"] = regime == "fixed"
            if regime == "ragged":
                eos = self._worker.sampler._engine.llm.get_tokenizer().eos_token_id
                params["logit_bias"] = {**(params["logit_bias"] or {}), eos: bias}

    def busy_seconds(self) -> float:
        """Since the last time that it was asked."""
        busy, self._busy = self._busy, 0.0
        return busy

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._worker, name)
        return self.counted(member) if callable(member) else Timed(self, member)

    def counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self._busy += time.perf_counter() - start

        return timed

    def generate(self, requests: Sequence[Any]) -> Iterator[Any]:
        ended = self._worker.generate(requests)
        while True:
            start = time.perf_counter()
            some = next(ended, None)
            self._busy += time.perf_counter() - start
            if some is None:
                return
            yield some


class Recorder:
    """A metric sink that keeps one row a step, with how long each rank was busy in it."""

    def __init__(self, busy: Callable[[], list[float]]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._busy = busy
        busy()  # what was before the first step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {key.removeprefix("time/"): value for key, value in metrics.items() if key.startswith("time/")}
        row["tokens_per_s"] = metrics["system/tokens_per_second"]
        row["completion_tokens_mean"] = metrics["rollout/completion_tokens_mean"]
        row["policy_age"] = metrics["rollout/policy_age_max"]
        row["idle"] = [max(0.0, 1 - busy / row["step"]) for busy in self._busy()]
        self.rows.append(row)
        sys.stdout.write(f"{step}: {row}\n")
        sys.stdout.flush()


def placed(arguments: argparse.Namespace, case: Case, overrides: Sequence[str]) -> dict[str, Any]:
    """Medians of one placement's steps."""
    from rlcore.distributed.actors import start_ranks
    from rlcore.distributed.cluster import pick_device, start_ray, stop_ray
    from rlcore.distributed.group import WorkerGroup
    from rlcore.training.loop import train
    from rlcore.training.run import TrainingRun, TrainState

    config = experiment(
        case,
        [
            f"training.problems_per_batch={arguments.problems}",
            f"rollout.group_size={arguments.group}",
            f"rollout.max_completion_tokens={arguments.cap}",
            f"training.tokens_per_microbatch={arguments.tokens_per_microbatch}",
            *overrides,
            *arguments.set,
        ],
    )
    make = functools.partial(TimedWorker, arguments.regime, end_bias(arguments.mean, arguments.cap, case))
    start_ray(None, config.resources.devices)
    try:
        ranks = start_ranks(make, model=case.model, dataset=case.dataset, config=config, device=pick_device(config))
        workers = WorkerGroup(ranks, config)
        workers.sync_weights(0)
        recorder = Recorder(lambda: ranks.call(lambda worker, _: worker.busy_seconds(), [None] * ranks.size))
        grader = CrcGrader()
        run = TrainingRun(
            config, case.problems, workers, grader, recorder, on_batch=lambda step, generated, trained: None
        )
        steps = arguments.warmup + arguments.counted
        train(run, TrainState(), until_step=steps, should_stop=lambda: False)
        ranks.close()
    finally:
        stop_ray()
    rows = recorder.rows[arguments.warmup :]
    numbers = [key for key in rows[0] if key != "idle"]
    return {
        "resources": config.resources.model_dump(),
        "steps": len(rows),
        "seconds": {key: statistics.median(row.get(key, 0.0) for row in rows) for key in numbers},
        "idle share by rank": [
            statistics.median(shares) for shares in zip(*(row["idle"] for row in rows), strict=True)
        ],
        "rows": rows,
    }


if __name__ == "__main__":
    main()
