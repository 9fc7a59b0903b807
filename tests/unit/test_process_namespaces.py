"""Two containers of one machine that share its name, and pids that collide."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.processes import ProcessId, is_running, this_process
from rlcore.segment.lease import Lease, LeaseInfo, holder_alive
from tests.long.hosts import ROOT

_HOLD = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from infra.processes import this_process
from rlcore.segment.lease import Lease
Lease(Path(sys.argv[1])).acquire("there")
print(json.dumps(asdict(this_process())), flush=True)
sys.stdin.read()
"""


@contextmanager
def another_container(lease: Path) -> Iterator[None]:
    """A process with the name and the boot of this machine, but with other pids around it."""
    process = subprocess.Popen(
        ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", _HOLD, lease],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield
        assert process.stdin is not None
        process.stdin.close()


def test_a_pid_of_another_container_is_not_looked_up_here(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    with another_container(path):
        holder = Lease(path).read()
        assert holder is not None
        assert holder.pid == 1, "a pid that is in use here as well"
        assert holder_alive(path) == holder, "it lives, and only its renewals can tell"
        assert is_running(ProcessId(holder.pid, holder.started, holder.host)) is None
        free = holder.model_copy(update={"pid": 2**22 + 1})
        path.write_text(free.model_dump_json())
        assert holder_alive(path) == free


def test_a_process_of_this_container_is_known(tmp_path: Path) -> None:
    mine: LeaseInfo = Lease(tmp_path / "lease.json").acquire("here")
    assert holder_alive(tmp_path / "lease.json") == mine
    assert is_running(this_process()) is True
