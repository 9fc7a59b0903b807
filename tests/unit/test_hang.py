"""A trainer that makes no progress: found out by its lease, its stacks kept, its processes ended."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra import processes
from rlcore.process import innermost, pid_of
from rlcore.segment.lease import Lease
from tasks.driver.health import HangWatch, end_stuck_trainer

# A trainer with a worker below it in a session of its own; both are stuck in C, and a third answers no signal.
STUCK = """
import os, subprocess, sys, threading, time
from pathlib import Path
from rlcore.process import dump_on_signal
def stuck_here():
    (live / f"stuck-{name}").touch()
    time.sleep(600)
live = Path(sys.argv[1])
name = sys.argv[2]
dump_on_signal(live, name, os.getpid())
if name == "trainer":
    again = [sys.executable, "-c", open(sys.argv[3]).read(), sys.argv[1], "rank-0", ""]
    subprocess.Popen(again, start_new_session=True)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
threading.Thread(target=lambda: time.sleep(600), daemon=True).start()
stuck_here()
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_stuck_means_no_renewal_of_the_lease_for_the_deadline(tmp_path: Path) -> None:
    clock = Clock()
    watch = HangWatch(tmp_path / "lease.json", 1.0, now=clock)
    clock.now = 59
    assert not watch.stuck()  # still starting
    lease = Lease(tmp_path / "lease.json")
    lease.acquire("t")
    clock.now = 100
    assert not watch.stuck()
    clock.now = 159
    assert not watch.stuck()
    lease.renew()
    clock.now = 161
    assert not watch.stuck()
    clock.now = 222
    assert watch.stuck()


def test_a_start_that_never_takes_the_lease_is_stuck_too(tmp_path: Path) -> None:
    clock = Clock()
    watch = HangWatch(tmp_path / "lease.json", 1.0, now=clock)
    clock.now = 61
    assert watch.stuck()


def test_the_stacks_of_every_process_are_kept_and_all_are_ended(tmp_path: Path) -> None:
    code, live, mark = tmp_path / "stuck.py", tmp_path / "stacks" / "live", "hang-test"
    code.write_text(STUCK)
    args = [sys.executable, "-c", STUCK, str(live), "trainer", str(code)]
    child = processes.start(args, env={"PYTHONPATH": ":".join(sys.path)}, mark=mark, ends_with_parent=True)
    deadline = time.monotonic() + 60
    while len(list(live.glob("stuck-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    error = end_stuck_trainer(tmp_path, mark, 30)
    child.wait()
    assert not processes.marked(mark)
    kept = sorted((tmp_path / "stacks" / "hang-1").glob("*.txt"))
    assert [path.stem.rpartition("-")[0] for path in kept] == ["rank-0", "trainer"]
    assert pid_of(kept[1]) == child.pid
    for path in kept:
        assert path.read_text().count("most recent call first") == 2  # both threads
    assert str(error).count("in stuck_here") == 2
    assert "no progress for 30 minutes (segment.hang_minutes)" in str(error)


def test_a_process_that_is_gone_or_dumb_is_named(tmp_path: Path) -> None:
    live = tmp_path / "stacks" / "live"
    live.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    (live / f"rank-0-{process.pid}.txt").touch()
    assert f"rank-0-{process.pid}:\n    it did not answer" in str(end_stuck_trainer(tmp_path, "nobody has this", 1))


def test_the_main_thread_is_the_current_one() -> None:
    dump = (
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in other\n\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "b.py", line 2 in inner\n  File "c.py", line 3 in outer\n'
    )
    assert innermost(dump) == ['File "b.py", line 2 in inner', 'File "c.py", line 3 in outer']
    assert innermost("") == []


def test_the_innermost_frames_name_who_waits_even_while_the_lease_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, dump = Lease(tmp_path / "lease.json"), tmp_path / "dump.txt"
    lease.acquire("mine")

    def dump_stacks_during_fsync(descriptor: int) -> None:
        with dump.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=False)

    def wait_for_the_disk() -> None:
        lease.renew(progress=False)

    monkeypatch.setattr("os.fsync", dump_stacks_during_fsync)
    wait_for_the_disk()
    frames = innermost(dump.read_text())
    assert frames[0].endswith("in dump_stacks_during_fsync")
    assert any(frame.endswith("in wait_for_the_disk") for frame in frames)
