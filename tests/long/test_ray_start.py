"""Starting a Ray of our own on a busy machine, and joining a cluster of another version. Ray is real;
its clock runs fast where a start has to be slow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import ray._private.node as ray_node
import ray._private.services as ray_services

from rlcore.distributed.cluster import start_local_ray, stop_ray

QUIET = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
CLUSTER = """
import ray, sys
print(ray.init(address="local", num_cpus=0, include_dashboard=False).address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
JOIN = """
import ray, sys
ray.__version__ = "0.0.1"
from rlcore.distributed.cluster import start_ray
from rlcore.errors import ConfigError
try:
    start_ray(sys.argv[1], 0)
except ConfigError as error:
    print(error)
"""


@pytest.fixture(autouse=True)
def _no_ray_is_left() -> Iterator[None]:
    yield
    stop_ray()


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that is not Ray's."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each ``ray.init``."""
    seen: list[dict[str, Any]] = []
    init = ray.init

    def noted(**options: Any) -> object:
        seen.append(options)
        return init(**options)

    monkeypatch.setattr(ray, "init", noted)
    return seen


def slow_to_start(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first ``times`` starts Ray's own node does not answer before Ray's 30 s are over."""
    answer: Callable[..., object] = ray_services.get_node
    left = times

    def late(*arguments: Any) -> object:
        nonlocal left
        if left:
            left -= 1
            raise RuntimeError("no node yet")
        return answer(*arguments)

    clock = iter(range(0, 10**6, 31))  # each look is 31 s after the last one
    monkeypatch.setattr(ray_services, "get_node", late)
    monkeypatch.setattr(ray_node, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))


def ray_processes() -> list[str]:
    commands = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            commands.append(" ".join(child.cmdline()))
    return [command for command in commands if re.search(r"raylet|gcs_server", command)]


def test_one_that_takes_too_long_is_started_again(
    monkeypatch: pytest.MonkeyPatch, neighbour: subprocess.Popen[bytes], tries: list[dict[str, Any]]
) -> None:
    slow_to_start(1, monkeypatch)
    start_local_ray(3, **QUIET)
    assert [options["num_cpus"] for options in tries] == [3, 3]
    assert ray.cluster_resources()["CPU"] == 3
    assert len(ray_processes()) == 2, "nothing of the first one is left"
    assert neighbour.poll() is None


def test_other_processes_outlive_ray(neighbour: subprocess.Popen[bytes]) -> None:
    start_local_ray(1, **QUIET)
    assert len(ray_processes()) == 2
    stop_ray()
    assert not ray_processes()
    assert neighbour.poll() is None


def test_a_process_of_ray_may_end_just_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = psutil.wait_procs
    found: list[psutil.Process] = []

    def ending(processes: list[psutil.Process], timeout: float) -> tuple[list[psutil.Process], list[psutil.Process]]:
        """Wait as psutil does. Those that are then still running end before the caller hears of them."""
        gone, alive = wait(processes, timeout=timeout)
        for process in alive:
            process.kill()
            process.wait()
        found.extend(alive)
        return gone, alive

    monkeypatch.setattr(psutil, "wait_procs", ending)
    sleep = "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", sleep, str(Path(ray.__file__).parent)]) as daemon:
        stop_ray()
        daemon.kill()  # if it was not found
    assert [process.pid for process in found] == [daemon.pid]


def test_one_that_never_starts_says_so(monkeypatch: pytest.MonkeyPatch, tries: list[dict[str, Any]]) -> None:
    slow_to_start(3, monkeypatch)
    with pytest.raises(Exception, match="timed out during startup"):
        start_local_ray(1, **QUIET)
    assert len(tries) == 3


def test_one_that_cannot_start_is_not_tried_again(tmp_path: Path, tries: list[dict[str, Any]]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        start_local_ray(1, _temp_dir=str(tmp_path / "file" / "folder"), **QUIET)
    assert len(tries) == 1


def test_a_cluster_of_another_version_is_refused() -> None:
    """Both are new processes without tokens, since Ray keeps those of a process's first cluster."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["RAY_AUTH_MODE"] = "disabled"
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    with cluster:
        assert cluster.stdout is not None
        address = cluster.stdout.readline().strip()
        joining = [sys.executable, "-c", JOIN, address]
        answer = subprocess.run(joining, env=environment, capture_output=True, text=True, check=True)
        cluster.communicate()
    assert re.search(rf"(?s){address} cannot be joined: Version mismatch.*Ray: 0\.0\.1.*Install", answer.stdout)
    assert cluster.returncode == 0
