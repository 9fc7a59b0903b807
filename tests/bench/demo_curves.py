"""Draw the learning curves of several runs of the demo.

``python -m tests.bench.demo_curves OUT.png RUN_DIR [RUN_DIR ...]``: training accuracy per step (running mean), and
held-out accuracy before and after with its 95 % interval, as each run's report has it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from rlcore.segment.journal import read_journal

WINDOW = 10  # steps of the running mean


def main(out: Path, runs: list[Path]) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for run in runs:
        records = read_journal(run / "journal.jsonl")
        steps = np.array([record.step for record in records])
        accuracy = np.array([record.metrics["reward/accuracy"] for record in records])
        smooth = np.convolve(accuracy, np.ones(WINDOW) / WINDOW, mode="valid")
        seed = json.loads((run / "spec.json").read_text())["experiment"]["seed"]
        (line,) = axes.plot(steps[WINDOW - 1 :], smooth, label=f"seed {seed}, training (mean of {WINDOW} steps)")
        for report in held_out(run):
            low, high = report["accuracy_low"], report["accuracy_high"]
            axes.errorbar(
                report["step"],
                report["accuracy"],
                yerr=[[report["accuracy"] - low], [high - report["accuracy"]]],
                fmt="o",
                capsize=3,
                color=line.get_color(),
            )
    axes.axhline(0.5, color="0.8", linewidth=0.8)
    axes.axhline(0.8, color="0.8", linewidth=0.8)
    axes.set(xlabel="optimizer step", ylabel="accuracy (temperature 1)", ylim=(0, 1))
    axes.set_title("make demo: training accuracy; dots: held-out pictures with 95 % interval", fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(out, dpi=130)


def held_out(run: Path) -> list[dict[str, float]]:
    """The evaluations that the run's report was made of."""
    reports: list[dict[str, float]] = json.loads((run / "report" / "evaluations.json").read_text())
    return reports


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
