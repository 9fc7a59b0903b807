"""A month on one data folder in about an hour: ``python -m tests.month``.

Each day a short run trains. Every third day the new checkpoints are evaluated, and every seventh day an ablation trains
its points. Then all files become a day older, and ``rlflow clean --yes`` works under a quota. On 20 days it is killed
first, at a random moment. After each clean, everything that the registry and the leaderboard name has to be whole, and
the folder may not be larger than the quota. At the end the models and the checkpoints load. The commands are those that
users type, with real servers, Ray and vLLM.

Prints a table, and last one line of JSON; ends with 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from infra.settings import Settings
from infra.store.disk import usage_of
from infra.tracking.results import registered_versions
from tasks.champion import all_runs, evaluations
from tests.chaos.harness import servers
from tests.clean_folder import Folder, delete_versions_without_an_alias, everything_named_loads
from tests.shell import new_shell

EXPERIMENT = "grpo-gsm8k-tiny"
_SMALL = (
    "model.tiny.warm_start_steps=100",
    "training.steps=4",
    "segment.steps=4",
    "training.problems_per_batch=8",
    "rollout.group_size=4",
    "data.synthetic_problems=256",
    "evaluation.problems=16",
    "evaluation.samples=1",
)
_EVALUATES_EVERY, _ABLATES_EVERY = 3, 7  # days
_FREE_SHARE = 0.5  # preflight wants 0.4 GiB for the next run, most of it as a reserve
_GRID = "training.learning_rate=[1e-5, 1e-4]"
_EVALUATE = "from flows.evaluate_latest import evaluate_latest; evaluate_latest(benchmarks=['tiny-sums'])"
_PREDICT = (
    "import mlflow.pyfunc, pandas, sys; model = mlflow.pyfunc.load_model(sys.argv[1]); "
    "assert model.predict(pandas.DataFrame([{'question': '12+34='}]))['completion'][0]"
)


@dataclass(slots=True)
class Month:
    days: int = 0
    kills: int = 0  # of a clean at work
    bytes_before: list[int] = field(default_factory=list)  # of each day's clean
    bytes_after: list[int] = field(default_factory=list)
    named: list[int] = field(default_factory=list)  # registered models and rows of the leaderboard, all of them whole
    clean_seconds: list[float] = field(default_factory=list)
    above_quota: list[int] = field(default_factory=list)  # days
    loaded: list[str] = field(default_factory=list)  # by their names, at the end


@dataclass(frozen=True, slots=True)
class House:
    """The data folder, and the commands over it."""

    out: Path
    settings: Settings
    variables: Mapping[str, str]

    def run(self, *words: str) -> str:
        """Type a command. Its output goes to the log, and is returned.

        Raises:
            RuntimeError: it failed.
        """
        done = subprocess.run(
            [sys.executable, *words], env=new_shell(self.variables), capture_output=True, text=True, check=False
        )
        with (self.out / "month.log").open("a") as log:
            log.write(f"\n$ {' '.join(words)}\n{done.stdout}{done.stderr}")
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
            )
        return done.stdout

    def rlflow(self, *words: str) -> str:
        return self.run("-m", "tasks.cli", *words)

    def killed_clean(self, after_seconds: float) -> bool:
        """Returns whether clean was still at work when it was killed."""
        with (self.out / "month.log").open("a") as log:
            clean = subprocess.Popen(
                [sys.executable, "-m", "tasks.cli", "clean", "--yes"],
                env=new_shell(self.variables), stdout=log, stderr=log,
            )  # fmt: skip
            time.sleep(after_seconds)
            was_at_work = clean.poll() is None
            clean.kill()
            clean.wait()
        return was_at_work


def work(house: House, day: int) -> None:
    """What a group does on a day."""
    settings = [word for value in _SMALL for word in ("--set", value)]
    house.rlflow("train", EXPERIMENT, "--run-id", f"day-{day:02d}", "--set", f"seed={day}", *settings)
    if day % _EVALUATES_EVERY == 0:
        house.run("-c", _EVALUATE)
    if day % _ABLATES_EVERY == 0:
        house.rlflow(
            "ablate", EXPERIMENT, "--run-id", f"ablation-{day:02d}", "--grid", _GRID, "--seeds", "0", *settings
        )
        delete_versions_without_an_alias(house.settings)  # as people do with models that they no longer want


def clean_up(house: House, month: Month, day: int, kill_after: float | None, quota_bytes: float) -> None:
    month.bytes_before.append(usage_of(house.settings.data_dir).bytes)
    if kill_after is not None:
        month.kills += house.killed_clean(kill_after)
        everything_named_loads(house.settings)
    started = time.monotonic()
    house.rlflow("clean", "--yes")
    month.clean_seconds.append(time.monotonic() - started)
    month.bytes_after.append(usage_of(house.settings.data_dir).bytes)
    month.named.append(everything_named_loads(house.settings))
    if month.bytes_after[-1] > quota_bytes:
        month.above_quota.append(day)


def load_by_name(house: House) -> list[str]:
    """Load each registered model, and evaluate each run that the leaderboard names."""
    loaded = []
    for version in registered_versions(house.settings.tracking_uri):
        name = f"models:/{version.name}/{version.version}"
        house.run("-c", _PREDICT, name)
        loaded.append(name)
    for run in all_runs(house.settings):
        if evaluations(run) and any((run.run_dir / "checkpoints").glob("step-*")):
            house.rlflow("evaluate", run.run_id)
            loaded.append(run.run_id)
    return loaded


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.month", description=__doc__)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--quota-gib", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="of the days and moments of the kills; default: another one each time")
    parser.add_argument("--out", type=Path, default=Path("data/month"))
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    chance, started, out = random.Random(seed), time.monotonic(), options.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    (out / "data").mkdir(parents=True)
    kills = set(chance.sample(range(1, options.days), min(options.kills, options.days - 1)))  # day 0 has nothing old
    month, quota_bytes = Month(), options.quota_gib * 2**30
    with servers(out / "servers") as running:
        own = {
            **running.variables(),
            "RLFLOW_DATA_DIR": str(out / "data"),
            "RLFLOW_MAX_GIB": str(options.quota_gib),
            "RLFLOW_CLEAN_FREE_SHARE": str(_FREE_SHARE),
            "RLFLOW_CLEAN_DAYS": "2",
        }
        os.environ.update(own)
        house = House(out, Settings(), own)
        for day in range(options.days):
            work(house, day)
            Folder(house.settings).age(1)
            seconds = statistics.median(month.clean_seconds) if month.clean_seconds else 5.0
            clean_up(house, month, day, chance.uniform(0, seconds) if day in kills else None, quota_bytes)
            month.days += 1
            before, after = (found[-1] / 2**20 for found in (month.bytes_before, month.bytes_after))
            sys.stdout.write(f"| {day} | {before:.0f} | {after:.0f} | {month.named[-1]} | {month.kills} |\n")
            sys.stdout.flush()
        month.loaded = load_by_name(house)
    report = {
        "seed": seed,
        "quota_bytes": quota_bytes,
        "wall_seconds": round(time.monotonic() - started),
        **asdict(month),
    }
    sys.stdout.write(json.dumps(report) + "\n")
    return int(bool(month.above_quota) or max(month.bytes_before) <= quota_bytes)


if __name__ == "__main__":
    sys.exit(main())
