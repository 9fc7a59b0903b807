"""Claims of GPUs, among real processes. No GPU is needed: CUDA_VISIBLE_DEVICES names those that there are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rlcore import gpus
from rlcore.errors import PreemptedError

_CLAIM = """
import os, sys
from rlcore.gpus import claim_gpus
def waits():
    print("waits", flush=True)
claim_gpus(int(sys.argv[1]), waiting=waits, inherited=len(sys.argv) > 2)
print(os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
if len(sys.argv) > 2:
    os.execvp(sys.argv[2], sys.argv[2:])
sys.stdin.read()
"""
_OTHER = 12_345  # a user
_LOOK = "print(free_gpus()); claim_gpus(1); print(free_gpus())"
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that claims as many GPUs as its argument says, and holds them until it ends."""
    with ExitStack() as ends:

        def one(*words: str, visible: str = "0,1,2,3") -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", _CLAIM, *words],
                env=os.environ | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": visible},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        yield one


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This process is on the same machine with four GPUs, and forgets its claims at the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    claimed: dict[str, int] = {}
    monkeypatch.setattr(gpus, "_claimed", claimed)
    monkeypatch.setattr(gpus, "_POLL_SECONDS", 0.01)
    yield monkeypatch
    for file in claimed.values():
        os.close(file)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_two_runs_of_two_gpus_share_four_and_a_third_waits_until_one_is_killed(start: Start) -> None:
    first, second = start("2"), None
    assert line(first) == "0,1"
    second = start("2")
    assert line(second) == "2,3"
    third = start("2")
    assert line(third) == "waits"
    first.kill()
    while (said := line(third)) == "waits":
        pass
    assert said == "0,1"


def test_a_run_that_needs_more_than_are_free_takes_none_of_them(start: Start) -> None:
    assert line(start("3")) == "0,1,2"
    assert line(start("2")) == "waits"
    assert line(start("1")) == "3"


def test_a_run_sees_only_the_gpus_that_its_environment_names(start: Start) -> None:
    assert line(start("1", visible="2,3")) == "2"
    assert line(start("2", visible="1,2,3")) == "1,3"


def test_a_program_that_takes_the_place_of_the_process_holds_the_claim(start: Start) -> None:
    server = start("4", "sleep", "600")
    assert line(server) == "0,1,2,3"
    assert line(start("1")) == "waits"


@pytest.mark.usefixtures("here")
def test_a_process_that_has_its_gpus_claims_no_more() -> None:
    gpus.claim_gpus(2)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    gpus.claim_gpus(1)  # would wait for ever if it took its own claim for another's
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_wait_ends_when_the_run_has_to_stop(start: Start, here: pytest.MonkeyPatch) -> None:
    assert line(start("4")) == "0,1,2,3"
    asked = []

    def stop() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise PreemptedError("stop")

    with pytest.raises(PreemptedError):
        gpus.claim_gpus(1, waiting=stop)
    assert len(asked) == 3
    assert gpus.free_gpus() == []
    here.setenv(gpus.SHARE, "1")
    gpus.claim_gpus(1, waiting=stop)  # does not wait


@pytest.mark.usefixtures("here")
def test_more_gpus_than_there_are_is_an_error_of_those_who_need_them() -> None:
    gpus.claim_gpus(5)
    assert gpus.free_gpus() == ["0", "1", "2", "3"]


def test_the_driver_counts_gpus_where_the_environment_names_none(here: pytest.MonkeyPatch) -> None:
    here.setattr(gpus, "_count", lambda: 3)
    here.delenv("CUDA_VISIBLE_DEVICES")
    gpus.claim_gpus(2)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("0,1", "PCI_BUS_ID")
    here.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.visible_gpus() == []


def test_another_user_of_the_machine_meets_the_claim(here: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(folder.stat().st_mode | 0o011)
    tmp_path.chmod(0o1777)  # as /tmp is
    gpus.claim_gpus(3)
    other = subprocess.run(
        [sys.executable, "-c", f"from rlcore.gpus import *; os.setuid({_OTHER}); {_LOOK}"],
        env=os.environ | {"TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.splitlines() == ["['3']", "[]"]
