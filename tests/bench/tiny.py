"""How the tests run each program of this folder: with tiny models, on a CPU, to its end.

What a program measures on a CPU that has other work means nothing, so only its form is checked.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Program:
    words: tuple[str, ...]  # OUT in them is a folder of the test
    positive: tuple[str, ...] = ()  # figures of what it prints: each is there, finite and above 0
    signed: str = ""  # a key below which figures may have any sign
    long: bool = True  # its test is in tests/long; else in tests/unit


GUARDED = ("step", "update", "rollout")
"""Programs that the guard runs, each for text and pictures, so that no test starts them once more."""

PROGRAMS: Mapping[str, Program] = {
    "algorithms": Program(("--tiny", "--out", "OUT")),
    "checkpoints": Program(("--tiny",), ("ratio", "step_median", "mib")),
    "cpu": Program(("--tiny", "--side", "ours", "--folder", "OUT"), ("seconds", "tokens_per_s", "generate", "update")),
    "datasets": Program(("--tiny",), ("problems", "images", "prepare", "resize")),
    "demo_curves": Program(("OUT/curves.png", "OUT/run"), long=False),
    "grading": Program(("--tiny",), ("seconds", "right_share", "gradings")),
    "growth": Program(
        ("--tiny", "--counted", "1", "--folder", "OUT"), ("seconds", "generate", "update", "prompt"), signed="power"
    ),
    "guard": Program(("--tiny", "--folder", "OUT")),
    "large": Program(("--tiny", "--workers", "1", "--folder", "OUT"), ("seconds", "machine_gib")),
    "loading": Program((), ("policy_gib", "reference_gib", "device_gib", "host_gib"), long=False),
    "models": Program(("--tiny", "--out", "OUT/models.md")),
    "placement": Program(
        ("--tiny", "--only", "apart, one step off", "--folder", "OUT"), ("step", "update", "tokens_per_s")
    ),
    "plots": Program(("--folder", "OUT"), long=False),
    "sequential": Program(("--tiny",), ("difference", "needed_by_t_test"), long=False),
    "tables": Program(("--docs", "OUT"), long=False),
}


def run(name: str, out: Path) -> str:
    """What the program prints. ``out`` is its folder."""
    words = [word.replace("OUT", str(out)) for word in PROGRAMS[name].words]
    command = [sys.executable, "-m", f"tests.bench.{name}", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def last_json(printed: str) -> Any:
    """The object that a program prints at its end, on one line or on many."""
    start = printed.rfind("\n{", 0, printed.rstrip().rfind("\n}") if printed.rstrip().endswith("\n}") else None) + 1
    return json.loads(printed[start:])


def check_figures(name: str, result: Any) -> None:
    for key in PROGRAMS[name].positive:
        values = list(_numbers(result, key, PROGRAMS[name].signed))
        assert values, f"{name} tells no {key}"
        assert all(math.isfinite(value) and value > 0 for value in values), f"{name}: {key} is {values}"


def _numbers(value: Any, key: str, signed: str) -> Iterator[float]:
    """All numbers below a key, wherever it is, but for those below the key ``signed``."""
    match value:
        case dict():
            for name, item in value.items():
                if name != signed:
                    yield from _leaves(item) if name == key else _numbers(item, key, signed)
        case list():
            for item in value:
                yield from _numbers(item, key, signed)


def _leaves(value: Any) -> Iterator[float]:
    match value:
        case dict():
            for item in value.values():
                yield from _leaves(item)
        case list():
            for item in value:
                yield from _leaves(item)
        case bool():
            pass
        case int() | float():
            yield value
