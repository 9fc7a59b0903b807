import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlcore.errors import LeaseLostError, StorageError
from rlcore.segment.lease import Control, Lease, LeaseInfo, holder_alive

HOLDER = """
import sys, time
from pathlib import Path
from rlcore.errors import LeaseLostError
from rlcore.segment.lease import Lease
while time.time() < float(sys.argv[3]):
    pass
try:
    Lease(Path(sys.argv[1])).acquire(sys.argv[2])
except LeaseLostError as error:
    print("lost", flush=True)
    sys.exit()
print("held", flush=True)
sys.stdin.read()
"""


def _start(path: Path, token: str, at: float = 0.0) -> subprocess.Popen:
    command = [sys.executable, "-c", HOLDER, str(path), token, str(at)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


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
    assert not lease.is_alive()
    info = lease.acquire("a")
    assert (info.token, info.pid) == ("a", os.getpid())
    assert lease.is_alive()
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
        time.sleep(0.1)  # a zombie now: this test is its parent and has not waited for it
        assert process.returncode is None
        assert holder_alive(path) is None
        Lease(path).acquire("second")
    assert holder_alive(path).token == "second"


def test_of_two_that_start_at_once_one_wins(tmp_path):
    path = tmp_path / "lease.json"
    at = time.time() + 1.0
    processes = [_start(path, token, at) for token in "ab"]
    answers = [process.stdout.readline() for process in processes]
    winner = Lease(path).read().token
    for process in processes:
        process.kill()
        process.communicate()
    assert sorted(answers) == ["held\n", "lost\n"]
    assert winner == "ab"[answers.index("held\n")]


def test_of_two_that_take_over_from_a_dead_one_at_once_one_wins(tmp_path):
    path = tmp_path / "lease.json"
    with _holder(path, "dead"):
        pass
    at = time.time() + 1.0
    processes = [_start(path, token, at) for token in "ab"]
    answers = [process.stdout.readline() for process in processes]
    for process in processes:
        process.kill()
        process.communicate()
    assert sorted(answers) == ["held\n", "lost\n"]


def test_a_reused_pid_is_not_the_holder(tmp_path):
    path = tmp_path / "lease.json"
    info = Lease(path).acquire("old")
    _edit(path, started=info.started - 10)
    assert holder_alive(path) is None
    Lease(path).acquire("new")


def test_a_holder_on_another_host_lives_until_the_deadline(tmp_path):
    path = tmp_path / "lease.json"
    Lease(path).acquire("there")
    _edit(path, host="elsewhere", pid=2**22 + 1, renewed_at=time.time() - 60)
    assert holder_alive(path, deadline=120) is not None
    with pytest.raises(LeaseLostError, match="on elsewhere"):
        Lease(path, deadline=120).acquire("here")
    assert holder_alive(path, deadline=30) is None
    Lease(path, deadline=30).acquire("here")


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
