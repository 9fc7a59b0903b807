import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import LeaseLostError, StorageError
from rlcore.files import write_json_atomically
from rlcore.jobs.segment import StopRequest
from rlcore.segment import lease as lease_module
from rlcore.segment.lease import Control, ControlState, Lease, LeaseInfo, holder_alive

HOLDER = """
import sys
from pathlib import Path
from rlcore.segment.lease import Lease
Lease(Path(sys.argv[1])).acquire(sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


def _start(path: Path, token: str) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLDER, str(path), token]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture(autouse=True)
def signals_as_before():
    """What is tested here takes SIGTERM and SIGINT for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@contextmanager
def _holder(path: Path, token: str):
    process = _start(path, token)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def _edit(path: Path, **changes) -> LeaseInfo:
    tree = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(tree))
    return LeaseInfo.model_validate(tree)


def test_acquire_renew_release(tmp_path):
    path = tmp_path / "run" / "lease.json"
    lease = Lease(path)
    assert lease.read() is None
    assert lease.holder() is None
    info = lease.acquire("a")
    assert (info.token, info.pid) == ("a", os.getpid())
    assert lease.holder() == info
    assert holder_alive(path) == info
    lease.renew()
    assert lease.read().renewed_at >= info.renewed_at
    lease.release()
    assert not path.exists()
    with pytest.raises(LeaseLostError, match="does not hold"):
        lease.renew()
    Lease(path).acquire("b")
    assert [file.name for file in path.parent.iterdir() if file.name != "lease.json.lock"] == ["lease.json"]


def test_a_living_trainer_is_not_replaced_and_a_killed_one_is_even_before_it_is_reaped(tmp_path):
    path = tmp_path / "lease.json"
    with _holder(path, "first") as process:
        with pytest.raises(LeaseLostError, match=rf"held by pid {process.pid} on .*token first"):
            Lease(path).acquire("second")
        assert holder_alive(path).pid == process.pid
        _edit(path, renewed_at=0.0)  # silent, but alive: on this host the process decides
        assert holder_alive(path) is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie until somebody collects it
        assert process.returncode is None
        assert holder_alive(path) is None
        Lease(path).acquire("second")
    assert holder_alive(path).token == "second"


def _before_it_writes(act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do ``act`` once, right before the next lease file is written: whoever writes it has decided by then."""

    def after_the_act(path: Path, text: str) -> None:
        monkeypatch.setattr(lease_module, "write_json_atomically", write_json_atomically)
        act()
        write_json_atomically(path, text)

    monkeypatch.setattr(lease_module, "write_json_atomically", after_the_act)


def _without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network filesystem that carries no locks between hosts."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


DIES_WHILE_RENEWING = """
import os
import sys
from pathlib import Path
from rlcore.segment.lease import Lease
lease = Lease(Path(sys.argv[1]))
lease.acquire("first")
Path.replace = lambda *_: os.kill(os.getpid(), 9)
lease.renew()
"""


def test_what_a_trainer_was_writing_when_it_was_killed_is_removed_by_the_next_one(tmp_path):
    path = tmp_path / "lease.json"
    killed = subprocess.run([sys.executable, "-c", DIES_WHILE_RENEWING, str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".lease.json.*"))) == 1
    Lease(path).acquire("second")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lease.json", "lease.json.lock"]


@pytest.mark.parametrize("dead", [False, True])
def test_deciding_and_writing_are_under_one_lock(tmp_path, monkeypatch, dead):
    path = tmp_path / "lease.json"
    if dead:
        with _holder(path, "dead"):
            pass
    locked = []

    def look() -> None:
        with path.with_name("lease.json.lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked.append(True)

    _before_it_writes(look, monkeypatch)
    Lease(path).acquire("one")
    assert locked == [True], "another one could have decided meanwhile"


def test_without_locks_the_link_lets_only_one_in(tmp_path, monkeypatch):
    path, other = tmp_path / "lease.json", Lease(tmp_path / "lease.json")
    _without_locks(monkeypatch)
    _before_it_writes(lambda: other.acquire("other"), monkeypatch)
    with pytest.raises(LeaseLostError, match=r"was just taken by .*token other"):
        Lease(path).acquire("slow")
    assert Lease(path).read().token == "other"
    other.renew()


def test_without_locks_the_last_of_two_that_take_over_wins_and_the_other_stops(tmp_path, monkeypatch):
    path, other, last = tmp_path / "lease.json", Lease(tmp_path / "lease.json"), Lease(tmp_path / "lease.json")
    with _holder(path, "dead"):
        pass
    _without_locks(monkeypatch)
    _before_it_writes(lambda: other.acquire("other"), monkeypatch)
    last.acquire("last")
    with pytest.raises(LeaseLostError, match=r"now held by .*token last.* must stop"):
        other.renew()
    last.renew()


def test_without_locks_one_that_is_written_over_at_once_does_not_begin(tmp_path, monkeypatch):
    path = tmp_path / "lease.json"
    with _holder(path, "dead"):
        pass
    _without_locks(monkeypatch)

    def written_over(path: Path, text: str) -> None:
        write_json_atomically(path, text)
        _edit(path, token="other")

    monkeypatch.setattr(lease_module, "write_json_atomically", written_over)
    with pytest.raises(LeaseLostError, match=r"now held by .*token other"):
        Lease(path).acquire("first")


def test_a_reused_pid_is_not_the_holder(tmp_path):
    path = tmp_path / "lease.json"
    info = Lease(path).acquire("old")
    _edit(path, started=info.started - 10)
    assert holder_alive(path) is None
    Lease(path).acquire("new")


class Clock:
    """A monotonic clock that only sleeping moves on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.while_asleep = lambda: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.while_asleep()


def _elsewhere(path: Path, skew: float) -> None:
    """The lease of a trainer on another host, just renewed, whose clock is ``skew`` seconds ahead of ours."""
    Lease(path).acquire("there")
    _edit(path, host="elsewhere/12345678", pid=2**22 + 1, renewed_at=time.time() + skew)


SKEWS = [-300.0, 0.0, 300.0]


@pytest.mark.parametrize("skew", SKEWS)
def test_a_trainer_on_another_host_lives_whatever_its_clock_says(tmp_path, skew):
    path = tmp_path / "lease.json"
    _elsewhere(path, skew)
    assert holder_alive(path) is not None
    clock = Clock()
    lease = Lease(path, deadline=120, now=clock)
    for _ in range(10):
        assert lease.holder() is not None
        clock.now += 119
        _edit(path, renewed_at=lease.read().renewed_at + 119)
    assert lease.holder() is not None


@pytest.mark.parametrize("skew", SKEWS)
def test_a_trainer_on_another_host_is_dead_once_its_lease_stays_the_same_for_the_deadline(tmp_path, skew):
    path = tmp_path / "lease.json"
    _elsewhere(path, skew)
    clock = Clock()
    lease = Lease(path, deadline=120, now=clock)
    assert lease.holder() is not None
    clock.now += 120
    assert lease.holder() is not None
    lease.remove_dead()
    assert path.exists()
    clock.now += 1
    assert lease.holder() is None
    lease.remove_dead()
    assert not path.exists()


@pytest.mark.parametrize("skew", SKEWS)
def test_a_lease_held_elsewhere_is_watched_before_it_is_taken_over(tmp_path, skew):
    path = tmp_path / "lease.json"
    _elsewhere(path, skew)
    clock = Clock()
    Lease(path, deadline=120, now=clock, sleep=clock.sleep).acquire("here")
    assert 120 < clock.now - 1000 < 125
    assert Lease(path).read().token == "here"

    _elsewhere(tmp_path / "alive.json", skew)
    clock = Clock()
    alive = Lease(tmp_path / "alive.json", deadline=120, now=clock, sleep=clock.sleep)
    clock.while_asleep = lambda: clock.now < 1060 or _edit(tmp_path / "alive.json", renewed_at=time.time() + skew)
    with pytest.raises(LeaseLostError, match=r"on elsewhere.*by its own clock"):
        alive.acquire("here")
    assert clock.now - 1000 == 60


def test_a_trainer_that_finds_another_token_is_fenced_and_leaves_it_alone(tmp_path):
    path = tmp_path / "lease.json"
    lease = Lease(path)
    lease.acquire("mine")
    theirs = _edit(path, token="theirs")
    with pytest.raises(LeaseLostError, match=r"token theirs.*expected token mine"):
        lease.renew()
    lease.release()
    assert lease.read() == theirs
    path.unlink()
    other = Lease(path)
    other.acquire("x")
    path.unlink()
    with pytest.raises(LeaseLostError, match="held by nobody"):
        other.renew()


def test_a_damaged_file_is_reported(tmp_path):
    for path, read in (
        (tmp_path / "l.json", holder_alive),
        (tmp_path / "c.json", lambda p: Control(p).read()),
    ):
        path.write_text('{"token"')
        with pytest.raises(StorageError, match="damaged"):
            read(path)


def test_control_is_what_the_driver_last_said(tmp_path):
    control = Control(tmp_path / "control.json")
    assert control.read() is None
    before = time.time()
    control.beat(3)
    assert (control.read().through_segment, control.read().stop) == (3, False)
    assert control.read().heartbeat >= before
    assert control.beat(4, stop=True) == control.read()
    assert [path.name for path in tmp_path.iterdir()] == ["control.json"]


@settings(max_examples=30)  # every beat and every look is on disk
@given(skew=st.floats(-300, 300), beats=st.lists(st.integers(1, 119), max_size=20))  # whole seconds: sums are exact
def test_a_trainer_knows_a_living_driver_from_a_lost_one_whatever_its_clock_says(skew, beats):
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        lease, control = Lease(Path(folder) / "lease.json"), Control(Path(folder) / "control.json")
        lease.acquire("t")
        stop = StopRequest(lease, control, 120.0, now=clock)

        def beat() -> None:  # as the driver's clock has it
            state = ControlState(through_segment=9, heartbeat=clock.now + 1e9 + skew, stop=False)
            write_json_atomically(Path(folder) / "control.json", state.model_dump_json())

        beat()
        assert not stop.preempted()
        for seconds in beats:
            clock.now += seconds
            assert not stop.preempted()
            beat()
            assert not stop.preempted()
        clock.now += 120
        assert not stop.preempted()
        clock.now += 1
        assert stop.preempted()


def test_a_driver_that_falls_silent_ends_the_wait_for_the_next_segment(tmp_path):
    clock = Clock()
    lease, control = Lease(tmp_path / "lease.json"), Control(tmp_path / "control.json")
    lease.acquire("t")
    control.beat(0)
    stop = StopRequest(lease, control, 120.0, now=clock, sleep=clock.sleep)
    assert stop.wants(0)
    assert not stop.wants(1)
    assert 120 < clock.now - 1000 < 121


def test_only_what_gets_done_counts_as_progress(tmp_path):
    lease = Lease(tmp_path / "lease.json")
    first = lease.acquire("t")
    lease.renew(progress=False)
    idle = lease.read()
    assert idle.renewed_at > first.renewed_at
    assert idle.progress == first.progress
    lease.renew()
    assert lease.read().progress == first.progress + 1
