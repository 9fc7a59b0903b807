"""Run among ``hosts``: four machines with one folder, one Prefect and one MLflow; the first one is lost.

``python -m tests.long.machines_run`` leaves the data folder and ``happened.json``. The clocks of two machines are five
minutes ahead and five behind. The first two have the same name and the same boot, as two containers have. Two runs
begin on the first machine, and another one takes each up while the first one lives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import psutil
from mlflow import MlflowClient

from rlcore.segment.journal import read_journal
from rlcore.segment.lease import Lease, LeaseInfo
from tests.chaos.compare import compare, weights_of
from tests.chaos.harness import servers
from tests.long.hosts import OUTSIDE, SHARED, Host
from tests.shell import new_shell

SKEW = 300
AHEAD, BEHIND, UNDISTURBED = "ahead", "behind", "undisturbed"
STEPS = 24
_FOLLOWED = 1  # steps that a run has taken while another machine follows
_SECONDS = 900.0  # of a machine that does other work as well
_PAUSE = "GRADING_SECONDS"
REWARD = f"""import os, time
def reward(text, problem, num_tokens, finish_reason):
    time.sleep(float(os.environ["{_PAUSE}"]))
    return sum(map(str.isalpha, text)) / max(1, len(text))
"""  # slow on the machine that dies on the way
_SETTINGS = (
    "model.tiny.warm_start_steps=0",
    "segment.steps=2",
    f"training.steps={STEPS}",
    "training.problems_per_batch=4",
    "rollout.group_size=4",
    "rollout.max_completion_tokens=16",
    "data.synthetic_problems=64",
    "evaluation.problems=8",
    "evaluation.samples=1",
    "evaluation.every_steps=100",
    "reward.name=user",
    f"reward.file={SHARED / 'letters.py'}",
    f'reward.environment=["{_PAUSE}"]',
)
_ACQUIRE = """import sys
from pathlib import Path
from rlcore.errors import LeaseLostError
from rlcore.segment.lease import Lease, LeaseInfo
try:
    print("taken", Lease(Path(sys.argv[1])).acquire("thief"))
except LeaseLostError as error:
    print(error)
"""
_RECOVER = """import tasks.recovery.act as act
for _, facts, decision in act.recover_runs.fn():
    print(facts.run_id, decision.action.value, facts.driver_running)
"""
DATA = SHARED / "data"


class Machines:
    """What is typed on which machine, and what it says."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = {**variables, "RLFLOW_RETRY_DELAY_SCALE": "0.1"}
        self._begun = time.monotonic()

    def train(self, host: Host, run: str, data_dir: Path = DATA, **more: str) -> subprocess.Popen[bytes]:
        more[_PAUSE] = "1" if host.address.endswith(".1") else "0"
        words = [word for setting in _SETTINGS for word in ("--set", setting)]
        return self._start(
            host, f"{run}-{host.address}", "tasks.cli", "train", "grpo-gsm8k-tiny", "--run-id", run, *words,
            RLFLOW_DATA_DIR=str(data_dir), **more,
        )  # fmt: skip

    def run(self, host: Host, name: str, *words: str) -> str:
        """To its end; what it said."""
        if self._start(host, name, *words, RLFLOW_DATA_DIR=str(DATA)).wait(_SECONDS):
            sys.exit(f"{words} failed:\n{log_of(name)}")
        return log_of(name)

    def _start(self, host: Host, name: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
        module = ("-c",) if words[0].startswith("import") else ("-m",)
        with (SHARED / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                host.command(sys.executable, *module, *words),
                env={**new_shell(), **host.environment(), **self._variables, **more},
                stdout=log,
                stderr=log,
            )

    def say(self, what: str) -> None:
        sys.stderr.write(f"{time.monotonic() - self._begun:5.0f} s: {what}\n")


def main() -> None:
    (SHARED / "letters.py").write_text(REWARD)
    os.environ["RLFLOW_HOST"] = OUTSIDE
    with servers(SHARED / "servers") as both:
        client = logged_in(both.variables())
        happened = play(Machines(both.variables()))
        runs = DATA / "runs"
        there = {AHEAD: runs / AHEAD, BEHIND: runs / BEHIND}
        happened["compared"] = {run: asdict(compare(path, runs / UNDISTURBED, client)) for run, path in there.items()}
        happened["weights"] = {
            run: weights_of(path) for run, path in {**there, UNDISTURBED: runs / UNDISTURBED}.items()
        }
    (SHARED / "happened.json").write_text(json.dumps(happened))


def play(machines: Machines) -> dict[str, object]:
    first, ahead = Host.start("node", 1), Host.start("node", 2, skew=SKEW)
    behind, fourth = Host.start("other", 3, skew=-SKEW), Host.start("fourth", 4)
    happened: dict[str, object] = {}

    commands = {AHEAD: machines.train(first, AHEAD)}
    holder = wait_for_trainer(AHEAD, commands[AHEAD])  # by then the data and the policy are made
    ahead.occupy(holder.pid)  # on the machine behind, no process has this pid
    happened["pid"] = holder.pid
    followers = {AHEAD: machines.train(ahead, AHEAD)}
    commands[BEHIND] = machines.train(first, BEHIND)
    wait_for_trainer(BEHIND, commands[BEHIND])
    followers[BEHIND] = machines.train(behind, BEHIND)
    for run, host in ((AHEAD, ahead), (BEHIND, behind)):
        log = SHARED / f"{run}-{host.address}.log"
        wait_until(lambda log=log: "follow the trainer" in log.read_text(), followers[run], run)  # type: ignore[misc]
    machines.say("two machines follow")
    happened |= sweep(machines, ahead, behind)
    machines.say("recover and clean have run")
    seen = {run: steps(run) for run in followers}
    for run in followers:
        wait_until(lambda run=run: steps(run) >= seen[run] + _FOLLOWED, commands[run], run)  # type: ignore[misc]
    happened["trainers while the first machine lived"] = {run: trainers(run) for run in followers}

    for process in psutil.Process(followers[BEHIND].pid).children(recursive=True):  # nsenter is only their parent
        process.kill()  # its command is typed again below; the other one goes on following
    first.die()
    died = time.monotonic()
    happened["steps when it died"] = {run: steps(run) for run in followers}
    machines.say(f"the first machine is lost at {happened['steps when it died']}")
    again = {AHEAD: followers[AHEAD], BEHIND: machines.train(behind, BEHIND)}
    again[UNDISTURBED] = machines.train(fourth, UNDISTURBED)
    taken: dict[str, float] = {}
    while len(taken) < len(followers):
        for run in followers:
            if trainers(run) > 1:
                taken.setdefault(run, time.monotonic() - died)
        if time.monotonic() - died > _SECONDS:
            sys.exit(f"nobody took over; {taken}\n{log_of(f'{AHEAD}-{ahead.address}')}")
        time.sleep(0.2)
    happened["taken over after"] = taken
    machines.say(f"taken over: {taken}")
    for run, command in again.items():
        host = {AHEAD: ahead, BEHIND: behind}.get(run, fourth)
        if command.wait(_SECONDS):
            sys.exit(f"{run} ended with {command.returncode}:\n{log_of(f'{run}-{host.address}')}")
        machines.say(f"{run} has ended")
    happened["trainers"] = {run: trainers(run) for run in followers}
    return happened


def sweep(machines: Machines, ahead: Host, behind: Host) -> dict[str, object]:
    """What other machines may do at any moment: ask for the lease, recover, clean."""
    lease = str(DATA / "runs" / AHEAD / "lease.json")
    written = DATA / "datasets" / ".being-made.node-000000000000.tmp"
    written.mkdir(parents=True)
    before = files_of(DATA)
    with ThreadPoolExecutor() as pool:
        refused = [pool.submit(machines.run, host, f"thief-{host.name}", _ACQUIRE, lease) for host in (ahead, behind)]
        recovered = [pool.submit(machines.run, host, f"recover-{host.name}", _RECOVER) for host in (ahead, behind)]
        cleaned = pool.submit(machines.run, ahead, "clean", "tasks.cli", "clean", "--yes", "--older-than", "1")
        happened: dict[str, object] = {
            "refused": [item.result() for item in refused],
            "recover": [item.result() for item in recovered],
            "clean": cleaned.result(),
        }
    return happened | {"removed": sorted(before - files_of(DATA)), "what is written stays": written.exists()}


def wait_for_trainer(run: str, command: subprocess.Popen[bytes]) -> LeaseInfo:
    lease = Lease(DATA / "runs" / run / "lease.json")
    wait_until(lambda: lease.read() is not None, command, run)
    holder = lease.read()
    assert holder is not None
    return holder


def logged_in(variables: Mapping[str, str]) -> MlflowClient:
    os.environ |= variables
    return MlflowClient(tracking_uri=variables["RLFLOW_MLFLOW_URI"])


def steps(run: str) -> int:
    return len(read_journal(DATA / "runs" / run / "journal.jsonl"))


def trainers(run: str) -> int:
    """How many have begun."""
    log = DATA / "runs" / run / "trainer.log"
    return log.read_text(errors="replace").count("=== trainer started ") if log.exists() else 0


def files_of(folder: Path) -> set[str]:
    """What nobody removes while a run goes on: all but the runs' own files, which a trainer replaces."""
    found = (path for part in ("datasets", "models", "jobs", "made") for path in (folder / part).rglob("*"))
    return {str(path.relative_to(folder)) for path in found}


def log_of(name: str) -> str:
    return (SHARED / f"{name}.log").read_text(errors="replace")[-4000:]


def wait_until(reached: Callable[[], bool], command: subprocess.Popen[bytes], run: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while not reached():
        if command.poll() is not None or time.monotonic() > deadline:
            logs = "\n".join(log_of(path.stem) for path in sorted(SHARED.glob(f"{run}-*.log")))
            sys.exit(f"what was waited for did not come; the command of {run}: {command.poll()}\n{logs}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
