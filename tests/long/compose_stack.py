"""Starts the services of a compose file as docker does, without docker: each in Linux namespaces of its own.

Runs where ``hosts.inside`` runs a module. A service has a root, network, processes and host name of its own, finds the
others by the file's names, and keeps its files over restarts. What its image would hold comes from this machine: system
folders and the tests' interpreter, read-only, and what the Dockerfile copies. tests/long/images stands for the images
of others. Not there: GPUs, limits of memory, the packages that the Dockerfile installs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil

from tests.long.compose_file import Image, Mount, Service, read_image
from tests.long.hosts import ROOT
from tests.shell import installed
from tests.stores import postgres_programs

IMAGES = Path(__file__).with_name("images")
_NETWORK = "10.77.0"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NEW_ROOT = "/mnt/root"
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc")
_PREFIX = Path(sys.prefix).resolve()
_PYTHON = _PREFIX / "bin" / "python"
_UNSHARE, _NSENTER, _CHROOT = (str(shutil.which(name)) for name in ("unshare", "nsenter", "chroot"))
_POLL_SECONDS = 0.2
_TRIES = 6  # docker goes on for ever
_NUMBERS = count(1)

Log = Callable[[str], None]


def stand_ins() -> dict[str, Image]:
    """What stands for the images of others, by the name without a tag."""
    programs = str(postgres_programs())
    return {
        "postgres": Image(
            {"PATH": f"{programs}:{_PATH}", "LANG": "C.UTF-8"},
            entrypoint=("/usr/local/bin/postgres.sh",),
            command=("postgres",),
        ),
        "minio/minio": Image({"PATH": "/usr/local/bin"}, entrypoint=("minio",)),
        # like the image's: a shell and the basic tools, without grep, sed and awk
        "minio/mc": Image({"PATH": "/usr/local/bin"}),
    }


@dataclass(slots=True)
class Container:
    """A running service."""

    process: subprocess.Popen[bytes]
    address: str

    @property
    def init(self) -> psutil.Process:
        """The first process of its process namespace."""
        (found,) = psutil.Process(self.process.pid).children()
        return found

    def is_inside(self) -> bool:
        """Whether its root is made and its command has begun."""
        try:
            return str(Path(f"/proc/{self.init.pid}/root").readlink()) == _NEW_ROOT
        except (OSError, ValueError, psutil.Error):
            return False


@dataclass(slots=True)
class Running:
    """A service and what has become of it so far."""

    service: Service
    image: Image
    layer: Path  # what it writes outside of volumes
    container: Container | None = None
    state: str = "created"  # then: running, healthy, restarting, exited
    code: int = 0
    starts: int = 0
    thread: threading.Thread | None = None


@dataclass(slots=True)
class Project:
    """All services of a compose file."""

    services: Mapping[str, Service]
    folder: Path  # volumes, container layers and logs
    source: Path  # the folder of the compose file
    running: dict[str, Running] = field(default_factory=dict)
    closing: threading.Event = field(default_factory=threading.Event)
    failure: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    # ---- what docker compose does ----

    def up(self) -> None:
        """Start all services in the order of their conditions; returns when all that last are up."""
        (self.folder / "hosts").touch()
        Path(_NEW_ROOT).mkdir(exist_ok=True)
        for name, service in self.services.items():
            image = read_image(self.source / "Dockerfile", service.target) if service.target else _foreign(service)
            self.running[name] = Running(service, image, self._layer(service, image))
            for address, published, inside in service.ports:
                self._publish(address, published, name, inside)
        for name in self.services:
            self._start_thread(name)
        self.wait_until_up()

    def run_again(self, name: str) -> None:
        """Start a service that has done its work once more, as a second ``up`` does; returns when it has ended."""
        self.running[name].state = "created"
        self._start_thread(name)
        self.wait_for(lambda: self.running[name].state == "exited", f"{name} ended")

    def kill(self, name: str) -> None:
        """SIGKILL to every process of a service."""
        found = self.running[name]
        starts = found.starts
        assert found.container is not None
        found.container.init.kill()
        self.wait_for(lambda: found.starts > starts, f"{name} was started again")

    def wait_until_up(self, seconds: float = 600) -> None:
        self.wait_for(self._is_up, "all services are up", seconds)

    def stop(self, name: str) -> float:
        """``docker compose stop``: the stop signal, and SIGKILL after the grace period; returns the seconds it took."""
        found, began = self.running[name], time.monotonic()
        container = found.container
        assert container is not None
        found.state = "stopped"
        container.init.send_signal(signal.Signals[found.service.stop_signal])
        try:
            container.process.wait(found.service.stop_seconds)
        except subprocess.TimeoutExpired:
            container.init.kill()
            container.process.wait()
        return time.monotonic() - began

    def start(self, name: str) -> None:
        """``docker compose start``."""
        found = self.running[name]
        assert found.thread is not None
        found.thread.join()
        self._start_thread(name)
        self.wait_for(lambda: found.state in ("running", "healthy"), f"{name} came back")

    def down(self) -> None:
        self.closing.set()
        for found in self.running.values():
            if found.container is not None and found.container.process.poll() is None:
                found.container.process.kill()

    def exec(self, name: str, *words: str, timeout: float = 120) -> str:
        """``docker compose exec``; its output."""
        answer = self._exec(name, words, timeout)
        if answer.returncode:
            raise RuntimeError(f"{words} in {name} ended with {answer.returncode}: {answer.stdout}{answer.stderr}")
        return answer.stdout

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self.failure or time.monotonic() > deadline:
                raise RuntimeError(self.failure or f"not true within {seconds} s: {what}\n{self.all_logs()}")
            time.sleep(_POLL_SECONDS)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def all_logs(self) -> str:
        return "\n".join(f"== {name}\n{self.end_of_log(name)}" for name in self.services)

    def end_of_log(self, name: str) -> str:
        return self.log(name).read_text(errors="replace")[-1500:] if self.log(name).exists() else ""

    # ---- how ----

    def _is_up(self) -> bool:
        return all(
            found.state
            == ("healthy" if found.service.health else "running" if found.service.restart != "no" else "exited")
            for found in self.running.values()
        )

    def _start_thread(self, name: str) -> None:
        found = self.running[name]
        found.thread = threading.Thread(target=self._keep_running, args=(found,), daemon=True)
        found.thread.start()

    def _keep_running(self, found: Running) -> None:
        """The life of a service."""
        try:
            self._live(found)
        except Exception as error:  # noqa: BLE001 - in a thread: the test must hear of it
            self.failure = self.failure or f"{found.service.name}: {error!r}"

    def _live(self, found: Running) -> None:
        service = found.service
        while not all(self._holds(other, wanted) for other, wanted in service.after.items()):
            if self.closing.wait(_POLL_SECONDS):
                return
        while not self.closing.is_set():
            container = self._start(found)
            self._watch(found, container)
            self._name(service.name, None)
            if self.closing.is_set() or found.state == "stopped":
                return
            found.code = container.process.wait()
            if service.restart == "no":
                found.state = "exited"
                if found.code:
                    self.failure = f"{service.name} ended with {found.code}:\n{self.end_of_log(service.name)}"
                return
            if found.starts >= _TRIES and found.state != "healthy":
                raise RuntimeError(f"ended {found.starts} times:\n{self.end_of_log(service.name)}")
            found.state = "restarting"
            time.sleep(_POLL_SECONDS)

    def _holds(self, other: str, wanted: str) -> bool:
        found = self.running[other]
        match wanted:
            case "service_healthy" if found.state == "unhealthy":
                raise RuntimeError(f"{other} is unhealthy:\n{self.end_of_log(other)}")
            case "service_healthy":
                return found.state == "healthy"
            case "service_completed_successfully":
                return found.state == "exited" and found.code == 0
            case "service_started":
                return found.starts > 0
        raise RuntimeError(f"the condition {wanted!r} is not known")

    def _watch(self, found: Running, container: Container) -> None:
        """Until it has ended; looks after its health meanwhile."""
        health, began, failures = found.service.health, time.monotonic(), 0
        if health is None:
            container.process.wait()
            return
        while True:
            try:
                container.process.wait(health.interval)
                return
            except subprocess.TimeoutExpired:
                pass
            try:
                healthy = self._exec(found.service.name, health.command, health.timeout).returncode == 0
            except (subprocess.TimeoutExpired, psutil.Error, ValueError):
                healthy = False
            if healthy:
                found.state, failures = "healthy", 0
            elif found.state == "healthy" or time.monotonic() - began > health.start_period:
                failures += 1
                if failures >= health.retries and found.state != "stopped":
                    found.state = "unhealthy"

    def _start(self, found: Running) -> Container:
        service, number = found.service, next(_NUMBERS)
        address = f"{_NETWORK}.{number}"
        words = [*(service.entrypoint or found.image.entrypoint), *(service.command or found.image.command)]
        if service.entrypoint and service.command is None:
            words = list(service.entrypoint)  # it clears the image's command
        if service.init:
            words = [str(_PYTHON), "/init.py", *words]
        with self.log(service.name).open("ab") as log:
            process = subprocess.Popen(
                [
                    *(_UNSHARE, "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"),
                    *("/bin/sh", "-ec", self._script(found, address), service.name, *self._as_user(found, words)),
                ],
                env=self._environment(found),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        ours = Path(f"/proc/{os.getpid()}/ns/net").readlink()
        while Path(f"/proc/{process.pid}/ns/net").readlink() == ours:
            time.sleep(0.02)
        link = f"c{number}"
        for line in (
            f"link add {link} type veth peer name host0 netns {process.pid}",
            f"link set {link} master net0",
            f"link set {link} up",
        ):
            subprocess.run(["ip", *line.split()], check=True)
        found.container = Container(process, address)
        while process.poll() is None and not found.container.is_inside():
            time.sleep(0.02)
        self._name(service.name, address)
        found.state, found.starts = "running", found.starts + 1
        return found.container

    def _environment(self, found: Running) -> dict[str, str]:
        """No variable of this machine's."""
        environment = {"PATH": _PATH, "HOSTNAME": _hostname(found.service.name)}
        for name, value in found.image.environment.items():
            environment[name] = re.sub(r"\$PATH", environment["PATH"], value)
        if found.service.target == "worker":
            environment["PYTHONPATH"] = "/opt/site:/opt/rlflow"  # for the Dockerfile's editable installation
        return environment | {"HOME": "/home/rlflow" if found.image.user else "/root", **found.service.environment}

    def _as_user(self, found: Running, words: Sequence[str]) -> list[str]:
        user = str(found.image.user)
        change = ["/usr/bin/setpriv", "--reuid", user, "--regid", user, "--clear-groups"] if found.image.user else []
        return [*change, "/usr/bin/env", "-C", found.image.folder, *words]

    def _exec(self, name: str, words: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        found = self.running[name]
        if found.container is None:
            raise ValueError(f"{name} does not run")
        pid = str(found.container.init.pid)
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--root"]
        return subprocess.run(
            [_NSENTER, "--target", pid, *spaces, *self._as_user(found, words)],
            env=self._environment(found),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def _name(self, name: str, address: str | None) -> None:
        """Only what runs has a name. Written in place: the file is mounted into every service."""
        with self.lock:
            hosts = self.folder / "hosts"
            lines = [
                line for line in hosts.read_text().splitlines() if line and line.split()[1] not in (name, "localhost")
            ]
            lines = ["127.0.0.1 localhost", *lines, *([f"{address} {name} {_hostname(name)}"] if address else [])]
            with hosts.open("r+") as file:
                file.write("\n".join(lines) + "\n")
                file.truncate()

    def _script(self, found: Running, address: str) -> str:
        """Makes the root of a container, in a mount namespace of its own, and starts the command there."""
        root, lines = (
            _NEW_ROOT,
            [
                f"image_path=$PATH; PATH={_PATH}",
                f"mount -t tmpfs -o mode=755 root {_NEW_ROOT}",
                f"cd {_NEW_ROOT}",
            ],
        )
        for name in _SYSTEM:
            path = Path("/") / name
            if path.is_symlink():
                lines.append(f"ln -s {path.readlink()} {name}")
            elif path.is_dir():
                lines += [f"mkdir {name}", f"mount --bind -o ro /{name} {name}"]
        lines += [
            "mkdir proc dev sys run mnt var",
            "mkdir -p var/lib var/tmp var/run var/cache",
            "mount -t proc proc proc",
            "mount --rbind /sys sys",
            "mount -t tmpfs -o mode=755 dev dev",
            "mkdir dev/shm dev/pts",
            "for name in null zero random urandom tty; do touch dev/$name; mount --bind /dev/$name dev/$name; done",
            "ln -s /proc/self/fd dev/fd; ln -s fd/0 dev/stdin; ln -s fd/1 dev/stdout; ln -s fd/2 dev/stderr",
            f"mount -t tmpfs -o mode=1777,size={found.service.shared_memory.removesuffix('b')} shm dev/shm",
        ]
        for path in sorted(found.layer.iterdir()):
            lines += [f"mkdir -p {path.name}", f"mount --bind {path} {path.name}"]
        for prefix in sorted({str(Path(sys.base_prefix).resolve()), str(_PREFIX)}):
            lines += [f"mkdir -p .{prefix}", f"mount --rbind {prefix} .{prefix}", f"mount -o remount,bind,ro .{prefix}"]
        lines += [f"mount --bind {found.layer.parent / 'local-bin' / found.service.name} usr/local/bin"]
        for mount in found.service.mounts:
            source, target = self._source(found, mount), f"{root}{mount.target}"
            make = f"mkdir -p {target}" if source.is_dir() else f"mkdir -p {Path(target).parent}; touch {target}"
            lines += [make, f"mount --bind {'-o ro' if mount.read_only else ''} {source} {target}"]
        lines += [
            f"cp {IMAGES / 'init.py'} init.py",
            f"mount --bind {self.folder / 'hosts'} etc/hosts",
            f"mount --bind {self.folder / 'passwd'} etc/passwd",
            "[ ! -e etc/resolv.conf ] || mount --bind /dev/null etc/resolv.conf",  # there is no DNS
            f"hostname {_hostname(found.service.name)}",
            "ip link set lo up",
            "until ip link show host0 >/dev/null 2>&1; do sleep 0.05; done",
            f"ip address add {address}/24 dev host0",
            "ip link set host0 up",
            f"ip route add default via {_NETWORK}.254",
            f'unset PWD OLDPWD; PATH=$image_path; exec {_CHROOT} {root} "$@"',
        ]
        return "\n".join(lines)

    def _source(self, found: Running, mount: Mount) -> Path:
        if not mount.is_volume:
            return (self.source / mount.source).resolve() if mount.source.startswith(".") else Path(mount.source)
        volume = self.folder / "volumes" / mount.source
        if not volume.exists():
            volume.mkdir(parents=True)
            made = found.layer / mount.target.lstrip("/")
            if made.exists():  # an empty volume gets what the image has there, owner included
                os.chown(volume, made.stat().st_uid, made.stat().st_gid)
        return volume

    def _layer(self, service: Service, image: Image) -> Path:
        """What the Dockerfile puts into the image, and what the container writes there."""
        layer = self.folder / "layers" / service.name
        tools = layer.parent / "local-bin" / service.name
        for folder in (layer, tools, layer / "tmp", layer / "home", layer / "root"):
            folder.mkdir(parents=True)
        (layer / "tmp").chmod(0o1777)
        for target in ("home/rlflow", *(name.lstrip("/") for name in image.folders)):
            (layer / target).mkdir(parents=True)
            shutil.chown(layer / target, image.user, image.user)
        for source, target in image.copied:
            inside = tools / Path(target).name if target.startswith("/usr/local/bin/") else layer / target.lstrip("/")
            _copy(ROOT / source, inside)
        if service.target == "worker":
            subprocess.run(["chown", "-R", f"{image.user}:{image.user}", layer / "opt/rlflow"], check=True)
            installed(layer / "opt")
            (layer / "opt/venv").symlink_to(_PREFIX)
        elif service.target == "servers":
            for name in ("prefect", "mlflow", "gunicorn", "uvicorn"):
                _run_script(tools / name, f'exec {_PYTHON.with_name(name)} "$@"')
            _run_script(tools / "python", f'exec {_PYTHON} "$@"')
        else:
            _foreign_tools(tools)
        self._passwd()
        return layer

    def _passwd(self) -> None:
        lines = [line for line in Path("/etc/passwd").read_text().splitlines() if line.split(":")[2] != "1000"]
        (self.folder / "passwd").write_text("\n".join([*lines, "rlflow:x:1000:1000::/home/rlflow:/bin/sh", ""]))

    def _publish(self, address: str, published: int, name: str, inside: int) -> None:
        """As docker's proxy does."""
        listener = socket.create_server((address, published))

        def accept() -> None:
            while True:
                client, _ = listener.accept()
                container = self.running[name].container
                try:
                    server = socket.create_connection((container.address if container else "", inside), timeout=10)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=_pump, args=(source, sink), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()


def _hostname(service: str) -> str:
    """The same after each restart, as docker's."""
    return hashlib.sha256(service.encode()).hexdigest()[:12]


def _foreign(service: Service) -> Image:
    name = service.image.partition(":")[0]
    if name not in stand_ins():
        raise RuntimeError(f"nothing stands for the image {service.image}")
    return stand_ins()[name]


def _foreign_tools(tools: Path) -> None:
    shutil.copy(IMAGES / "postgres.sh", tools)
    (tools / "postgres.sh").chmod(0o755)
    for name, module in (("minio", "objects.py"), ("mc", "mc.py")):
        shutil.copy(IMAGES / module, tools)
        _run_script(tools / name, f'exec {_PYTHON} /usr/local/bin/{module} "$@"')
    for name in ("cat", "echo", "mkdir", "rm", "sleep", "test"):
        (tools / name).symlink_to(Path("/bin") / name)


def _run_script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".env"), dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, sink):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
