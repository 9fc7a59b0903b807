"""Temporary folders of started processes: /tmp belongs to every user of the machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra import processes
from infra.errors import StorageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """That of the mark ``mine``, not there yet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield processes.temporary_folder("mine")
    processes.kill("mine")


def start() -> int:
    command = [sys.executable, "-c", "import os, pathlib; pathlib.Path(os.environ['TMPDIR'], 'socket').touch()"]
    return processes.start(command, env=os.environ, mark="mine", ends_with_parent=False).wait()


def test_a_folder_of_an_earlier_try_is_used_again(folder: Path) -> None:
    for _ in range(2):
        assert start() == 0
        assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == ["socket"]


def test_a_link_in_its_place_is_refused(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "of another user"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(StorageError, match=r"rlflow-mine is no folder of this user's alone.*Remove it"):
        start()
    assert not list(elsewhere.iterdir())
    folder.unlink()


def test_a_folder_that_others_may_enter_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StorageError, match="mode 777"):
        start()
    assert not list(folder.iterdir())


def test_another_users_folder_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 1234, 1234)
    with pytest.raises(StorageError, match="user 1234"):
        start()


def test_what_was_killed_has_ended_when_kill_returns(folder: Path) -> None:
    """The kernel takes a while to free its memory. Meanwhile nobody can read its mark."""
    code = "import time; held = b'x' * (1 << 30); print('ready', flush=True); time.sleep(60)"
    read, write = os.pipe()
    with os.fdopen(read) as lines:
        with os.fdopen(write, "wb") as output:
            child = processes.start(
                [sys.executable, "-c", code], env=os.environ, mark="mine", output=output, ends_with_parent=False
            )
        assert lines.readline() == "ready\n"
    processes.kill("mine")
    status = psutil.Process(child.pid).status()  # of a child that nobody has waited for
    assert child.wait() == -signal.SIGKILL
    assert status == psutil.STATUS_ZOMBIE
