"""Claims of GPUs, among real processes. No GPU is needed: CUDA_VISIBLE_DEVICES names those that there are."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
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
_LOOK = """
import os
from rlcore.gpus import claim_gpus, free_gpus
os.setuid(12345)
print(*free_gpus())
claim_gpus(1)
print(*free_gpus())
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def machine() -> Iterator[list[str]]:
    """Names of four GPUs that no other process knows."""
    names = [f"{uuid.uuid4().hex}-{index}" for index in range(4)]
    yield names
    for name in names:
        (gpus.FOLDER / f"gpu-{name}").unlink(missing_ok=True)


@pytest.fixture
def start(machine: list[str], tmp_path: Path) -> Iterator[Start]:
    """Starts a process that claims as many GPUs as its argument says, and holds them until it ends."""
    with ExitStack() as ends:

        def one(*words: str, visible: tuple[int, ...] = (0, 1, 2, 3)) -> subprocess.Popen[str]:
            own = {"TMPDIR": tempfile.mkdtemp(dir=tmp_path)}  # as each trainer has
            process = subprocess.Popen(
                [sys.executable, "-c", _CLAIM, *words],
                env=os.environ | own | {"CUDA_VISIBLE_DEVICES": ",".join(machine[index] for index in visible)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        yield one


@pytest.fixture
def here(machine: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This process is on the same machine, and forgets its claims at the end."""
    claimed: dict[str, int] = {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(machine))
    monkeypatch.setattr(gpus, "_claimed", claimed)
    monkeypatch.setattr(gpus, "_POLL_SECONDS", 0.01)
    yield monkeypatch
    for file in claimed.values():
        os.close(file)


def said(process: subprocess.Popen[str]) -> str:
    """The next line: "waits", or the GPUs that it has got, by their numbers."""
    assert process.stdout is not None
    return "".join(name.rpartition("-")[2] for name in process.stdout.readline().strip().split(","))


def test_two_runs_of_two_gpus_share_four_and_a_third_waits_until_one_is_killed(start: Start) -> None:
    first = start("2")
    assert said(first) == "01"
    assert said(start("2")) == "23"
    third = start("2")
    assert said(third) == "waits"
    first.kill()
    while (word := said(third)) == "waits":
        pass
    assert word == "01"


def test_a_run_that_needs_more_than_are_free_takes_none_of_them(start: Start) -> None:
    assert said(start("3")) == "012"
    assert said(start("2")) == "waits"
    assert said(start("1")) == "3"


def test_a_run_sees_only_the_gpus_that_its_environment_names(start: Start) -> None:
    assert said(start("1", visible=(2, 3))) == "2"
    assert said(start("2", visible=(1, 2, 3))) == "13"


def test_a_program_that_takes_the_place_of_the_process_holds_the_claim(start: Start) -> None:
    assert said(start("4", "sleep", "600")) == "0123"
    assert said(start("1")) == "waits"


@pytest.mark.usefixtures("here")
def test_a_process_that_has_its_gpus_claims_no_more(machine: list[str]) -> None:
    gpus.claim_gpus(2)
    gpus.claim_gpus(1)  # would wait for ever if it took its own claim for another's
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(machine[:2])


def test_a_wait_ends_when_the_run_has_to_stop(start: Start, here: pytest.MonkeyPatch) -> None:
    assert said(start("4")) == "0123"
    asked = []

    def stop() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise PreemptedError("stop")

    with pytest.raises(PreemptedError):
        gpus.claim_gpus(1, waiting=stop)
    assert len(asked) == 3
    assert gpus.free_gpus() == []
    assert gpus.shortage(1) == "0 of 4 GPU(s) are free"
    assert gpus.shortage(5) == ""  # no wait would help
    here.setenv(gpus.SHARE, "1")
    gpus.claim_gpus(1, waiting=stop)  # does not wait


@pytest.mark.usefixtures("here")
def test_more_gpus_than_there_are_is_an_error_of_those_who_need_them(machine: list[str]) -> None:
    gpus.claim_gpus(5)
    assert gpus.free_gpus() == machine


def test_the_driver_counts_gpus_where_the_environment_names_none(here: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here.setattr(gpus, "FOLDER", tmp_path / "gpus")
    here.setattr(gpus, "_count", lambda: 3)
    here.delenv("CUDA_VISIBLE_DEVICES")
    gpus.claim_gpus(2)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["CUDA_DEVICE_ORDER"]) == ("0,1", "PCI_BUS_ID")
    here.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.visible_gpus() == []


@pytest.mark.usefixtures("here")
def test_another_user_of_the_machine_meets_the_claim(machine: list[str]) -> None:
    gpus.claim_gpus(3)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(machine)}
    other = subprocess.run([sys.executable, "-c", _LOOK], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.splitlines() == [machine[3], ""]
