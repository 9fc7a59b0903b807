"""Whole GRPO steps of ours and of the peer, side by side.

``python -m tests.bench.step --peer FOLDER --kind text [--rounds 1] [--counted 8] [--tiny] --out FILE`` runs the peer's
script in FOLDER and our trainer by turns, each in a process of its own on the same device, and prints the medians of
their steps as JSON. ``--side ours`` runs our side alone, in this process: the Worker and the loop that a run uses, on
one rank without Ray. Both regimes of the peer follow each other in one process: ``fixed`` (EOS ignored, all at the
cap) and ``ragged`` (a bias on the EOS logit, given or found from the first step's lengths).

Seconds by phase end when the device is done with it. Real tokens are prompt + completion tokens of all rollouts, pads
not counted. MFU is the peer's formula over them: 6 N T + 6 L D sum(s^2), recomputation not counted, by update seconds
and 989 TFLOP/s; a prompt that a group shares is counted once for each of its completions. ``update_mfu_shared_once`` is
what a run logs as perf/update_mfu: shared prompts counted once.

Without the peer: ``--dataset FOLDER`` trains on a prepared dataset, ``--device-gib`` as if the device were smaller.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PEAK = 989e12  # dense bf16 FLOP/s of an H100 or H200 SXM, by the data sheet
EOS = 2  # of the peer's tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, required=True, help="folder of the peer's scripts")
    parser.add_argument("--side", choices=("both", "ours"), default="both")
    parser.add_argument("--kind", choices=("text", "vl"), default="text")
    parser.add_argument("--size", choices=("3b", "7b"), default="3b", help="of the model that sees")
    parser.add_argument(
        "--dataset", type=Path, help="of ours: a prepared dataset with pictures, in place of drawn ones"
    )
    parser.add_argument("--regimes", default="fixed,ragged")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each side")
    parser.add_argument("--warmup", type=int, default=2, help="uncounted steps of the first regime, one of the next")
    parser.add_argument("--counted", type=int, default=8)
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=None, help="default: 256, or 64 beside an image")
    parser.add_argument("--cap", type=int, default=None, help="default: 1024, or 512 with images")
    parser.add_argument("--side-pixels", type=int, default=512, help="width and height of the images")
    parser.add_argument("--tokens-per-microbatch", type=int, default=32768)
    parser.add_argument("--eos-bias", type=float, default=None, help="of the ragged regime; default: found")
    parser.add_argument("--mean", type=int, default=None, help="of the ragged regime's lengths; default: half the cap")
    parser.add_argument("--device-gib", type=int, default=None, help="of ours: hold the rest of the device's memory")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/step-bench"))
    parser.add_argument("--tiny", action="store_true", help="two-layer models, small numbers: runs on a CPU")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of our experiment")
    parser.add_argument("--peer-args", default="", help="more arguments of the peer's script")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    vl = arguments.kind == "vl"
    if arguments.tiny:
        arguments.cap, arguments.prompt_tokens, arguments.side_pixels = 32, 16, 56
    arguments.prompt_tokens = arguments.prompt_tokens or (64 if vl else 256)
    arguments.cap = arguments.cap or (512 if vl else 1024)
    arguments.mean = arguments.mean or arguments.cap // 2
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.side == "both":
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
        for side, command in (("peer", _peer_command(arguments)), ("ours", _our_command(arguments))):
            out = arguments.folder / f"{side}-{arguments.kind}-{turn}.json"
            with (arguments.folder / f"{side}-{arguments.kind}-{turn}.log").open("w") as log:
                subprocess.run([*command, "--out", str(out)], check=True, stdout=log, stderr=log)
            sides[side].append(json.loads(out.read_text()))
            _report(arguments, sides)


def _report(arguments: argparse.Namespace, sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    from tests.bench.peer import write

    table: dict[str, Any] = {}
    for regime in arguments.regimes.split(","):
        steps = {
            side: [row for run in runs for row in run["steps"] if row["counted"] and row["regime"] == regime]
            for side, runs in sides.items()
        }
        table[regime] = {side: summary(rows) for side, rows in steps.items() if rows}
        if all(steps.values()):
            peer, own = (table[regime][side] for side in ("peer", "ours"))
            table[regime]["step time, peer / ours"] = peer["seconds"]["median"] / own["seconds"]["median"]
            table[regime]["real tokens/s, ours / peer"] = own["tokens_per_s"]["median"] / peer["tokens_per_s"]["median"]
    write(arguments.out, {"kind": arguments.kind, "regimes": table, "runs": dict(sides)})


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and range of every number over the steps."""
    numbers = [k for k, v in rows[0].items() if isinstance(v, int | float) and not isinstance(v, bool) and k != "step"]
    values = {key: [row[key] for row in rows] for key in numbers}
    spread = {k: {"median": statistics.median(v), "min": min(v), "max": max(v)} for k, v in values.items()}
    return {"steps": len(rows), **spread}


def _peer_command(arguments: argparse.Namespace) -> list[str]:
    script = "trl_vl_h200.py" if arguments.kind == "vl" else "trl_h200.py"
    shape = ["--prompts", str(arguments.problems), "--group", str(arguments.group), "--cap", str(arguments.cap)]
    shape += ["--prompt-tokens", str(arguments.prompt_tokens), "--regimes", arguments.regimes]
    shape += ["--warmup", str(arguments.warmup), "--counted", str(arguments.counted)]
    shape += ["--model-dir", str(arguments.folder / "peer-model"), *(["--tiny"] if arguments.tiny else [])]
    return [sys.executable, str(arguments.peer / script), *shape, *arguments.peer_args.split()]


def _our_command(arguments: argparse.Namespace) -> list[str]:
    same = ("peer", "kind", "regimes", "warmup", "counted", "problems", "group", "prompt_tokens", "cap")
    command = [sys.executable, "-m", "tests.bench.step", "--side", "ours"]
    for name in (*same, "side_pixels", "tokens_per_microbatch", "eos_bias", "folder"):
        if getattr(arguments, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return [*command, *(["--tiny"] if arguments.tiny else []), *(["--set", *arguments.set] if arguments.set else [])]


# ---- ours ----------------------------------------------------------------------------------------------------------


def ours(arguments: argparse.Namespace) -> None:
    import torch

    from rlcore.distributed.group import LocalRanks, WorkerGroup
    from rlcore.training.loop import TrainingRun, train
    from rlcore.training.state import TrainState
    from tests.bench.peer import CrcGrader, experiment, write

    device = "cuda" if torch.cuda.is_available() else "cpu"
    regimes = arguments.regimes.split(",")
    plan = [
        (regime, step >= warmup)
        for index, regime in enumerate(regimes)
        for warmup in [arguments.warmup if index == 0 else min(1, arguments.warmup)]
        for step in range(warmup + arguments.counted)
    ]
    case = case_of(arguments, arguments.problems * len(plan))
    config = experiment(
        case,
        [
            f"training.problems_per_step={arguments.problems}",
            f"rollout.group_size={arguments.group}",
            f"rollout.max_completion_tokens={arguments.cap}",
            f"training.tokens_per_microbatch={arguments.tokens_per_microbatch}",
            "rollout.gpu_memory_utilization=0.35",
            *arguments.set,
        ],
    )
    started = time.perf_counter()
    worker = lone_worker(case, config, device)
    workers = WorkerGroup(LocalRanks(worker), config)
    recorder = Recorder(case.flops(worker.policy.model.hf), plan, cap=arguments.cap, mean=arguments.mean)
    run = TrainingRun(
        config=config,
        problems=case.problems,
        workers=workers,
        grader=CrcGrader(case.reward),
        sink=recorder,
        on_batch=recorder.count,
    )
    state = TrainState()
    workers.sync_weights(0)
    start = time.perf_counter() - started
    bias = arguments.eos_bias
    for regime, counted in plan:
        sampler = worker.sampler
        sampler._params["ignore_eos"] = regime == "fixed"  # no experiment has settings for these two
        if regime == "ragged":
            bias = hazard_bias(arguments.mean, arguments.cap, case) if bias is None else bias
            sampler._params["logit_bias"] = {**(sampler._params["logit_bias"] or {}), EOS: bias}
        state = train(run, state, until_step=state.step + 1, should_stop=lambda: False)
        if regime == "ragged" and not counted and arguments.eos_bias is None:
            bias += recorder.correction()
    result = {
        "side": "ours",
        "start": start,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "eos_bias": bias,
        "config": config.flat(),
        "regimes": {
            regime: summary([r for r in recorder.rows if r["counted"] and r["regime"] == regime]) for regime in regimes
        },
        "steps": recorder.rows,
    }
    write(arguments.out, result)


def case_of(arguments: argparse.Namespace, problems: int) -> Any:
    from tests.bench.peer import prepared_case, text_case, vl_case

    shared = {"tiny": arguments.tiny}
    if arguments.dataset:
        return prepared_case(arguments.peer, arguments.folder, arguments.dataset, size=arguments.size, **shared)
    shared |= {"problems": problems, "prompt_tokens": arguments.prompt_tokens}
    if arguments.kind == "vl":
        return vl_case(arguments.peer, arguments.folder, side=arguments.side_pixels, size=arguments.size, **shared)
    return text_case(arguments.peer, arguments.folder, **shared)


def lone_worker(case: Any, config: Any, device: str) -> Any:
    from rlcore.distributed.worker import Worker, WorkerSpec

    return Worker(WorkerSpec.alone(case.model, case.dataset, config, device, _free_port()))


class Recorder:
    """A metric sink that keeps one row a step, with the work that was in it."""

    def __init__(self, flops: Any, plan: Sequence[tuple[str, bool]], *, cap: int, mean: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self._flops, self._plan, self._cap, self._mean = flops, plan, cap, mean
        self._tokens: dict[str, int] = {}

    def count(self, step: int, groups: Sequence[Any], trained: Sequence[Any]) -> None:
        prompts = [len(g.prompt_token_ids) for g in groups for _ in g.rollouts]
        answers = [len(r.completion.token_ids) for g in groups for r in g.rollouts]
        self._tokens = {
            "rollouts": len(answers),
            "prompt": sum(prompts),
            "completion": sum(answers),
            "sum_sq": sum((p + c) ** 2 for p, c in zip(prompts, answers, strict=True)),
        }

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        regime, counted = self._plan[len(self.rows)]
        seconds, tokens = metrics["time/step"], self._tokens
        real = tokens["prompt"] + tokens["completion"]
        row = {"step": step, "regime": regime, "counted": counted, "seconds": seconds}
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
            "grad_norm": metrics["optim/grad_norm"],
        }
        self.rows.append({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
        sys.stdout.write(json.dumps(self.rows[-1]) + "\n")
        sys.stdout.flush()

    def correction(self) -> float:
        """What to add to the EOS bias for the mean length that is wanted, from the one that the last step had."""
        found = min(self._tokens["completion"] / self._tokens["rollouts"], 0.99 * self._cap)
        return math.log(stop_chance(self._mean, self._cap) / stop_chance(found, self._cap))


def stop_chance(mean: float, cap: int) -> float:
    """The chance p to stop at each token with which lengths, cut at the cap, have this mean: (1 - (1 - p)^cap) / p."""
    low, high = 1e-9, 0.5
    for _ in range(100):
        p = math.sqrt(low * high)
        low, high = (p, high) if (1 - (1 - p) ** cap) / p > mean else (low, p)
    return p


def hazard_bias(mean: float, cap: int, case: Any) -> float:
    """A first EOS bias, as if all tokens were equally likely."""
    size = json.loads((case.model / "config.json").read_text())
    vocabulary = size.get("vocab_size") or size["text_config"]["vocab_size"]
    return math.log(stop_chance(mean, cap) * vocabulary)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
