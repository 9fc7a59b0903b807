"""Two users of one machine: what one can read and reach while the other one trains."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore.segment.journal import read_journal
from tests.shell import ROOT, new_shell

TRAINS, LOOKS = 61_001, 61_002  # users without an account
_SETTINGS = (
    "model.tiny.warm_start_steps=0",
    "segment.steps=2",
    "training.steps=400",
    "training.problems_per_batch=2",
    "rollout.group_size=2",
    "rollout.max_completion_tokens=8",
    "data.synthetic_problems=16",
)
_SECONDS = 600.0
# This interpreter and this project may be below a folder that only root can enter, such as its home.
_REACHABLE = """
home=$0; closed=$1; shift
if [ "$closed" != -- ]; then
    number=0; shown=
    while [ "$1" != -- ]; do
        number=$((number + 1)); mkdir "$home/.$number"; mount --bind "$1" "$home/.$number"; shown="$shown $1"; shift
    done
    mount -t tmpfs -o mode=755 tmpfs "$closed"
    number=0
    for folder in $shown; do
        number=$((number + 1)); mkdir -p "$folder"; mount --move "$home/.$number" "$folder"; rmdir "$home/.$number"
    done
fi
shift; exec "$@"
"""
_STRANGER = """
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
print("joined")
"""


@dataclass(frozen=True, slots=True)
class Training:
    home: Path
    command: subprocess.Popen[bytes]

    @property
    def data_dir(self) -> Path:
        return self.home / "lab" / "data"

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess):
                if process.uids().real == TRAINS:
                    found.append(process)
        return found

    def ports(self) -> dict[int, str]:
        """Each port that listens, and the program behind it."""
        found = {}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                for item in process.net_connections("tcp"):
                    if item.status == psutil.CONN_LISTEN:
                        found[item.laddr.port] = " ".join(process.cmdline())
        return found


def hidden() -> list[Path]:
    """The folder that only root can enter, and what is needed of those in it. Empty: all can be entered."""
    needed = {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, ROOT)}
    closed = {above for path in needed for above in path.parents if not above.stat().st_mode & stat.S_IXOTH}
    if not closed:
        return []
    top = min(closed, key=lambda path: len(path.parts))
    return [top, *(path for path in sorted(needed) if path.is_relative_to(top))]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A user with an ordinary umask, and a home that others may enter, as Debian makes them, trains in a terminal."""
    home = Path(tempfile.mkdtemp(prefix="two-users-"))
    home.chmod(0o755)
    (home / "lab").mkdir()
    for path in (home, home / "lab"):
        os.chown(path, TRAINS, TRAINS)
    said = tmp_path_factory.mktemp("two-users") / "log"
    variables = {"HOME": str(home), "TMPDIR": "/tmp", "PYTHONPATH": str(ROOT)}
    words = [word for setting in _SETTINGS for word in ("--set", setting)]
    with said.open("wb") as log:
        command = subprocess.Popen(
            [
                *("unshare", "--mount", "sh", "-ec", _REACHABLE, str(home), *map(str, hidden())),
                *("--", "setpriv", f"--reuid={TRAINS}", f"--regid={TRAINS}", "--clear-groups", "--bounding-set=-all"),
                *(sys.executable, "-m", "tasks.cli", "train", "grpo-gsm8k-tiny", "--run-id", "run", *words),
            ],
            cwd=ROOT,
            env=new_shell({**variables, "RLFLOW_DATA_DIR": str(home / "lab" / "data")}),
            stdout=log,
            stderr=log,
            umask=0o022,
        )
    mine = Training(home, command)
    try:
        deadline = time.monotonic() + _SECONDS
        while len(read_journal(mine.data_dir / "runs" / "run" / "journal.jsonl")) < 1:
            assert command.poll() is None, said.read_text()[-4000:]
            assert time.monotonic() < deadline, said.read_text()[-4000:]
            time.sleep(0.5)
        yield mine
    finally:
        for process in mine.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        command.wait()
        for path in [home, *filter(is_of_the_training, Path("/tmp").glob("rlflow-*"))]:
            shutil.rmtree(path)


def is_of_the_training(path: Path) -> bool:
    """Whether its user owns the file. One that another process has removed meanwhile is nobody's."""
    try:
        return path.lstat().st_uid == TRAINS
    except FileNotFoundError:
        return False


def as_the_other(ask: Callable[[], Any]) -> Any:
    """The answer to ``ask`` in a process of the other user; it may import nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(LOOKS, LOOKS, LOOKS)
            os.setresuid(LOOKS, LOOKS, LOOKS)
            os.write(writer, json.dumps(ask()).encode())
        except BaseException as error:  # noqa: BLE001 - the parent tells it
            os.write(writer, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text)


def open_to_this_user(folders: Iterable[Path]) -> list[str]:
    """What is in ``folders``, and they themselves, that this user can list, read or write."""
    found = []
    for folder in folders:
        inside = [Path(above, name) for above, names, files in os.walk(folder) for name in files + names]
        for path in (folder, *inside):
            if not path.is_symlink() and (os.access(path, os.R_OK) or os.access(path, os.W_OK)):
                found.append(str(path))
    return sorted(found)


def test_nothing_of_a_run_can_be_read_or_written(training: Training) -> None:
    runs = training.data_dir / "runs" / "run"
    assert (training.data_dir / "stack" / "login").exists()
    assert (runs / "lease.json").exists()
    assert any(map(is_of_the_training, Path("/tmp").glob("rlflow-*"))), "its temporary files"
    shared = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
    folders = [path for folder in shared for path in folder.iterdir() if is_of_the_training(path)]
    found = set(as_the_other(lambda: open_to_this_user(folders)))
    made_here = {str(training.home), str(training.home / "lab")}
    of_libraries = (f"{training.home}/.cache", f"{training.home}/.config")  # a list of fonts
    assert {path for path in found if not path.startswith(of_libraries)} == made_here
    assert not as_the_other(lambda: [path for path in found if os.access(path, os.W_OK)])
    assert as_the_other(lambda: not os.access(runs, os.X_OK))
    assert as_the_other(lambda: not os.access(training.data_dir / "compiled", os.W_OK | os.X_OK))


def test_no_environment_of_its_processes_can_be_read(training: Training) -> None:
    def readable() -> list[int]:
        found = []
        for process in pids:
            with suppress(OSError), open(f"/proc/{process}/environ", "rb") as file:
                if file.read(1):
                    found.append(process)
        return found

    pids = [process.pid for process in training.processes()]
    assert len(pids) > 5
    assert as_the_other(readable) == []


def test_its_servers_do_nothing_without_a_login(training: Training) -> None:
    def answer(port: int, path: str, data: bytes | None) -> int:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    (prefect,) = [port for port, command in training.ports().items() if "infra.stack.apps:prefect" in command]
    asked = [
        ("/api/flow_runs/filter", b"{}"), ("/api/deployments/filter", b"{}"), ("/api/work_pools/filter", b"{}"),
        ("/api/block_documents/filter", b"{}"), ("/api/flows/", b'{"name": "x"}'), ("/api/admin/version", None),
    ]  # fmt: skip
    assert answer(prefect, "/api/health", None) == 200  # here first, because the other user can import nothing
    assert as_the_other(lambda: [answer(prefect, path, data) for path, data in asked]) == [401] * len(asked)


def test_its_ray_takes_no_command_without_the_token(training: Training, tmp_path: Path) -> None:
    (gcs,) = [port for port, command in training.ports().items() if "gcs_server" in command.split(" ")[0]]
    environment = {name: value for name, value in new_shell().items() if not name.startswith("RAY_")}
    for more in ({}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        answer = subprocess.run(
            [sys.executable, "-c", _STRANGER, f"127.0.0.1:{gcs}"],
            env={**environment, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), **more},
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        assert answer.returncode != 0, answer.stdout
        assert "joined" not in answer.stdout
        assert "Authentic" in answer.stderr or "token" in answer.stderr, answer.stderr[-2000:]


_KNOWN = {
    "uvicorn": "Prefect and MLflow, with a login",
    "gcs_server": "Ray, with a token", "raylet": "Ray, with a token", "ray/_private": "Ray's agents, with a token",
    "ray::": "Ray's workers with a token; torch's and Gloo's, see docs/security.md",
    "rlcore.jobs.segment": "Ray's driver, with a token", "_private/monitor.py": "Ray's metrics, for everybody",
}  # fmt: skip


def test_every_port_that_listens_is_known(training: Training) -> None:
    ports = training.ports()
    sys.stderr.write("".join(f"{port}: {command[:150]}\n" for port, command in sorted(ports.items())))
    unknown = {port: name for port, name in ports.items() if not any(part in name for part in _KNOWN)}
    assert not unknown
