"""Run among ``hosts``: an experiment by its name on a Ray cluster of three hosts, one of which dies on the way.

``python -m tests.long.cluster_run`` leaves two runs in the data folder that the hosts share, and what happened
in ``happened.json``. The head has no CPU for workers, the others have one each, so the two ranks are on two hosts. The
second one is killed, and a third one comes instead once the death has been noticed. The other run, which nobody
disturbs, has both ranks on one host, in a Ray of its own.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rlcore.segment.journal import read_journal
from tests.chaos.compare import weights_of
from tests.long.hosts import SHARED, Host

DISTURBED, UNDISTURBED = "several-nodes", "one-node"
STEPS = 20
_DIES_AFTER = 13  # a segment has ten steps, so some are taken again
ADDRESS = "10.77.0.1:6379"  # of the head; this network is ours alone
_SECONDS = 900.0  # for each wait; on a slow machine two of them took 548 together
_REWARD = """def reward(text, problem, num_tokens, finish_reason):
    return sum(map(str.isalpha, text)) / max(1, len(text))
"""  # random weights are never right, but not all equally wordy
_SETTINGS = (
    "model.tiny.warm_start_steps=0",
    "segment.steps=10",
    f"training.steps={STEPS}",
    "training.problems_per_batch=4",
    "rollout.group_size=4",
    "rollout.max_completion_tokens=16",
    "data.synthetic_problems=64",
    "reward.name=user",
    "resources.wait_minutes=3",
)


def main() -> None:
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # as docs/howto/cluster.md says
    (SHARED / "letters.py").write_text(_REWARD)
    head = Host.start("head", 1)
    started = time.monotonic()
    if train(head, UNDISTURBED, ray_address="").wait(_SECONDS):
        sys.exit(f"the run on one host failed:\n{log_of(UNDISTURBED)}")
    alone = time.monotonic()

    ray_start(head, "--head", "--num-cpus=0", "--include-dashboard=false")
    _, victim = join("one", 2), join("two", 3)
    command = train(head, DISTURBED, ray_address=ADDRESS)
    run_dir = SHARED / "data" / "runs" / DISTURBED
    wait_until(lambda: steps(run_dir) >= _DIES_AFTER, command)
    victim.die()
    died = time.monotonic()
    wait_until((run_dir / "failures.jsonl").exists, command)
    noticed = time.monotonic()
    join("three", 4)
    code = command.wait(_SECONDS)
    seconds = {"alone": alone - started, "noticed": noticed - died, "disturbed": time.monotonic() - alone}
    if code:
        sys.exit(f"the run on several hosts ended with {code}:\n{log_of(DISTURBED)}")
    weights = {run: weights_of(SHARED / "data" / "runs" / run) for run in (DISTURBED, UNDISTURBED)}
    (SHARED / "happened.json").write_text(
        json.dumps({"victim": victim.address, "seconds": seconds, "weights": weights})
    )


def ray_start(host: Host, *words: str) -> None:
    ray = Path(sys.executable).with_name("ray")
    host.run([str(ray), "start", "--disable-usage-stats", "--object-store-memory=100000000", *words])


def join(name: str, number: int) -> Host:
    host = Host.start(name, number)
    ray_start(host, f"--address={ADDRESS}", "--num-cpus=1")
    return host


def train(host: Host, run_id: str, *, ray_address: str) -> subprocess.Popen[bytes]:
    settings = (*_SETTINGS, f"reward.file={SHARED / 'letters.py'}")
    words = [word for setting in settings for word in ("--set", setting)]
    variables = {"RLFLOW_DATA_DIR": str(SHARED / "data"), "RLFLOW_RAY_ADDRESS": ray_address}
    with (SHARED / f"{run_id}.log").open("wb") as log:
        return subprocess.Popen(
            host.command(sys.executable, "-m", "tests.long.train_only", "grpo-gsm8k-tiny", "--run-id", run_id, *words),
            env={**host.environment(), **variables, "RLFLOW_RETRY_DELAY_SCALE": "0.1"},
            stdout=log,
            stderr=log,
        )


def steps(run_dir: Path) -> int:
    return len(read_journal(run_dir / "journal.jsonl"))


def log_of(run_id: str) -> str:
    return (SHARED / f"{run_id}.log").read_text(errors="replace")[-4000:]


def wait_until(reached: Callable[[], bool], command: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not reached():
        if command.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"what was waited for did not come; the command: {command.poll()}\n{log_of(DISTURBED)}")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
