"""Do the main figures of docs/performance.md still hold? ``make bench``, or ``python -m tests.bench.guard [--tiny]``.

Runs the benchmarks of whole steps, updates and sampling on this machine's GPU and compares ratios with those of the
accepted records: ours against TRL, against vLLM's own loop, or against our own record. Ends with 1 where a ratio is
more than 10 % below the accepted one, was not measured, or where nothing could be compared.

``--peer FOLDER`` names the scripts that run TRL, and TRL then runs by turns with ours. Without it, TRL's side of a
ratio is its record. A ratio with a record is compared only on the device of the record.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.accepted import record
from tests.bench.tables import markdown

TOLERANCE = 0.10
DEVICE = "NVIDIA H200"  # of the records below
TRL, OWN_LOOP, ACCEPTED = "TRL", "vLLM's own loop", "our record"

MAIN_ROWS = {
    "whole step, text, fixed": TRL,
    "whole step, text, ragged, real tokens/s": TRL,
    "whole step, VL-3B, fixed": TRL,
    "update, text, fixed": ACCEPTED,
    "update, text, ragged": ACCEPTED,
    "update, VL-3B, fixed": ACCEPTED,
    "update, VL-3B, ragged": ACCEPTED,
    "sampling, text": OWN_LOOP,
    "sampling, VL-3B": OWN_LOOP,
    "weight sync, text": TRL,
    "weight sync, VL-3B": TRL,
}
"""What ours is compared with, by row."""

_LABELS = {"text": "text", "vl": "VL-3B"}  # of the kinds, in the rows

BENCHMARKS: Mapping[str, tuple[str, ...]] = {
    "step-text": ("step", "--kind", "text", "--warmup", "1", "--eos-bias", "5.89", "--tokens-per-microbatch", "17408"),
    "step-vl": ("step", "--kind", "vl", "--regimes", "fixed", "--warmup", "1", "--tokens-per-microbatch", "9216"),
    "update-text": ("update", "--model", "text", "--variants", "kept", "--problems", "32", "--budget", "17408"),
    "update-vl": ("update", "--model", "vl", "--variants", "kept", "--problems", "32", "--budget", "9216"),
    "rollout-text": ("rollout", "--kind", "text", "--steps-per-call", "32,64"),
    "rollout-vl": ("rollout", "--kind", "vl", "--problems", "32", "--steps-per-call", "32"),
}
_MORE: Mapping[str, tuple[str, ...]] = {
    "step-text": ("--counted", "8", "--set", "model.gradient_checkpointing=none"),
    "step-vl": ("--counted", "8", "--set", "model.gradient_checkpointing=none"),
    "update-text": ("--repeats", "8"),
    "update-vl": ("--repeats", "8"),
    "rollout-text": (),
    "rollout-vl": ("--set", "rollout.gpu_memory_utilization=0.5"),
}
_TINY: Mapping[str, tuple[str, ...]] = {
    "step-text": ("--tiny", "--counted", "1", "--tokens-per-microbatch", "1024"),
    "step-vl": ("--tiny", "--counted", "1", "--tokens-per-microbatch", "1024"),
    "update-text": ("--tiny",),
    "update-vl": ("--tiny",),
    "rollout-text": ("--tiny", "--steps-per-call", "1,4"),
    "rollout-vl": ("--tiny", "--steps-per-call", "4"),
}


# ---- the comparison ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ours by the other's speed, above 1 where ours is faster."""

    value: float
    device: str
    other: str
    recorded: bool  # the other side was not run together with ours


@dataclass(frozen=True, slots=True)
class Verdict:
    row: str
    other: str
    accepted: float
    measured: float | None
    change: float | None
    compared: bool
    failed: bool
    text: str


def judge(accepted: Mapping[str, Ratio], measured: Mapping[str, Ratio]) -> list[Verdict]:
    """One verdict for each accepted row.

    Raises:
        ValueError: a measured row that has no accepted one.
    """
    if unknown := measured.keys() - accepted.keys():
        raise ValueError(f"no accepted ratio for {sorted(unknown)}; there are {sorted(accepted)}")
    return [_judge(row, ratio, measured.get(row)) for row, ratio in accepted.items()]


def _judge(row: str, accepted: Ratio, measured: Ratio | None) -> Verdict:
    if measured is None:
        return Verdict(row, accepted.other, accepted.value, None, None, False, True, "FAILED: not measured")
    if not math.isfinite(measured.value) or measured.value <= 0:
        text = f"FAILED: {measured.value} is no ratio"
        return Verdict(row, measured.other, accepted.value, measured.value, None, False, True, text)
    change = measured.value / accepted.value - 1
    if measured.recorded and measured.device != accepted.device:
        text = f"not compared: the record is of {accepted.device}, this is {measured.device}"
        return Verdict(row, measured.other, accepted.value, measured.value, change, False, False, text)
    failed = round(change, 9) < -TOLERANCE
    text = f"FAILED: more than {TOLERANCE:.0%} below" if failed else "holds"
    if measured.device != accepted.device:
        text += f" (accepted on {accepted.device})"
    return Verdict(row, measured.other, accepted.value, measured.value, change, True, failed, text)


def table(verdicts: Sequence[Verdict]) -> str:
    rows = [
        (
            v.row,
            v.other,
            f"{v.accepted:.2f}",
            "" if v.measured is None else f"{v.measured:.2f}",
            "" if v.change is None else f"{v.change:+.1%}",
            v.text,
        )
        for v in verdicts
    ]
    return markdown(("row", "compared with", "accepted", "measured", "change", "verdict"), rows)


def exit_status(verdicts: Sequence[Verdict], *, tiny: bool) -> int:
    """A tiny run checks the program: nothing of it can be compared."""
    compared = tiny or any(verdict.compared for verdict in verdicts)
    return int(any(verdict.failed for verdict in verdicts) or not compared)


# ---- speeds --------------------------------------------------------------------------------------------------------


def our_speeds(outputs: Mapping[str, Any]) -> dict[str, float]:
    """By main row what grows with speed: steps, syncs or tokens per second.

    Args:
        outputs: what the benchmarks write, by name; a record has the same form.
    """
    found = {}
    for kind, label in _LABELS.items():
        found |= _steps(label, _regimes(outputs[f"step-{kind}"], "ours"))
        update = outputs[f"update-{kind}"]["results"][kind]["kept"]
        found |= {f"update, {label}, {regime}": 1 / update[regime]["seconds"] for regime in ("fixed", "ragged")}
        rollout = outputs[f"rollout-{kind}"]
        found[f"sampling, {label}"] = max(run["tokens_per_s"] for run in rollout["by_steps_per_call"])
        found[f"weight sync, {label}"] = 1 / rollout["sync"]["median"]
    return found


def other_speeds(outputs: Mapping[str, Any]) -> dict[str, float]:
    """The same of what ours was run by turns with."""
    found = {}
    for kind, label in _LABELS.items():
        found[f"sampling, {label}"] = outputs[f"rollout-{kind}"]["vllm_own_loop"]["tokens_per_s"]
        if peer := _regimes(outputs[f"step-{kind}"], "peer"):
            found |= _steps(label, peer)
            found[f"weight sync, {label}"] = 1 / peer["fixed"]["sync_weights"]["median"]
    return found


def _steps(label: str, regimes: Mapping[str, Any]) -> dict[str, float]:
    """Of one side's whole steps. With pictures there are no ragged ones."""
    found = {f"whole step, {label}, fixed": 1 / regimes["fixed"]["seconds"]["median"]}
    if "ragged" in regimes:
        found[f"whole step, {label}, ragged, real tokens/s"] = regimes["ragged"]["tokens_per_s"]["median"]
    return found


def _regimes(output: Mapping[str, Any], side: str) -> dict[str, Any]:
    """Summaries by regime of one side; a run of ours alone has no other."""
    if output.get("side") == "ours":
        return dict(output["regimes"]) if side == "ours" else {}
    return {regime: sides[side] for regime, sides in output["regimes"].items() if side in sides}


def accepted_outputs() -> dict[str, Any]:
    """The records in the form of the benchmarks' outputs."""
    update = record("update-h200")["results"]
    found = {f"{bench}-{kind}": record(f"{bench}-{kind}-h200") for bench in ("step", "rollout") for kind in _LABELS}
    return found | {f"update-{kind}": {"results": {kind: {"kept": update[kind]["kept"]}}} for kind in _LABELS}


def accepted_ratios(run_here: Mapping[str, float]) -> dict[str, Ratio]:
    """Of each main row."""
    ours = our_speeds(accepted_outputs())
    others = recorded_others()
    return {row: Ratio(ours[row] / others[row], DEVICE, MAIN_ROWS[row], row not in run_here) for row in MAIN_ROWS}


def recorded_others() -> dict[str, float]:
    """By main row what ours is compared with: the other side's record, or our own."""
    outputs = accepted_outputs()
    return our_speeds(outputs) | other_speeds(outputs)


def measured_ratios(outputs: Mapping[str, Any], device: str, *, tiny: bool = False) -> dict[str, Ratio]:
    """Against what was run here, else against the record. Nothing of a tiny run is compared."""
    ours, run_here, recorded = our_speeds(outputs), other_speeds(outputs), recorded_others()
    found = {}
    for row, other in MAIN_ROWS.items():
        here = row in run_here
        label = f"{other}, run here" if here else f"{other}, accepted on {DEVICE}"
        found[row] = Ratio(ours[row] / (run_here[row] if here else recorded[row]), device, label, tiny or not here)
    return found


# ---- the run -------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=Path, help="folder of the scripts that run TRL")
    parser.add_argument("--folder", type=Path, default=Path("data/bench"), help="outputs and logs of the benchmarks")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models on a CPU: checks the program, compares nothing"
    )
    arguments = parser.parse_args()
    device = "tiny models" if arguments.tiny else gpu_name()
    if device is None:
        sys.stderr.write(
            f"make bench needs an NVIDIA GPU with the memory of an {DEVICE.removeprefix('NVIDIA ')}, for the accepted "
            "figures are of one; torch finds no CUDA device here. To check the program on a CPU: "
            ".venv/bin/python -m tests.bench.guard --tiny\n"
        )
        return 2
    arguments.folder.mkdir(parents=True, exist_ok=True)
    outputs = {name: run(name, arguments) for name in BENCHMARKS}
    measured = measured_ratios(outputs, device, tiny=arguments.tiny)
    verdicts = judge(accepted_ratios(other_speeds(outputs)), measured)
    sys.stdout.write(f"{table(verdicts)}\n\noutputs and logs: {arguments.folder}\n")
    return exit_status(verdicts, tiny=arguments.tiny)


def gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def run(name: str, arguments: argparse.Namespace) -> Any:
    """One benchmark in a process of its own; what it writes.

    Raises:
        SystemExit: it failed; the message names its log.
    """
    module, *words = BENCHMARKS[name]
    words += _TINY[name] if arguments.tiny else _MORE[name]
    if module == "step" and arguments.peer is not None:
        words += ["--peer", str(arguments.peer)]
    if module != "update":
        words += ["--folder", str(arguments.folder / "models")]
    out, log = (arguments.folder / f"{name}.{suffix}" for suffix in ("json", "log"))
    out.unlink(missing_ok=True)
    sys.stderr.write(f"{name}: python -m tests.bench.{module} {' '.join(words)}\n")
    with log.open("w") as lines:
        command = [sys.executable, "-m", f"tests.bench.{module}", *words, "--out", str(out)]
        if subprocess.run(command, stdout=lines, stderr=lines, check=False).returncode:
            raise SystemExit(f"{name} failed; the end of {log}:\n{log.read_text()[-2000:]}")
    return json.loads(out.read_text())


if __name__ == "__main__":
    sys.exit(main())
