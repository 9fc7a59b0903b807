"""How a step grows with what it works on: ``python -m tests.bench.growth [--tiny] --out FILE``.

Whole steps of ours on one device, every completion at its cap: over caps at one group size, then over group sizes at
one cap, in one process and with one engine, which is made for the greatest of them. Work is a step's real tokens. A
power of them is fitted to the seconds: 1 is linear. Attention among a sequence's own tokens grows with their square, so
caps may come out above it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.bench.cases import common_arguments, random_case, shape_of, write
from tests.bench.step import Steps, config_of, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("text", "vl"), default="text")
    parser.add_argument("--caps", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--groups", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, help="default: 256, or 431 with a picture")
    parser.add_argument("--tokens-per-microbatch", type=int, default=32768)
    parser.add_argument("--warmup", type=int, default=1, help="uncounted steps of each point")
    parser.add_argument("--counted", type=int, default=2)
    common_arguments(parser, "/tmp/growth-bench")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.caps, arguments.groups, arguments.problems = [16, 32], [2, 4], 2
    arguments.folder.mkdir(parents=True, exist_ok=True)
    grow(arguments)


def grow(arguments: argparse.Namespace) -> None:
    usual = {"cap": arguments.caps[1], "group": arguments.groups[1]}
    points = [{**usual, "cap": cap} for cap in arguments.caps] + [{**usual, "group": g} for g in arguments.groups]
    each, shape = arguments.warmup + arguments.counted, shape_of(arguments.kind, arguments.tiny)
    case = random_case(
        arguments.kind,
        arguments.folder,
        problems=arguments.problems * len(points) * each,
        prompt_tokens=arguments.prompt_tokens or shape.prompt,
        side=shape.side,
        tiny=arguments.tiny,
    )

    def config(point: dict[str, int]) -> Any:
        return config_of(case, argparse.Namespace(**vars(arguments), **point))

    greatest = {"cap": max(arguments.caps), "group": max(arguments.groups)}
    steps, found = Steps(case, config(greatest), shape.side), []
    steps.sample_with("fixed", 0.0)
    for point in points:
        steps.use(config(point))
        rows = [steps.run("fixed", counted=step >= arguments.warmup) for step in range(each)]
        found.append({**point, **summary([row for row in rows if row["counted"]])})
    caps, groups = found[: len(arguments.caps)], found[len(arguments.caps) :]
    powers = {"by cap": power(caps), "by group size": power(groups)}
    write(arguments.out, {"device": steps.device, "power": powers, "by cap": caps, "by group size": groups})


def power(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By phase, the slope of log seconds over log real tokens."""
    tokens = [row["prompt"]["median"] + row["completion"]["median"] for row in rows]
    phases = ("seconds", "generate", "update")
    return {p: float(np.polyfit(np.log(tokens), np.log([row[p]["median"] for row in rows]), 1)[0]) for p in phases}


if __name__ == "__main__":
    main()
