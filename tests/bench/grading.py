"""How long grading takes: ``python -m tests.bench.grading [--tiny]`` prints one JSON object.

10,000 completions (with ``--tiny`` 80) go through the reward ``math`` in two processes, in groups of 8 for each
problem, as a training step has them. The problems are the kinds of answers that MATH and Geometry3K have, with numbers
drawn anew for each, so no two problems share an answer by design; within a group some completions give the same answer,
and those are cache hits if they reach the same process. One completion hangs sympy (``HANGS``); it may cost its
deadline and no more, which is measured as the difference of two runs, with it and without it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time

import numpy as np

from rlcore.config.reward import MathReward
from rlcore.rewards import make_reward
from rlcore.rewards.pool import GradingPool
from rlcore.types import Completion, Problem

GRADINGS = 10_000
GROUP = 8
PROCESSES = 2
DEADLINE_SECONDS = 5.0
TARGET_SECONDS = 20.0

HANGS = "9**(9**9*(sqrt(2)+1)*(sqrt(2)-1))"  # small until sympy simplifies it: the two brackets are 1

# truth, other ways to write it, wrong answers; A, B, C and D become numbers from 2 to 97
KINDS = (
    ("A", ("A", "A.0", r"A^\circ", r"A\text{ cm}"), ("B", "A.5", "-A", r"\frac{A}{B}")),
    ("A.B", ("A.B", "A.B0", r"A.B\%"), ("B.A", "A", r"\frac{A}{B}")),
    (r"\frac{A}{97}", (r"\frac{A}{97}", r"\dfrac{A}{97}", "A/97"), (r"\frac{B}{97}", "A", "0.A")),
    (r"A \sqrt { 3 }", (r"A\sqrt{3}", r"A\sqrt3"), (r"B\sqrt{3}", r"A\sqrt{2}", "A", "1.7A")),
    (r"\frac { A \sqrt { 5 } } { 2 }", (r"\frac{A\sqrt{5}}{2}",), (r"\frac{B\sqrt{5}}{2}", r"A\sqrt{5}", "A.B")),
    (r"A\pi", (r"A \pi", r"A\cdot\pi"), (r"B\pi", "3.14", "A")),
    ("(A, B)", ("(A,B)", r"\left(A, B\right)"), ("(B, A)", "A", "(A, B, C)")),
    ("x^2+Ax+B", ("B + A x + x^2", "x^2 + Ax + B"), ("x^2+Bx+A", "x^2-Ax+B", "x")),
    (r"A,BBB", ("ABBB", "A,BBB", r"A{,}BBB"), ("ABB", "B,AAA", "A")),
    ("A+Bi", ("A + Bi", "Bi+A"), ("A-Bi", "B+Ai", "A")),
    (r"[A,\infty)", (r"[A, \infty)",), (r"(A,\infty)", r"(-\infty, A]", "A")),
    (r"\text{Evelyn}", (r"\text{Evelyn}", "Evelyn"), (r"\text{Angela}", "A", "Brianna")),
)


def workload(count: int, seed: int = 0) -> tuple[list[Problem], list[Completion]]:
    """That many completions and the problem of each, half of them right."""
    rng = random.Random(seed)
    problems: list[Problem] = []
    completions: list[Completion] = []
    while len(completions) < count:
        truth, right, wrong = rng.choice(KINDS)
        numbers = {letter: str(rng.randint(2, 97)) for letter in "ABCD"}
        problem = Problem(f"bench-{len(problems)}", "?", (), _fill(truth, numbers), "bench")
        for _ in range(GROUP):
            answer = _fill(rng.choice(right if rng.random() < 0.5 else wrong), numbers)
            thought = " ".join(rng.choices(("so", "the", "angle", "is", "2", r"\sqrt{3}", "{x}"), k=200))
            completions.append(_completion(rf"<think>{thought}</think> It is \boxed{{{answer}}}."))
            problems.append(problem)
    return problems[:count], completions[:count]


def _fill(pattern: str, numbers: dict[str, str]) -> str:
    if "text" in pattern or pattern in ("Evelyn", "Brianna"):
        return pattern
    return "".join(numbers.get(character, character) for character in pattern)


def _completion(text: str) -> Completion:
    return Completion.one_turn(np.zeros(256, np.int32), np.zeros(256, np.float32), text, "stop", 0)


def repeated_share(problems: list[Problem], completions: list[Completion]) -> float:
    """Share of the gradings whose (answer, truth) came before: the most that a cache can serve."""
    seen = {(p.answer, c.text.rpartition("</think>")[2]) for p, c in zip(problems, completions, strict=True)}
    return 1 - len(seen) / len(problems)


def measure(problems: list[Problem], completions: list[Completion], deadline: float) -> dict[str, float]:
    """Wall-clock seconds of one run in fresh processes (their start apart), and what came out."""
    start = time.perf_counter()
    with GradingPool(make_reward(MathReward(), max_completion_tokens=256), PROCESSES, deadline) as pool:
        ready = time.perf_counter()
        scores = pool.submit(problems, completions).result()
        seconds = time.perf_counter() - ready
        return {
            "start_seconds": round(ready - start, 2),
            "seconds": round(seconds, 2),
            "right_share": sum(score.parts.get("accuracy", 0) for score in scores) / len(scores),
            "ungraded": sum(not score.graded for score in scores),
            "timeouts": pool.ungraded["timeout"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="few gradings and a short deadline")
    tiny = parser.parse_args().tiny
    count, deadline = (80, 1.0) if tiny else (GRADINGS, DEADLINE_SECONDS)
    problems, completions = workload(count)
    without = measure(problems, completions, deadline)
    hanging = Problem("hang", "?", (), r"21 \sqrt { 3 }", "bench")
    middle = count // 2
    problems[middle], completions[middle] = hanging, _completion(rf"<think>x</think> \boxed{{{HANGS}}}")
    with_hang = measure(problems, completions, deadline)
    report = {
        "gradings": count,
        "processes": PROCESSES,
        "deadline_seconds": deadline,
        "repeated_share": round(repeated_share(problems, completions), 3),
        "without_hang": without,
        "with_hang": with_hang,
        "hang_cost_seconds": round(with_hang["seconds"] - without["seconds"], 2),
        "target_seconds": TARGET_SECONDS,
        "within_target": with_hang["seconds"] <= TARGET_SECONDS,
        "load_average": os.getloadavg()[0],
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
