"""Run among ``hosts``: what is said of nodes that do not fit a run or are cut off. The workers are toys.

``python -m tests.long.cluster_failures`` starts the cluster and, on its head, itself again with a word more;
that one writes the errors to ``errors.json`` in the shared folder.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rlcore.config import ExperimentConfig
from rlcore.distributed.actors import RayRanks, start_ranks
from rlcore.distributed.cluster import start_ray, stop_ray
from tests.integration.toy_worker import ToyWorker
from tests.long.cluster_run import ADDRESS, join, ray_start
from tests.long.hosts import LOCAL, SHARED, Host

_AT_WORK = [SHARED / f"stuck-{rank}" for rank in range(2)]


def main() -> None:
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Ray takes a minute to give a silent node up; here it is in a hurry.
    os.environ |= {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "1000"}
    head = Host.start("head", 1)
    ray_start(head, "--head", "--num-cpus=0", "--include-dashboard=false")
    _, cut_off = join("one", 2), join("two", 3)
    command = head.command(sys.executable, "-m", "tests.long.cluster_failures", "head")
    asked = subprocess.Popen(command, env=head.environment())
    while asked.poll() is None and not all(flag.exists() for flag in _AT_WORK):
        time.sleep(0.05)
    cut_off.unplug()
    sys.exit(asked.wait(120))


def ask() -> None:
    """On the head: each way to fail, and what is raised."""
    errors: dict[str, str] = {}

    def failing(name: str, call: Callable[[], object]) -> None:
        start_ray("auto", 0)
        try:
            call()
        except Exception as error:  # noqa: BLE001 - what it is, is the test's to say
            errors[name] = f"{type(error).__name__}: {error}"
        stop_ray()

    # a driver that is killed with ranks on all nodes leaves nothing there: those below get their CPUs
    command = [sys.executable, "-m", "tests.long.cluster_failures", "be killed"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    own = LOCAL / "dataset"
    own.mkdir()
    (own / "problems.parquet").touch()
    failing("folder", lambda: ranks(own, 2))
    failing("room", lambda: ranks(SHARED, 3))
    failing("token", _with_another_token)
    failing("silence", _while_a_node_is_cut_off)
    (SHARED / "errors.json").write_text(json.dumps(errors))


def ranks(dataset: Path, workers: int) -> RayRanks:
    resources = {"workers": workers, "wait_minutes": 0.2}
    config = ExperimentConfig.model_validate(
        {"name": "toy", "resources": resources, "training": {"problems_per_batch": 6}}
    )
    return start_ranks(ToyWorker, model=SHARED, dataset=dataset, config=config, device="cpu")


def be_killed() -> None:
    start_ray(ADDRESS, 0)
    ranks(SHARED, 2)
    os.kill(os.getpid(), signal.SIGKILL)


def _while_a_node_is_cut_off() -> None:
    ranks(SHARED, 2).call(ToyWorker.stuck, [SHARED] * 2)


def _with_another_token() -> None:
    code = f"from rlcore.distributed.cluster import start_ray; start_ray({ADDRESS!r}, 0)"
    env = {**os.environ, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    answer = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(answer.stderr.strip().splitlines()[-1])


if __name__ == "__main__":
    {(): main, ("head",): ask, ("be killed",): be_killed}[tuple(sys.argv[1:])]()
