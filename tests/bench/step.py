"""Whole GRPO steps of ours and, by turns, of TRL.

``python -m tests.bench.step --kind text [--counted 8] [--tiny] --out FILE`` runs our side in this process: the worker
and the loop that a run uses, on one device without Ray, with a model of random weights that is made here. With
``--peer FOLDER`` it runs TRL's script in FOLDER and our side by turns, each in a process of its own on the same device,
and prints the medians of both. The regimes follow each other in one process: ``fixed`` (no completion ends before the
cap) and ``ragged`` (a bias on the end of the turn, given or found from the first step's lengths).

Seconds by phase end when the device is done with it. Real tokens are prompt and completion tokens of all rollouts, pads
not counted. ``update_mfu`` is TRL's formula over them (``cases.trl_flops``), by update seconds and 989 TFLOP/s; a
prompt that a group shares is counted once for each of its completions. ``update_mfu_shared_once`` is what a run logs as
perf/update_mfu: shared prompts counted once.

``--dataset FOLDER`` trains on a prepared dataset, ``--device-gib`` as if the device were smaller; both without TRL.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.cases import (
    Case,
    CrcGrader,
    common_arguments,
    end_bias,
    experiment,
    prepared_case,
    random_case,
    shape_of,
    stop_chance,
    trl_flops,
    write,
)

PEAK = 989e12  # dense bf16 FLOP/s of an H100 or H200 SXM, by the data sheet
TRL_CHAT = 43  # prompt tokens that TRL's script puts around picture and text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="folder of the scripts that run TRL; without it ours runs alone")
    parser.add_argument("--kind", choices=("text", "vl", "vl-7b"), default="text")
    parser.add_argument("--dataset", type=Path, help="a prepared dataset with pictures")
    parser.add_argument("--regimes", default="fixed,ragged")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each side")
    parser.add_argument("--warmup", type=int, default=2, help="uncounted steps of the first regime, one of the next")
    parser.add_argument("--counted", type=int, default=8)
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, help="default: 256, or 431 with a picture")
    parser.add_argument("--cap", type=int, help="default: 1024, or 512 with pictures")
    parser.add_argument("--side-pixels", type=int, default=512, help="width and height of the pictures")
    parser.add_argument("--tokens-per-microbatch", type=int, default=32768)
    parser.add_argument("--eos-bias", type=float, help="of the ragged regime; default: found")
    parser.add_argument("--mean", type=int, help="of the ragged regime's lengths; default: half the cap")
    parser.add_argument("--device-gib", type=int, help="hold the rest of the device's memory")
    parser.add_argument("--peer-args", default="", help="more arguments of TRL's script")
    common_arguments(parser, "/tmp/step-bench")
    arguments = parser.parse_args()
    shape = shape_of(arguments.kind, arguments.tiny)
    if arguments.tiny:
        arguments.problems, arguments.group, arguments.side_pixels = 2, 4, shape.side
    arguments.prompt_tokens = arguments.prompt_tokens or shape.prompt
    arguments.cap = arguments.cap or shape.cap
    arguments.mean = arguments.mean or arguments.cap // 2
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.peer is not None:
        by_turns(arguments)
        return
    with smaller_device(arguments.device_gib):
        ours(arguments)


@contextmanager
def smaller_device(gib: int | None) -> Iterator[None]:
    """As if the device had this much memory: another process holds the rest."""
    if gib is None:
        yield
        return
    hold = (
        "import sys, torch\n"
        f"free = torch.cuda.mem_get_info()[0] - ({gib} << 30)\n"
        "held = torch.empty(free, dtype=torch.uint8, device='cuda')\n"
        "print(torch.cuda.mem_get_info()[0] >> 20, flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", hold], **pipes) as holder:
        sys.stdout.write(f"free on the device, MiB: {holder.stdout.readline()}")
        yield
        holder.stdin.close()


# ---- by turns ------------------------------------------------------------------------------------------------------


def by_turns(arguments: argparse.Namespace) -> None:
    sides: dict[str, list[dict[str, Any]]] = {"peer": [], "ours": []}
    for turn in range(arguments.rounds):
        for side, command in (("peer", peer_command(arguments)), ("ours", our_command(arguments))):
            out = arguments.folder / f"{side}-{arguments.kind}-{turn}.json"
            with (arguments.folder / f"{side}-{arguments.kind}-{turn}.log").open("w") as log:
                subprocess.run([*command, "--out", str(out)], check=True, stdout=log, stderr=log)
            sides[side].append(json.loads(out.read_text()))
            write(arguments.out, {"kind": arguments.kind, "regimes": regimes_of(sides), "runs": sides})


def regimes_of(sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By regime the summary of each side's counted steps and, where both have some, the ratios."""
    table: dict[str, Any] = {}
    for regime in dict.fromkeys(row["regime"] for runs in sides.values() for run in runs for row in run["steps"]):
        steps = {
            side: [row for run in runs for row in run["steps"] if row["counted"] and row["regime"] == regime]
            for side, runs in sides.items()
        }
        table[regime] = {side: summary(rows) for side, rows in steps.items() if rows}
        if table[regime].keys() == {"peer", "ours"}:
            peer, own = (table[regime][side] for side in ("peer", "ours"))
            table[regime]["step time, peer / ours"] = peer["seconds"]["median"] / own["seconds"]["median"]
            table[regime]["real tokens/s, ours / peer"] = own["tokens_per_s"]["median"] / peer["tokens_per_s"]["median"]
    return table


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and range of every number over the steps."""
    numbers = [k for k, v in rows[0].items() if isinstance(v, int | float) and not isinstance(v, bool) and k != "step"]
    values = {key: [row[key] for row in rows] for key in numbers}
    spread = {k: {"median": statistics.median(v), "min": min(v), "max": max(v)} for k, v in values.items()}
    return {"steps": len(rows), **spread}


def peer_command(arguments: argparse.Namespace) -> list[str]:
    script, text = "trl_h200.py", arguments.prompt_tokens
    if arguments.kind != "text":
        script, text = "trl_vl_h200.py", text - TRL_CHAT - (arguments.side_pixels // 28) ** 2
    shape = ["--prompts", str(arguments.problems), "--group", str(arguments.group), "--cap", str(arguments.cap)]
    shape += ["--prompt-tokens", str(text), "--regimes", arguments.regimes]
    shape += ["--warmup", str(arguments.warmup), "--counted", str(arguments.counted)]
    shape += ["--model-dir", str(arguments.folder / "peer-model"), *(["--tiny"] if arguments.tiny else [])]
    return [sys.executable, str(arguments.peer / script), *shape, *arguments.peer_args.split()]


def our_command(arguments: argparse.Namespace) -> list[str]:
    same = ("kind", "regimes", "warmup", "counted", "problems", "group", "prompt_tokens", "cap", "side_pixels")
    command = [sys.executable, "-m", "tests.bench.step"]
    for name in (*same, "tokens_per_microbatch", "eos_bias", "mean", "folder"):
        if getattr(arguments, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return [*command, *(["--tiny"] if arguments.tiny else []), *(["--set", *arguments.set] if arguments.set else [])]


# ---- ours ----------------------------------------------------------------------------------------------------------


def ours(arguments: argparse.Namespace) -> None:
    case = case_of(arguments)
    started = time.perf_counter()
    steps = Steps(case, config_of(case, arguments), trl_side(arguments))
    start = time.perf_counter() - started
    bias = end_bias(arguments.mean, arguments.cap, case) if arguments.eos_bias is None else arguments.eos_bias
    for index, regime in enumerate(arguments.regimes.split(",")):
        warmup = arguments.warmup if index == 0 else min(1, arguments.warmup)
        for step in range(warmup + arguments.counted):
            steps.sample_with(regime, bias)
            row = steps.run(regime, counted=step >= warmup)
            if regime == "ragged" and step < warmup and arguments.eos_bias is None:
                bias += correction(row["completion"] / row["rollouts"], arguments.mean, arguments.cap)
    result = {
        "side": "ours",
        "start": start,
        "parts of the start": steps.start_seconds,
        "device": steps.device,
        "eos_bias": bias,
        "config": steps.config.flat(),
        "regimes": {regime: sides["ours"] for regime, sides in regimes_of({"ours": [{"steps": steps.rows}]}).items()},
        "steps": steps.rows,
    }
    write(arguments.out, result)


def case_of(arguments: argparse.Namespace) -> Case:
    if arguments.dataset:
        return prepared_case(arguments.kind, arguments.folder, arguments.dataset, tiny=arguments.tiny)
    count = arguments.problems * len(arguments.regimes.split(",")) * (arguments.warmup + arguments.counted)
    return random_case(
        arguments.kind,
        arguments.folder,
        problems=count,
        prompt_tokens=arguments.prompt_tokens,
        side=arguments.side_pixels,
        tiny=arguments.tiny,
    )


def trl_side(arguments: argparse.Namespace) -> int | None:
    """Of the pictures whose work TRL's formula counts; prepared ones differ from each other."""
    return None if arguments.dataset else int(arguments.side_pixels)


def config_of(case: Case, arguments: argparse.Namespace) -> Any:
    sizes = {
        "training.problems_per_batch": arguments.problems,
        "rollout.group_size": arguments.group,
        "rollout.max_completion_tokens": arguments.cap,
        "training.tokens_per_microbatch": arguments.tokens_per_microbatch,
        "rollout.gpu_memory_utilization": 0.35,
    }
    return experiment(case, [*(f"{key}={value}" for key, value in sizes.items()), *arguments.set])


class Steps:
    """One worker on one device and the loop of a run, step by step; keeps a row of figures for each. A metric sink.

    Args:
        side: of each rollout's picture in pixels; None: work is not counted by TRL's formula.
    """

    def __init__(self, case: Case, config: Any, side: int | None) -> None:
        import torch

        from infra.stack.servers import free_port
        from rlcore.distributed.worker import Worker, WorkerSpec
        from rlcore.training.run import TrainState

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        self.rows: list[dict[str, Any]] = []
        self._case = case
        self._worker: Any = Worker(WorkerSpec.alone(case.model, case.dataset, config, device, free_port()))
        self.start_seconds: Mapping[str, float] = self._worker.start_seconds
        self._flops: Callable[[Mapping[str, int]], float] = lambda tokens: math.nan
        if side is not None:
            self._flops = trl_flops(self._worker.policy.model.hf, side)
        self._state = TrainState()
        self._tokens: dict[str, int] = {}
        self._label, self._counted = "", False
        self.use(config)
        self._run.workers.sync_weights(0)

    def use(self, config: Any) -> None:
        """From the next step on. The engine keeps the sizes that it was made with, but for the cap."""
        from rlcore.distributed.group import WorkerGroup
        from rlcore.distributed.ranks import LocalRanks
        from rlcore.training.run import TrainingRun

        self.config = config
        self._worker.sampler._params["max_tokens"] = config.rollout.max_completion_tokens
        self._run = TrainingRun(
            config=config,
            problems=self._case.problems,
            workers=WorkerGroup(LocalRanks(self._worker), config),
            grader=CrcGrader(),
            sink=self,
            on_batch=self._count,
        )

    def sample_with(self, regime: str, bias: float) -> None:
        """No experiment has settings for these two."""
        params = self._worker.sampler._params
        params["ignore_eos"] = regime == "fixed"
        if regime == "ragged":
            params["logit_bias"] = {**(params["logit_bias"] or {}), self._case.end_of_turn: bias}

    def run(self, label: str, *, counted: bool) -> dict[str, Any]:
        from rlcore.training.loop import train

        self._label, self._counted = label, counted
        self._state = train(self._run, self._state, until_step=self._state.step + 1, should_stop=lambda: False)
        return self.rows[-1]

    def _count(self, step: int, groups: Sequence[Any], trained: Sequence[Any]) -> None:
        prompts = [len(g.prompt_token_ids) for g in groups for _ in g.rollouts]
        answers = [len(r.completion.token_ids) for g in groups for r in g.rollouts]
        self._tokens = {
            "rollouts": len(answers),
            "prompt": sum(prompts),
            "completion": sum(answers),
            "sum_sq": sum((p + c) ** 2 for p, c in zip(prompts, answers, strict=True)),
        }

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        seconds, tokens = metrics["time/step"], self._tokens
        real = tokens["prompt"] + tokens["completion"]
        row = {"step": step, "regime": self._label, "counted": self._counted, "seconds": seconds}
        phases = {key.removeprefix("time/"): value for key, value in metrics.items() if key.startswith("time/")}
        row |= {phase: value for phase, value in phases.items() if phase != "step"}
        row |= {key: value for key, value in tokens.items() if key != "sum_sq"}
        row |= {
            "tokens_per_s": real / seconds,
            "generate_tokens_per_s": tokens["completion"] / metrics["time/generate"],
            "update_tokens_per_s": real / metrics["time/update"],
            "update_mfu": self._flops(tokens) / metrics["time/update"] / PEAK,
            "update_mfu_shared_once": metrics.get("perf/update_mfu", math.nan),
            "peak_memory_gib": metrics["system/peak_memory_gib"],
            "abs_delta_logprob_mean": metrics["rollout/abs_delta_logprob_mean"],
            "abs_delta_logprob_max": metrics["rollout/abs_delta_logprob_max"],
            "grad_norm": metrics["optim/grad_norm"],
        }
        self.rows.append({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
        sys.stdout.write(json.dumps(self.rows[-1]) + "\n")
        sys.stdout.flush()


def correction(mean: float, wanted: float, cap: int) -> float:
    """What to add to the bias on the end of the turn, from the mean length that a step had."""
    return math.log(stop_chance(wanted, cap) / stop_chance(min(mean, 0.99 * cap), cap))


if __name__ == "__main__":
    main()
