"""A month on one data folder in about an hour: ``python -m tests.month``.

Each day a short run trains. Every third day the new checkpoints are evaluated, and every seventh day an ablation trains
its points. Then all files become a day older, and ``rlflow clean --yes`` works under a quota. At the end the quota is
lowered, so that clean has much to do: it is killed at random moments, each time over the same folder, and at last works
to its end. After each clean, killed or not, everything that the registry and the leaderboard name has to be whole, and
after each whole one the folder may not be larger than the quota. Then the models and the checkpoints are loaded. The
commands are those that users type, with real servers, Ray and vLLM.

``--days 0`` repeats the end over the folder of an earlier month. Prints a table, and last one line of JSON; ends with 1
if a promise was broken, or if clean has removed nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
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
_FREE_SHARE = 0.55  # preflight wants 0.4 GiB for the next run, most of it as a reserve
_GRID = "training.learning_rate=[1e-5, 1e-4]"
_EVALUATE = "from flows.evaluate_latest import evaluate_latest; evaluate_latest(benchmarks=['tiny-sums'])"
_PREDICT = (
    "import mlflow.pyfunc, pandas, sys; mlflow.set_tracking_uri(sys.argv[2]); "
    "model = mlflow.pyfunc.load_model(sys.argv[1]); "
    "assert model.predict(pandas.DataFrame([{'question': '12+34='}]))['completion'][0]"
)


@dataclass(slots=True)
class Month:
    days: int = 0
    bytes_before: list[int] = field(default_factory=list)  # of each whole clean
    bytes_after: list[int] = field(default_factory=list)
    named: list[int] = field(default_factory=list)  # registered models and rows of the leaderboard, all of them whole
    clean_seconds: list[float] = field(default_factory=list)
    above_quota: list[int] = field(default_factory=list)  # cleans, by their number
    kills: int = 0  # of a clean at work
    bytes_after_kills: list[int] = field(default_factory=list)
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

    def killed_clean(self, after_seconds: float, *, wait_for_work: bool) -> bool:
        """Kill a clean after so many seconds, or a hundredth of them after it has removed something. Returns whether it
        was still at work."""
        bytes_before = usage_of(self.settings.data_dir).bytes
        with (self.out / "month.log").open("a") as log:
            clean = subprocess.Popen(
                [sys.executable, "-m", "tasks.cli", "clean", "--yes"],
                env=new_shell(self.variables), stdout=log, stderr=log,
            )  # fmt: skip
            while wait_for_work and clean.poll() is None and usage_of(self.settings.data_dir).bytes >= bytes_before:
                time.sleep(0.02)
            time.sleep(after_seconds / (100 if wait_for_work else 1))
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


def clean_up(house: House, month: Month) -> None:
    data, quota = house.settings.data_dir, house.settings.max_gib * 2**30
    month.bytes_before.append(usage_of(data).bytes)
    started = time.monotonic()
    house.rlflow("clean", "--yes")
    month.clean_seconds.append(time.monotonic() - started)
    month.bytes_after.append(usage_of(data).bytes)
    month.named.append(everything_named_loads(house.settings))
    if month.bytes_after[-1] > quota:
        month.above_quota.append(len(month.bytes_after) - 1)


def kill_cleans(house: House, month: Month, kills: int, chance: random.Random) -> None:
    """Kill clean at so many moments. Each finds the folder as the last day left it."""
    data, saved = house.settings.data_dir, house.out / "saved"
    shutil.rmtree(saved, ignore_errors=True)
    shutil.copytree(data, saved, symlinks=True)
    seconds = _seconds_of(lambda: house.rlflow("clean"))  # that removes nothing
    while month.kills < kills:
        shutil.rmtree(data)
        shutil.copytree(saved, data, symlinks=True)
        # Removing takes a moment after a long look, so half of the kills wait for the first thing that is gone.
        if house.killed_clean(chance.uniform(0, seconds), wait_for_work=month.kills % 2 == 1):
            month.kills += 1
            everything_named_loads(house.settings)
            month.bytes_after_kills.append(usage_of(data).bytes)
            sys.stdout.write(f"kill {month.kills}: {month.bytes_after_kills[-1] / 2**20:.0f} MiB are left\n")
            sys.stdout.flush()
    shutil.rmtree(saved)


def _seconds_of(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def load_by_name(house: House) -> list[str]:
    """Load each registered model, and evaluate each run that the leaderboard names."""
    loaded = []
    for version in registered_versions(house.settings.tracking_uri):
        name = f"models:/{version.name}/{version.version}"
        house.run("-c", _PREDICT, name, house.settings.tracking_uri)
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
    parser.add_argument("--quota-gib", type=float, default=0.8)
    parser.add_argument("--last-quota-gib", type=float, default=0.3)
    parser.add_argument("--seed", type=int, help="of the moments of the kills; default: another one each time")
    parser.add_argument("--out", type=Path, default=Path("data/month"))
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    started, out, month = time.monotonic(), options.out.absolute(), Month()
    if options.days:
        shutil.rmtree(out, ignore_errors=True)
        (out / "data").mkdir(parents=True)
    with servers(out / "servers") as running:
        variables = {**running.variables(), "RLFLOW_DATA_DIR": str(out / "data"), "RLFLOW_CLEAN_DAYS": "2"}
        house = _house(out, variables, options.quota_gib, _FREE_SHARE)
        for day in range(options.days):
            work(house, day)
            Folder(house.settings).age(1)
            clean_up(house, month)
            month.days += 1
            before, after = (found[-1] / 2**20 for found in (month.bytes_before, month.bytes_after))
            sys.stdout.write(f"| {day} | {before:.0f} | {after:.0f} | {month.named[-1]} |\n")
            sys.stdout.flush()
        house = _house(out, variables, options.last_quota_gib, 0.1)
        kill_cleans(house, month, options.kills, random.Random(seed))
        clean_up(house, month)
        month.loaded = load_by_name(house)
    report = {"seed": seed, "wall_seconds": round(time.monotonic() - started), **asdict(month)}
    sys.stdout.write(json.dumps(report) + "\n")
    return int(bool(month.above_quota) or month.bytes_after[-1] >= month.bytes_before[-1])


def _house(out: Path, variables: Mapping[str, str], quota_gib: float, free_share: float) -> House:
    own = {**variables, "RLFLOW_MAX_GIB": str(quota_gib), "RLFLOW_CLEAN_FREE_SHARE": str(free_share)}
    os.environ.update(own)
    return House(out, Settings(), own)


if __name__ == "__main__":
    sys.exit(main())
