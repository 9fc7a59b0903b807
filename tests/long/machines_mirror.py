"""Run among ``hosts``: a run in a folder of one machine and in a store; the machine is lost, and another one goes on.

``python -m tests.long.machines_mirror`` leaves ``mirrored.json``. The clock of the second machine is five
minutes ahead, and it has the name of the first one.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from infra.store.bucket import Store
from rlcore.segment.journal import read_journal
from tests.chaos.compare import compare, weights_of
from tests.chaos.harness import servers
from tests.long.hosts import LOCAL, OUTSIDE, SHARED, Host
from tests.long.machines_run import DATA, REWARD, SKEW, UNDISTURBED, Machines, log_of, logged_in, wait_until
from tests.stores import BUCKET, s3_server

MIRRORED = "mirrored"
_SEALED = 2  # checkpoints in the store when the machine is lost


def main() -> None:
    (SHARED / "letters.py").write_text(REWARD)
    os.environ["RLFLOW_HOST"] = OUTSIDE
    with servers(SHARED / "servers") as both, s3_server(SHARED / "s3.log", OUTSIDE) as s3:
        client = logged_in(both.variables())
        os.environ |= s3.variables
        store = {**s3.variables, "RLFLOW_STORE": f"s3://{BUCKET}/lab"}
        machines = Machines(both.variables())
        first, ahead = Host.start("node", 1), Host.start("node", 2, skew=SKEW)
        command = machines.train(first, MIRRORED, LOCAL / "data", **store)
        key = f"runs/{MIRRORED}/checkpoints"
        wait_until(lambda: len(Store(store["RLFLOW_STORE"]).sealed_below(key)) >= _SEALED, command, MIRRORED)
        first.die()
        sealed = len(Store(store["RLFLOW_STORE"]).sealed_below(key))
        machines.say(f"the first machine is lost with {sealed} checkpoints in the store")
        again = {
            MIRRORED: machines.train(ahead, MIRRORED, SHARED / "restored", **store),
            UNDISTURBED: machines.train(ahead, UNDISTURBED),
        }
        for run, command in again.items():
            if command.wait(900):
                sys.exit(f"{run} ended with {command.returncode}:\n{log_of(f'{run}-{ahead.address}')}")
            machines.say(f"{run} has ended")
        restored, expected = SHARED / "restored" / "runs" / MIRRORED, DATA / "runs" / UNDISTURBED
        happened = {
            "sealed": sealed,
            "from": first_step_of(restored),
            "compared": asdict(compare(restored, expected, client)),
            "weights": [weights_of(restored), weights_of(expected)],
            "steps": [record.step for record in read_journal(restored / "journal.jsonl")],
        }
    (SHARED / "mirrored.json").write_text(json.dumps(happened))


def first_step_of(run_dir: Path) -> str:
    """What the first trainer on the second machine went on from."""
    heading = "=== trainer started "
    lines = (run_dir / "trainer.log").read_text(errors="replace").splitlines()
    return next(line for line in lines if line.startswith(heading)).removeprefix(heading).partition(",")[0]


if __name__ == "__main__":
    main()
