"""Machines on this machine: each with its own network, processes, host name, /dev/shm and temporary files.

Linux namespaces, no container software. All of them, and what runs in them, live inside ``inside``'s own process
namespace, so nothing of them outlives it, whatever goes wrong.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/mnt/shared")  # on every host; all else that they write is their own
LOCAL = Path("/mnt/local")
_NETWORK = "10.77.0"
OUTSIDE = f"{_NETWORK}.254"  # the address of ``inside``'s own process, which every host reaches
# Its own name is a loopback address, as on Debian: what looks for its address by its name is wrong. There is no DNS.
# The way out exists so that a process which asks the kernel for its address gets this one; nothing answers there.
_INIT = f"""
hostname $0
mount -t tmpfs tmpfs {LOCAL}
mount -t tmpfs tmpfs /dev/shm
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' $0 > {LOCAL}/hosts
mount --bind {LOCAL}/hosts /etc/hosts
: > {LOCAL}/resolv.conf
mount --bind {LOCAL}/resolv.conf /etc/resolv.conf
ip link set lo up
until ip link show host0 >/dev/null 2>&1; do sleep 0.05; done
ip address add $1/24 dev host0
ip link set host0 up
ip route add default via {OUTSIDE}
exec sleep infinity
"""
_BRIDGE = f"ip link set lo up; ip link add net0 type bridge; ip address add {OUTSIDE}/24 dev net0; ip link set net0 up"


def why_not() -> str | None:
    """What keeps this machine from having more of them; None: nothing."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount", "hostname", "gcc") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} here"
    tried = subprocess.run(
        [*_unshare(), "sh", "-c", f"mount -t tmpfs tmpfs /mnt && {_BRIDGE}"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


def inside(folder: Path, module: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module`` where hosts can be made; ``folder`` is ``SHARED`` there."""
    prepare = f"mount -t tmpfs tmpfs /mnt && mkdir /mnt/shared {LOCAL} && mount --bind {folder} {SHARED} && {_BRIDGE}"
    return subprocess.run(
        [*_unshare(), "sh", "-c", f'{prepare} && exec "$@"', "sh", sys.executable, "-m", module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def _unshare() -> list[str]:
    root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *root, "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


@cache
def _skewed_clock() -> Path:
    """A library that moves the clock of what preloads it."""
    made = SHARED / "skew.so"
    source = Path(__file__).with_name("skew.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", made, source, "-ldl", "-lpthread"], check=True)
    return made


def connect(pid: int, link: str) -> None:
    """Wait until a process has a network namespace of its own, and connect that to the bridge as ``host0``."""
    ours = Path(f"/proc/{os.getpid()}/ns/net").readlink()
    while Path(f"/proc/{pid}/ns/net").readlink() == ours:
        time.sleep(0.02)
    for words in (
        f"link add {link} type veth peer name host0 netns {pid}",
        f"link set {link} master net0",
        f"link set {link} up",
    ):
        subprocess.run(["ip", *words.split()], check=True)


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    address: str
    process: subprocess.Popen[bytes]
    skew: int = 0  # seconds that its wall clock is ahead

    @classmethod
    def start(cls, name: str, number: int, skew: int = 0) -> Host:
        address = f"{_NETWORK}.{number}"
        process = subprocess.Popen(
            [
                *("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *("sh", "-ec", _INIT, name, address),
            ]
        )
        connect(process.pid, f"host{number}")
        host = cls(name, address, process, skew)
        while subprocess.run(
            host.command("ip", "route", "get", "1.1.1.1"), capture_output=True, check=False
        ).returncode:
            time.sleep(0.05)
        return host

    def command(self, *words: str) -> list[str]:
        """The same command, to be run on this host."""
        (init,) = psutil.Process(self.process.pid).children()
        return ["nsenter", "--target", str(init.pid), "--all", "--wd=" + str(ROOT), *words]

    def environment(self) -> dict[str, str]:
        clock = {"LD_PRELOAD": str(_skewed_clock()), "RLFLOW_TEST_SKEW": str(self.skew)} if self.skew else {}
        return {**os.environ, "TMPDIR": str(LOCAL), **clock}

    def occupy(self, pid: int) -> None:
        """Give this pid to a process of its own, which does nothing."""
        told = self.run(["sh", "-c", f"echo {pid - 1} > /proc/sys/kernel/ns_last_pid; sleep 9999 >&- 2>&- & echo $!"])
        if int(told) != pid:
            raise RuntimeError(f"{self.name} gave its process the pid {told.strip()}, expected {pid}")

    def run(self, words: Sequence[str]) -> str:
        answer = subprocess.run(
            self.command(*words), env=self.environment(), capture_output=True, text=True, check=False
        )
        if answer.returncode:
            raise RuntimeError(
                f"{words} on {self.name} ended with {answer.returncode}:\n{answer.stdout}{answer.stderr}"
            )
        return answer.stdout

    def die(self) -> None:
        """SIGKILL to everything that runs on it, at one moment."""
        (init,) = psutil.Process(self.process.pid).children()
        init.kill()
        self.process.wait()

    def unplug(self) -> None:
        """Nothing that it sends arrives any more, not even that it is gone."""
        number = self.address.rpartition(".")[2]
        subprocess.run(["ip", "link", "set", f"host{number}", "down"], check=True)
