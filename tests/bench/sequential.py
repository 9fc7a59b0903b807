"""How often the sequential test errs and how many problems it needs: ``python -m tests.bench.sequential [--tiny]``.

Simulates comparisons of two policies and prints a record for ``accepted/sequential.json``. Beside it, a paired t test
looks at a fixed number of problems, or, wrongly, after every tenth one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import stats

from rlcore.evaluation.sequential import log_capital

Values = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, int, int], Values]
ALPHA = 0.05
_CHUNK = 500  # experiments at a time
_EVERY = 10  # problems between two looks of the t test


def pairs(better: float, worse: float) -> Draw:
    """One sample per problem: the shares of problems that only one of the two policies gets right."""

    def draw(generator: np.random.Generator, experiments: int, problems: int) -> Values:
        u = generator.random((experiments, problems))
        return (u < better).astype(np.float64) - (u > 1 - worse)

    return draw


def shares(samples: int, gain: float) -> Draw:
    """Several samples per problem. The chance of a right answer is uniform over problems and common to both policies;
    a gain moves that of the one by ``gain`` towards 1."""

    def draw(generator: np.random.Generator, experiments: int, problems: int) -> Values:
        chance = generator.random((experiments, problems))
        after = generator.binomial(samples, chance + gain * (1 - chance))
        return (after - generator.binomial(samples, chance)) / samples

    return draw


def skewed(chance: float, sign: float) -> Draw:
    """Mean 0: a difference of ``sign`` on a share ``chance`` of the problems, a small one against it on the rest."""

    def draw(generator: np.random.Generator, experiments: int, problems: int) -> Values:
        rare = generator.random((experiments, problems)) < chance
        return sign * np.where(rare, 1.0, -chance / (1 - chance))

    return draw


NULLS: Mapping[str, Draw] = {
    "1 sample, 50 % of problems differ": pairs(0.25, 0.25),
    "1 sample, 10 % of problems differ": pairs(0.05, 0.05),
    "4 samples": shares(4, 0.0),
    "rare gains": skewed(0.05, 1.0),
    "rare losses": skewed(0.05, -1.0),
}
"""Two policies that are equally good."""

GAINS: Mapping[str, Draw] = {
    "1 sample, 6 % better, 4 % worse": pairs(0.06, 0.04),
    "1 sample, 10 % better, 5 % worse": pairs(0.10, 0.05),
    "1 sample, 20 % better, 10 % worse": pairs(0.20, 0.10),
    "1 sample, 30 % better, 10 % worse": pairs(0.30, 0.10),
    "4 samples, 5 points better": shares(4, 0.10),
}
"""One policy is better."""


def decisions(differences: Values, alpha: float = ALPHA) -> npt.NDArray[np.int64]:
    """Of each experiment (a row of [experiments, problems]) after how many problems it is decided, in either direction;
    0: never."""
    after = []
    for start in range(0, len(differences), _CHUNK):
        logs = log_capital(differences[start : start + _CHUNK])
        hits = np.maximum(*logs) >= np.log(2 / alpha)
        after.append(np.where(hits.any(axis=1), hits.argmax(axis=1) + 1, 0))
    return np.concatenate(after)


def t_test_errs(differences: Values, alpha: float = ALPHA) -> tuple[float, float]:
    """Share of experiments that a paired t test calls different: at the end, and at any look after every tenth."""
    experiments, problems = differences.shape
    counts = np.arange(1, problems + 1)
    sums, squares = np.cumsum(differences, axis=1), np.cumsum(differences**2, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        means = sums / counts
        errors = np.sqrt((squares / counts - means**2) / (counts - 1))
        hits = np.abs(means) > errors * stats.t.ppf(1 - alpha / 2, counts - 1)
    looks = hits[:, 2 * _EVERY - 1 :: _EVERY]
    return float(hits[:, -1].mean()), float(looks.any(axis=1).mean())


def needed_by_t_test(differences: Values, power: float = 0.8, alpha: float = ALPHA) -> int:
    """Problems that a paired test with one look needs for this power, by the normal approximation."""
    effect = differences.mean() / differences.std()
    return int(np.ceil(((stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(power)) / effect) ** 2))


def measure(experiments: int, problems: int) -> dict[str, object]:
    nulls, gains = [], []
    for name, draw in NULLS.items():
        values = draw(np.random.default_rng(0), experiments, problems)
        once, often = t_test_errs(values)
        wrong = float((decisions(values) > 0).mean())
        nulls.append({"case": name, "sequential": wrong, "t_test_once": once, "t_test_often": often})
    for name, draw in GAINS.items():
        values = draw(np.random.default_rng(1), experiments, problems)
        after = decisions(values)
        decided = np.where(after > 0, after, problems + 1)
        quantiles = {f"p{level}": int(np.quantile(decided, level / 100, method="higher")) for level in (50, 80)}
        gains.append(
            {
                "case": name,
                "difference": float(values.mean()),
                "needed_by_t_test": needed_by_t_test(values),
                "sequential": quantiles,
                "decided": float((after > 0).mean()),
                "t_test_at_end": t_test_errs(values)[0],
            }
        )
    return {"experiments": experiments, "problems": problems, "alpha": ALPHA, "nulls": nulls, "gains": gains}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="few experiments, to see that it runs")
    parser.add_argument("--out", type=Path, help="also write the record to this file")
    arguments = parser.parse_args()
    result = json.dumps(measure(*((200, 100) if arguments.tiny else (10_000, 1000))), indent=1)
    if arguments.out is not None:
        arguments.out.write_text(f"{result}\n")
    sys.stdout.write(f"{result}\n")


if __name__ == "__main__":
    main()
