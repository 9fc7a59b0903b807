"""Write the tables of measured figures into docs/: ``python -m tests.bench.tables``.

Every figure is read from ``accepted/*.json``. The pages hold the tables between two comments.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.bench.accepted import record
from tests.bench.measured import performance
from tests.bench.rows import percent

DOCS = Path(__file__).parents[2] / "docs"

FILES = {
    "update-h200": "update by variant",
    "step-text-h200": "whole steps of ours and of TRL, text",
    "step-vl-h200": "whole steps of ours and of TRL, VL-3B",
    "step-geometry3k-h200": "whole steps on real problems and pictures, VL-3B",
    "step-geometry3k-7b-h200": "the same, VL-7B, 90 x 5",
    "memory-h200": "whole steps on a smaller device",
    "placement-h200x4": "steps by placement of four GPUs, and of one",
    "placement-pinned-h200x4": "the same with the pinned versions, colocated and 2 + 2",
    "placement-quiet-h200x4": "the same on a host without other work, one GPU and four",
    "placement-long-tail-h200x2": "steps with a long tail of lengths, one GPU trains and one samples",
    "placement-long-tail-h200x3": "the same, two sample",
    "growth-h200": "steps by cap and by group size",
    "step-cpu": "whole steps of ours and of TRL on a CPU",
    "rollout-text-h200": "sampling, weight sync, sleep and wake, text",
    "rollout-vl-h200": "the same, VL-3B",
    "verl-text-h200": "whole steps of ours and of verl, text, fixed",
    "verl-text-ragged-h200": "the same, ragged",
    "verl-vl-h200": "whole steps of ours and of verl, VL-3B, fixed",
    "verl-vl-ragged-h200": "the same, ragged",
    "flow-text-1.5b-h200": "a whole flow with one kill, by stage, text",
    "flow-vl-3b-h200": "the same, VL-3B with LoRA",
    "flow-vl-7b-h100": "the same, VL-7B with LoRA",
    "flow-vl-7b-full-h200x4": "the same, VL-7B with all weights on four GPUs",
    "long-rows-h200": "steps with rows of 32,256 tokens, on one GPU, shared by two and by four",
    "rollout-vl-h100": "sampling of VL-3B on an H100",
    "recipe-vl-7b-h200x4": "VL-7B in its own recipe on four GPUs",
    "large-vl-32b-h200x2": "VL-32B with LoRA on two GPUs, by stage",
    "large-vl-32b-h200x4": "the same on four",
    "large-vl-32b-full-h200x4": "VL-32B, all weights on four GPUs, by stage",
    "large-vl-72b-h200x4": "VL-72B with LoRA on four GPUs, by stage",
    "large-text-7b-h200": "text 7B, all weights, with KL on one GPU, by stage",
    "exact-h100": "steps with and without `rollout.exact`",
    "fp8-h100": "sampling of a 7B shape with and without `rollout.quantization=fp8`",
    "newer-h200": "updates of Qwen3-VL-4B, of Qwen3-30B-A3B with 6 layers and of Qwen2.5-VL-3B",
    "first-step-h200": "first and later steps by caches, versions and compilation of the engine",
    "warm-up-h200": "starts by what vLLM warms up",
    "sequential": "simulated comparisons of two policies ([evaluation](evaluation.md))",
}


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured() -> str:
    head = ("measure", "the peer, or what ours is compared with", "ours", "to reach", "")
    return markdown(head, [(r.measure, r.other, r.ours, r.goal, r.verdict) for r in performance()])


def files() -> str:
    return markdown(("file", "what"), [(f"`accepted/{name}.json`", what) for name, what in FILES.items()])


_FLOWS = {
    "text-1.5b, H200": "flow-text-1.5b-h200",
    "vl-3b, LoRA, H200": "flow-vl-3b-h200",
    "vl-7b, LoRA, H100": "flow-vl-7b-h100",
    "vl-7b, four H200s": "flow-vl-7b-full-h200x4",
}


def flow() -> str:
    """What the trainers of whole flows needed to start, then the stages of each flow."""
    from tests.stages import MeasuredStage, table

    flows = {name: record(file) for name, file in _FLOWS.items()}
    names = dict.fromkeys(name for made in flows.values() for name in made["seconds"])
    seconds = [(name, *(_seconds(made["seconds"].get(name)) for made in flows.values())) for name in names]
    stages = [
        f"{name} ({made['measured'].partition(';')[0]}):\n\n"
        + table([MeasuredStage(**stage) for stage in made["stages"] if stage["seconds"] >= 0.1])
        for name, made in flows.items()
    ]
    return "\n\n".join([markdown(("of the trainer", *flows), seconds), *stages])


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def warm_up() -> str:
    """Starts of one worker by what vLLM warms up."""
    runs = record("warm-up-h200")["runs"]
    stages = list(next(iter(runs.values())))
    rows = [
        (name, *(_seconds(seconds[stage]) for stage in stages), _seconds(sum(seconds.values())))
        for name, seconds in runs.items()
    ]
    return markdown(("vLLM warms up", *stages, "together"), rows)


def starts() -> str:
    """Fixed-length steps of runs that started with and without compiled code."""
    rows = []
    for name, steps in record("first-step-h200")["runs"].items():
        first, *later = (step for step in steps if step["regime"] == "fixed")
        updates, samplings = ([step[phase] for step in later] for phase in ("update", "generate"))
        rows.append(
            (
                name,
                f"{first['update']:.1f} s",
                f"{statistics.median(updates):.2f} s, {percent(later[0]['update_mfu_shared_once'])} MFU",
                f"{statistics.median(samplings):.2f} s",
                str(len(later)),
            )
        )
    return markdown(("run", "first update", "later update", "later sampling", "later steps"), rows)


def estimates() -> str:
    from tests.bench.estimates import table  # imports torch

    return table()


def sequential_errors() -> str:
    rows = [
        [item["case"], *(percent(item[key]) for key in ("sequential", "t_test_once", "t_test_often"))]
        for item in record("sequential")["nulls"]
    ]
    return markdown(("equally good policies", "sequential test", "t test, one look", "t test, a look every 10"), rows)


def sequential_power() -> str:
    result = record("sequential")
    most = result["problems"]
    rows = [
        [
            item["case"],
            f"{item['difference']:+.3f}",
            *(str(n) if n <= most else f"above {most}" for n in item["sequential"].values()),
            str(item["needed_by_t_test"]),
            percent(item["decided"]),
            percent(item["t_test_at_end"]),
        ]
        for item in result["gains"]
    ]
    head = (
        *("a better policy", "difference", "sequential: half decided after", "80 % decided after"),
        *("t test, one look: 80 % decided with", f"sequential: decided of {most}", f"t test at {most}"),
    )
    return markdown(head, rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "measured": measured,
    "flow": flow,
    "starts": starts,
    "warm_up": warm_up,
    "files": files,
    "estimates": estimates,
    "sequential_errors": sequential_errors,
    "sequential_power": sequential_power,
}
PAGES = (DOCS / "performance.md", DOCS / "cost.md", DOCS / "evaluation.md")
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of the table -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """The text of a page with its tables as the records make them."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the pages")
    folder = parser.parse_args().docs
    for page in PAGES:
        path = folder / page.name
        path.write_text(with_tables(path.read_text()))
