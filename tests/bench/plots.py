"""Draw docs/img/performance_*.png from the accepted figures: ``python -m tests.bench.plots``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tests.bench.accepted import record

IMAGES = Path(__file__).parents[2] / "docs" / "img"
PHASES = {"generate": "#4c78a8", "log-probs": "#9ecae9", "update": "#f58518", "sync and the rest": "#bab0ac"}
OURS, PEER, TARGET = "#f58518", "#9d9d9d", "#222222"


def median(value: Any) -> float:
    return float(value["median"] if isinstance(value, dict) else value)


def steps(path: Path) -> None:
    """Whole steps of TRL, verl and ours, by phase."""
    trl = {kind: record(f"step-{kind}-h200")["regimes"] for kind in ("text", "vl")}
    verl = {
        "text": record("verl-text-h200")["regimes"] | record("verl-text-ragged-h200")["regimes"],
        "vl": record("verl-vl-h200")["regimes"] | record("verl-vl-ragged-h200")["regimes"],
    }
    rows = []
    for kind, regime, label in (
        ("text", "fixed", "text fixed"),
        ("text", "ragged", "text ragged"),
        ("vl", "fixed", "VL-3B fixed"),
        ("vl", "ragged", "VL-3B ragged"),
    ):
        if regime in trl[kind]:
            rows.append((f"TRL 1.16, {label}", trl[kind][regime]["peer"]))
        rows.append((f"verl 0.9.1, {label}", verl[kind][regime]["verl"]))
        rows.append(("rlflow", verl[kind][regime]["ours"]))
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for place, (_, found) in enumerate(rows):
        seconds, left = median(found["seconds"]), 0.0
        logprobs = sum(median(found.get(name, 0.0)) for name in ("logps", "old_log_prob", "old_logprobs"))
        sampling, update = (
            median(next(found[name] for name in names if name in found))
            for names in (("generate", "gen"), ("update", "update_actor"))
        )
        phases = [sampling, logprobs, update]
        for (name, color), part in zip(PHASES.items(), [*phases, seconds - sum(phases)], strict=True):
            axes.barh(place, part, left=left, color=color, label=name if place == 0 else None)
            left += part
        axes.text(left + 0.5, place, f"{seconds:.1f} s, {median(found['tokens_per_s']):,.0f} tokens/s", va="center")
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    longest = max(median(found["seconds"]) for _, found in rows)
    axes.set(xlabel="seconds", xlim=(0, 1.4 * longest))  # the rest is for the labels
    axes.set_title("one GRPO step, 32 x 8, on one H200", fontsize=10)
    axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12), frameon=False)
    figure.savefig(path, dpi=130)


def update(path: Path) -> None:
    """The update's MFU by variant, with what is to be reached."""
    ours = record("update-h200")["results"]
    trl = {kind: record(f"step-{kind}-h200")["regimes"] for kind in ("text", "vl")}
    panels_of = {
        "text": ("1.5B text", 0.5, ("kept", "compiled")),
        "vl": ("VL-3B", 0.47, ("kept", "frozen", "offload")),
        "text-7b": ("7B text", 0.56, ("kept_bf16", "selective_bf16")),
    }
    bars = {
        kind: [
            (f"TRL\n{regime}", median(sides["peer"]["update_mfu"]), PEER) for regime, sides in trl.get(kind, {}).items()
        ]
        + [
            (f"{variant.replace('_', chr(10))}\n{regime}", ours[kind][variant][regime]["mfu"], OURS)
            for variant in variants
            for regime in ("fixed", "ragged")
            if regime in ours[kind][variant]
        ]
        for kind, (_, _, variants) in panels_of.items()
    }
    figure, panels = plt.subplots(
        1, 3, figsize=(11, 3.4), layout="constrained", sharey=True, width_ratios=[len(bars[kind]) for kind in bars]
    )
    for axes, (kind, (title, goal, _)) in zip(panels, panels_of.items(), strict=True):
        names, values, colors = zip(*bars[kind], strict=True)
        axes.bar(range(len(names)), [100 * value for value in values], color=colors)
        for place, value in enumerate(values):
            axes.text(place, 100 * value - 4, f"{100 * value:.1f}", ha="center", fontsize=8, color="white")
        axes.set_xticks(range(len(names)), names, fontsize=7)
        axes.axhline(100 * goal, color=TARGET, linewidth=0.8, linestyle="--")
        axes.text(len(names) - 0.5, 100 * goal + 0.5, "to reach", ha="right", fontsize=8)
        axes.set_title(title, fontsize=10)
    panels[0].set(ylabel="update MFU, %", ylim=(0, 62))
    figure.savefig(path, dpi=130)


def generation(path: Path) -> None:
    """Tokens per second of the sampler, and a weight sync."""
    rollout = {kind: record(f"rollout-{kind}-h200") for kind in ("text", "vl")}
    trl = {kind: record(f"step-{kind}-h200")["regimes"]["fixed"]["peer"] for kind in rollout}
    text = rollout["text"]
    bars = [
        ("TRL\n256 seq.", median(trl["text"]["generate_tokens_per_s"]), PEER),
        ("vLLM's\nown loop", text["vllm_own_loop"]["tokens_per_s"], PEER),
        *((f"{run['steps_per_call']} steps\na call", run["tokens_per_s"], OURS) for run in text["by_steps_per_call"]),
    ]
    figure, (speed, sync) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    speed.bar([name for name, _, _ in bars], [value / 1e3 for _, value, _ in bars], color=[c for _, _, c in bars])
    for place, (_, value, _) in enumerate(bars):
        speed.text(place, value / 1e3 - 5, f"{value / 1e3:.1f}", ha="center", fontsize=8, color="white")
    speed.axhline(100, color=TARGET, linewidth=0.8, linestyle="--")
    speed.text(-0.4, 101, "to reach", fontsize=8)
    speed.set(ylabel="thousand tokens/s", ylim=(0, 112))
    speed.set_title("sampling, 1.5B, 1,024 x (256 + 512)", fontsize=10)
    times = [
        bar
        for kind, label in (("text", "text"), ("vl", "VL-3B"))
        for bar in (
            (f"TRL\n{label}", median(trl[kind]["sync_weights"]), PEER),
            (f"rlflow\n{label}", rollout[kind]["sync"]["median"], OURS),
        )
    ]
    sync.bar([name for name, _, _ in times], [1e3 * value for _, value, _ in times], color=[c for _, _, c in times])
    for place, (_, value, _) in enumerate(times):
        sync.text(place, 1e3 * value + 10, f"{1e3 * value:,.0f}", ha="center", fontsize=8)
    sync.set(ylabel="milliseconds")
    sync.set_title("weight sync", fontsize=10)
    figure.savefig(path, dpi=130)


def several(path: Path) -> None:
    """A step by placement of four GPUs, with the share that a GPU of each role is idle; a step by the response cap and
    by the group size."""
    found, growth = record("placement-h200x4"), record("growth-h200")
    figure, (placed, by_cap, by_group) = plt.subplots(1, 3, figsize=(13, 3.2), layout="constrained")
    roles = {"colocated": "4 of both", "apart": "3 train, 1 samples", "apart, one step off": "the same, one step off"}
    for place, name in enumerate(roles):
        result = found["placements"][name]
        idle, seconds = result["idle share by rank"], result["seconds"]["step"]
        shares = [idle[0]] if name == "colocated" else [idle[0], idle[-1]]
        text = f"{seconds:.1f} s; idle {', '.join(f'{100 * share:.0f} %' for share in shares)}"
        placed.barh(place, seconds, color=OURS if name == "colocated" else PEER)
        placed.text(seconds + 0.2, place, text, va="center")
    placed.set_yticks(range(len(roles)), list(roles.values()))
    placed.invert_yaxis()
    placed.set(xlabel="seconds a step", xlim=(0, 26))
    placed.set_title("four H200s, 1.5B text, 60 x 8 x (256 + 1,024)", fontsize=10)
    grown(by_cap, growth["by cap"], "cap", "response cap, tokens")
    by_cap.set_title("one H200, 8 x 8, all at the cap", fontsize=10)
    grown(by_group, growth["by group size"], "group", "completions of a problem")
    by_group.set_title("one H200, 8 problems, 1,024 tokens", fontsize=10)
    figure.savefig(path, dpi=130)


def grown(axes: Any, rows: list[dict[str, Any]], by: str, label: str) -> None:
    """Seconds of a step and of its phases over what grows, beside a line of slope 1 through the first."""
    places = [row[by] for row in rows]
    for phase, color in (("seconds", TARGET), ("generate", "#4c78a8"), ("update", OURS)):
        name = "step" if phase == "seconds" else phase
        axes.loglog(places, [row[phase] for row in rows], "o-", color=color, label=name)
    linear = [rows[0]["seconds"] * place / places[0] for place in places]
    axes.loglog(places, linear, linestyle="--", color=PEER, label="linear")
    axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    axes.set(xlabel=label, ylabel="seconds")
    axes.legend(fontsize=8, frameon=False)


PLOTS = {"step": steps, "update": update, "generation": generation, "several": several}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=IMAGES)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PLOTS.items():
        draw(folder / f"performance_{name}.png")
