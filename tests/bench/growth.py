"""How a step grows with what it works on: ``python -m tests.bench.growth --peer FOLDER [--tiny] --out FILE``.

Whole steps of ours on one device, every completion at its cap: over caps at one group size, then over group sizes at
one cap, in one process and with one engine, which is made for the greatest of them. Work is a step's real tokens. A
power of them is fitted to the seconds beside it: 1 is linear. Attention among a sequence's own tokens grows with their
square, so caps may come out above it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.step import Recorder, case_of, lone_worker, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder of the peer's scripts, for model and prompts")
    parser.add_argument("--kind", choices=("text", "vl"), default="text")
    parser.add_argument("--caps", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=1, help="uncounted steps of each point")
    parser.add_argument("--counted", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/growth-bench"))
    parser.add_argument("--tiny", action="store_true", help="two-layer models, small numbers: runs on a CPU")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the experiment")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.caps, arguments.groups, arguments.prompt_tokens = [16, 32], [2, 4], 16
    arguments.folder.mkdir(parents=True, exist_ok=True)
    grow(arguments)


def grow(arguments: argparse.Namespace) -> None:
    import torch

    from rlcore.distributed.group import LocalRanks, WorkerGroup
    from rlcore.training.loop import TrainingRun, train
    from rlcore.training.state import TrainState
    from tests.bench.peer import CrcGrader, experiment, write

    usual = {"cap": arguments.caps[1], "group": arguments.groups[1]}
    points = [{**usual, "cap": cap} for cap in arguments.caps] + [{**usual, "group": g} for g in arguments.groups]
    arguments.side_pixels, arguments.size, arguments.dataset = 56 if arguments.tiny else 512, "3b", None
    case = case_of(arguments, arguments.problems * len(points) * (arguments.warmup + arguments.counted))

    def settings(cap: int, group: int) -> Any:
        own = [f"training.problems_per_step={arguments.problems}", f"rollout.group_size={group}"]
        own += [f"rollout.max_completion_tokens={cap}", "rollout.gpu_memory_utilization=0.35"]
        return experiment(case, [*own, *arguments.set])

    device = "cuda" if torch.cuda.is_available() else "cpu"
    worker = lone_worker(case, settings(max(arguments.caps), max(arguments.groups)), device)
    assert worker.sampler is not None
    worker.sampler._params["ignore_eos"] = True  # no experiment has a setting for it
    plan = [(name, step >= arguments.warmup) for name in map(str, points) for step in _steps(arguments)]
    recorder = Recorder(case.flops(worker.policy.model.hf), plan, cap=0, mean=0)
    state, found = TrainState(), []
    worker.sync_weights(0)
    for point in points:
        config = settings(**point)
        worker.sampler._params["max_tokens"] = point["cap"]
        run = TrainingRun(
            config=config,
            problems=case.problems,
            workers=WorkerGroup(LocalRanks(worker), config),
            grader=CrcGrader(case.reward),
            sink=recorder,
            on_batch=recorder.count,
        )
        for _ in _steps(arguments):
            state = train(run, state, until_step=state.step + 1, should_stop=lambda: False)
        found.append({**point, **summary([r for r in recorder.rows if r["counted"] and r["regime"] == str(point)])})
    caps, groups = found[: len(arguments.caps)], found[len(arguments.caps) :]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    powers = {"by cap": power(caps), "by group size": power(groups)}
    write(arguments.out, {"device": name, "power": powers, "by cap": caps, "by group size": groups})


def _steps(arguments: argparse.Namespace) -> range:
    return range(arguments.warmup + arguments.counted)


def power(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By phase, the slope of log seconds over log real tokens."""
    tokens = [row["prompt"]["median"] + row["completion"]["median"] for row in rows]
    phases = ("seconds", "generate", "update")
    return {p: float(np.polyfit(np.log(tokens), np.log([row[p]["median"] for row in rows]), 1)[0]) for p in phases}


if __name__ == "__main__":
    main()
