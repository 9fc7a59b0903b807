"""Kill everything, at random, and show that nothing is lost: ``python -m tests.chaos`` (make chaos).

Four legs, each compared with the same run that nobody disturbs, all on two ranks:

- whole: the text demo from data to a registered model. Every process is killed by SIGKILL, in every phase from the
  start to the registration; the disk of the checkpoints is full, then read-only; the newest checkpoint is damaged in
  five ways. The command is typed again only where it was killed itself.
- lora, partial: with adapters, and with partial rollouts. The command is typed once; Prefect's retries do the rest.
- store: partial rollouts with an S3 store. In the end another machine, which has nothing, restores the run from it.

Victims come in a random order and die at random moments (--seed). Prints a table, and last one line of JSON; ends with
1 if a victim was never hit at its moment, weights or metrics differ, or anything is missing or left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlflow import MlflowClient

from infra.settings import Settings
from tasks.store.restore import restore_checkpoint, restore_run
from tests.chaos import victims
from tests.chaos.compare import Comparison, compare, weights_of
from tests.chaos.faults import DAMAGES
from tests.chaos.harness import FAULTS, TRAINING, WHOLE, Chaos, Job, Server, Servers, servers
from tests.chaos.report import DroppedFault, Report, faults_of, hits, losses, markdown
from tests.chaos.victims import Kind
from tests.left import command_of, left_of
from tests.stores import BUCKET, s3_server

_TWO_RANKS = "resources.workers=2"
# Each disturbance follows a commit. A run goes on for seconds without its head of Ray, its command or its servers.
_STEPS_PER_DISTURBANCE, _STEPS_MORE = 8, 96
_EVALUATED_ALONE = ("evaluation.every_steps=null",)  # in a process of its own, which is one of the victims
_LORA = ("model.lora.rank=8",)
_PARTIAL = (
    "rollout.partial.tokens_per_round=12",
    "rollout.partial.in_flight=2",
    "training.max_staleness=2",
    "algorithm.correction.name=truncate",
    "algorithm.recompute_old_logprobs=false",
)
_LEGS = ("whole", "lora", "partial", "store")
_UNDISTURBED = "undisturbed"


@dataclass(slots=True)
class Bench:
    """Where the legs run, and what came of them."""

    out: Path
    servers: Servers
    chance: random.Random
    legs: dict[str, Chaos] = field(default_factory=dict)
    compared: dict[str, Comparison] = field(default_factory=dict)
    weights_equal: dict[str, bool] = field(default_factory=dict)

    def undisturbed(self, name: str, module: tuple[str, ...], settings: tuple[str, ...], steps: int) -> Job:
        """The same run in one segment, when nobody kills anything."""
        values = (_TWO_RANKS, *settings, f"training.steps={steps}", f"segment.steps={steps}")
        job = Job(f"{_UNDISTURBED}-{name}", self.out / _UNDISTURBED, module, values, self.servers)
        started = time.monotonic()
        job.run()
        sys.stderr.write(f"{name}: undisturbed, {steps} steps in {time.monotonic() - started:.0f} s\n")
        return job

    @contextmanager
    def leg(self, name: str, like: Job, *, types_again: bool, small_disk: bool = False, **more: str) -> Iterator[Chaos]:
        """The run ``like`` again, in segments of two steps, for the block to disturb; then it ends and is compared."""
        data_dir = self.out / name
        models = [path for path in (like.data_dir / "models").iterdir() if not path.name.startswith("merged-")]
        for model in models:  # so that the warm start is not taken again
            shutil.copytree(model, data_dir / "models" / model.name)
        settings = tuple(setting for setting in like.settings if not setting.startswith("segment."))
        job = Job(f"killed-{name}", data_dir, like.module, settings, self.servers, more)
        with Chaos(name, job, self.chance, types_again=types_again, small_disk=small_disk) as chaos:
            self.legs[name] = chaos
            yield chaos
            chaos.finish()
        client = MlflowClient(tracking_uri=self.servers.mlflow.address)
        self.compared[name] = compare(job.run_dir, like.run_dir, client)
        self.weights_equal[name] = chaos.weights == weights_of(like.run_dir)


def whole(bench: Bench, *, faults: bool) -> None:
    middle: list[tuple[Kind, ...] | Server] = [
        *((kind,) for kind in (*victims.RESTARTING, victims.COMMAND_PUBLISHES, victims.GRADER)),
        bench.servers.prefect,
        bench.servers.mlflow,
    ]
    twice = bench.chance.randrange(len(victims.RESTARTING))
    middle[twice] = (victims.RESTARTING[twice], victims.TRAINER_RESUMES)  # a second kill before anything is committed
    disturbances = len(middle) + (2 + len(DAMAGES) if faults else 0)
    like = bench.undisturbed("whole", WHOLE, _EVALUATED_ALONE, _STEPS_PER_DISTURBANCE * disturbances + _STEPS_MORE)
    with bench.leg("whole", like, types_again=True, small_disk=faults) as chaos:
        chaos.disturb(victims.COMMAND_STARTS, victims.TRAINER_STARTS, victims.FIRST_SYNC, after_commit=False)
        in_random_order(bench.chance, chaos, middle)
        if faults:
            chaos.fill_and_damage()
        else:
            chaos.dropped += [DroppedFault(fault, "--no-faults") for fault in FAULTS]
        for kind in (victims.EVALUATION, victims.MERGE, victims.COMMAND_REGISTERS):
            chaos.disturb(kind, after_commit=False)


def in_random_order(chance: random.Random, chaos: Chaos, what: Sequence[tuple[Kind, ...] | Server]) -> None:
    for item in chance.sample(what, len(what)):
        if isinstance(item, Server):
            chaos.kill_server(item)
        else:
            chaos.disturb(*item)


def hands_off(bench: Bench, name: str, settings: tuple[str, ...], kills: int) -> Job:
    """A leg in which nothing is typed again."""
    like = bench.undisturbed(name, TRAINING, settings, _STEPS_PER_DISTURBANCE * kills + _STEPS_MORE // 2)
    with bench.leg(name, like, types_again=False) as chaos:
        for kind in bench.chance.sample(victims.RESTARTING, kills):
            chaos.disturb(kind)
    return like


def store(bench: Bench, like: Job) -> None:
    with s3_server(bench.out / "s3.log") as s3:
        variables = {"RLFLOW_STORE": f"s3://{BUCKET}/chaos", **s3.variables}
        with bench.leg("store", like, types_again=True, **variables) as chaos:
            chaos.disturb(victims.COMMAND_SENDS)
            chaos.disturb(bench.chance.choice(victims.RESTARTING))
        os.environ.update(variables)
        another = Settings(data_dir=bench.out / "another-machine")
        run_dir = another.runs_dir / chaos.job.run_id
        restore_run(chaos.job.run_id, another)
        restore_checkpoint(run_dir, another)
        bench.weights_equal["restored from the store"] = weights_of(run_dir) == weights_of(like.run_dir)


def short(bench: Bench) -> None:
    """What takes no new trainer, one server, and one victim that does take a new trainer, twice within a commit."""
    middle = [
        (bench.chance.choice(victims.RESTARTING), victims.TRAINER_RESUMES),
        (victims.COMMAND_PUBLISHES,),
        (victims.GRADER,),
        bench.chance.choice([bench.servers.mlflow, bench.servers.prefect]),
    ]
    like = bench.undisturbed("short", TRAINING, (), _STEPS_MORE)
    with bench.leg("short", like, types_again=True) as chaos:
        chaos.disturb(victims.COMMAND_STARTS, after_commit=False)
        in_random_order(bench.chance, chaos, middle)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="of order and moments; default: another one each time")
    parser.add_argument("--short", action="store_true", help="one leg of training alone: for the tests")
    parser.add_argument("--legs", nargs="+", choices=_LEGS, default=_LEGS, help="store needs partial, and runs it too")
    parser.add_argument("--no-faults", action="store_true", help="kills alone: no full disk, no damage")
    parser.add_argument("--out", type=Path, default=Path("data/chaos"))
    parser.add_argument("--docs", type=Path, help="page to write the table of what is lost into")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is taken down
    started, out = time.monotonic(), options.out.absolute()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    sys.stderr.write(f"seed {seed}\n")
    clear(out)
    with servers(out / "servers") as running:
        bench = Bench(out, running, random.Random(seed))
        os.environ.update(running.variables())  # for MLflow's client
        if options.short:
            short(bench)
        else:
            if "whole" in options.legs:
                whole(bench, faults=not options.no_faults)
            if "lora" in options.legs:
                hands_off(bench, "lora", _LORA, 2)
            if "partial" in options.legs or "store" in options.legs:
                like = hands_off(bench, "partial", _PARTIAL, 2)
            if "store" in options.legs:
                store(bench, like)
    left = [f"{process.pid} {command_of(process)[:200]}" for process in left_of(str(out))]
    return tell(bench, seed, left, round(time.monotonic() - started), options.docs)


def clear(out: Path) -> None:
    """What a chaos before has left, and mounted if it was killed itself."""
    for mounted in out.glob("*/runs/*/checkpoints"):
        if mounted.is_mount():
            subprocess.run(["umount", "--lazy", str(mounted)], check=True)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)


def tell(bench: Bench, seed: int, left: list[str], seconds: int, docs: Path | None) -> int:
    """Print the tables and the JSON, and what is wrong. Returns the exit code."""
    legs, compared = bench.legs.values(), bench.compared.values()
    rows = [row for chaos in legs for row in chaos.rows]
    report = Report(
        seed=seed,
        legs=list(bench.legs),
        kills=sum(row.kill for row in rows),
        by_victim=hits(rows),
        missed=[kind for chaos in legs for kind in chaos.missed],
        recovered=sum(row.recovered for row in rows),
        disturbances=len(rows),
        retyped=sum(chaos.retyped for chaos in legs),
        weights_equal=all(bench.weights_equal.values()),
        metrics_equal=not any(found.different for found in compared),
        missing_steps=sum(len(found.missing_steps) for found in compared),
        duplicate_steps=sum(len(found.duplicate_steps) for found in compared),
        orphans=len(left) + sum(len(chaos.orphans) + len(chaos.stray) for chaos in legs),
        dropped_faults=[fault for chaos in legs for fault in chaos.dropped],
        wall_seconds=seconds,
    )
    if docs is not None:
        write_between_marks(docs, losses(rows) + f"\n`{json.dumps(report.json())}`\n")
    (bench.out / "table.md").write_text(markdown(rows))
    sys.stdout.write(f"{markdown(rows)}\n")
    details = {
        "processes left": [*left, *(line for chaos in legs for line in chaos.orphans)],
        "files left": [line for chaos in legs for line in chaos.stray],
        "metrics that differ": [line for found in compared for line in found.different],
    }
    for title, lines in details.items():
        if lines:
            sys.stdout.write(f"{title}, {len(lines)}:\n" + "".join(f"  {line}\n" for line in lines[:40]))
    for text in faults_of(report):
        sys.stdout.write(f"HARMED: {text}. Again with --seed {seed}\n")
    sys.stdout.write(json.dumps(report.json()) + "\n")
    return int(bool(faults_of(report)))


def write_between_marks(page: Path, text: str) -> None:
    before, rest = page.read_text().split("<!-- chaos -->\n")
    _, after = rest.split("<!-- /chaos -->")
    page.write_text(f"{before}<!-- chaos -->\n{text}<!-- /chaos -->{after}")


if __name__ == "__main__":
    sys.exit(main())
