"""Makes a container of Linux namespaces from what a compose file and a Dockerfile say."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil

from tests.long.compose_file import Image, Mount, Service, read_image
from tests.long.hosts import ROOT, connect
from tests.shell import installed
from tests.stores import postgres_programs

IMAGES = Path(__file__).with_name("images")
_NETWORK = "10.77.0"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NEW_ROOT = "/mnt/root"
_SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc")
_PREFIX = Path(sys.prefix).resolve()
_PYTHON = _PREFIX / "bin" / "python"
_UNSHARE, _NSENTER, _CHROOT = (str(shutil.which(name)) for name in ("unshare", "nsenter", "chroot"))
_NUMBERS = count(1)


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
            return str(Path(f"/proc/{self.init.pid}/root").readlink()) == NEW_ROOT
        except (OSError, ValueError, psutil.Error):
            return False


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the containers of a service are made."""

    service: Service
    image: Image
    folder: Path  # volumes, layers and names of all services
    source: Path  # the folder of the compose file

    @property
    def layer(self) -> Path:
        """What the service writes outside of volumes."""
        return self.folder / "layers" / self.service.name

    @property
    def tools(self) -> Path:
        """/usr/local/bin"""
        return self.folder / "tools" / self.service.name

    def make_layer(self) -> None:
        """What the Dockerfile puts into the image, and what the container writes there."""
        layer, tools, service, image = self.layer, self.tools, self.service, self.image
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
        self._write_users()

    def start(self, log_file: Path) -> Container:
        """A new container; returns when its command has begun."""
        service, number = self.service, next(_NUMBERS)
        address = f"{_NETWORK}.{number}"
        words = [*(service.entrypoint or self.image.entrypoint), *(service.command or self.image.command)]
        if service.entrypoint and service.command is None:
            words = list(service.entrypoint)  # it clears the image's command
        if service.init:
            words = [str(_PYTHON), "/init.py", *words]
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                [
                    *(_UNSHARE, "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"),
                    *("/bin/sh", "-ec", self._script(address), service.name, *self._as_user(words)),
                ],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        connect(process.pid, f"c{number}")
        container = Container(process, address)
        while process.poll() is None and not container.is_inside():
            time.sleep(0.02)
        return container

    def exec(self, container: Container, words: Sequence[str], timeout: float) -> subprocess.CompletedProcess[str]:
        """One more command in a running container.

        Raises:
            ValueError: it has just ended.
        """
        pid = str(container.init.pid)
        spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--root"]
        return subprocess.run(
            [_NSENTER, "--target", pid, *spaces, *self._as_user(words)],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def environment(self) -> dict[str, str]:
        """No variable of this machine's."""
        environment = {"PATH": _PATH, "HOSTNAME": hostname_of(self.service.name)}
        for name, value in self.image.environment.items():
            environment[name] = re.sub(r"\$PATH", environment["PATH"], value)
        if self.service.target == "worker":
            environment["PYTHONPATH"] = "/opt/site:/opt/rlflow"  # for the Dockerfile's editable installation
        return environment | {"HOME": "/home/rlflow" if self.image.user else "/root", **self.service.environment}

    def _as_user(self, words: Sequence[str]) -> list[str]:
        user = str(self.image.user)
        change = ["/usr/bin/setpriv", "--reuid", user, "--regid", user, "--clear-groups"] if self.image.user else []
        return [*change, "/usr/bin/env", "-C", self.image.folder, *words]

    def _script(self, address: str) -> str:
        """Makes the root of a container, in a mount namespace of its own, and starts the command there."""
        lines = [f"image_path=$PATH; PATH={_PATH}", f"mount -t tmpfs -o mode=755 root {NEW_ROOT}", f"cd {NEW_ROOT}"]
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
            f"mount -t tmpfs -o mode=1777,size={self.service.shared_memory.removesuffix('b')} shm dev/shm",
        ]
        for path in sorted(self.layer.iterdir()):
            lines += [f"mkdir -p {path.name}", f"mount --bind {path} {path.name}"]
        for prefix in sorted({str(Path(sys.base_prefix).resolve()), str(_PREFIX)}):
            lines += [f"mkdir -p .{prefix}", f"mount --rbind {prefix} .{prefix}", f"mount -o remount,bind,ro .{prefix}"]
        lines += [f"mount --bind {self.tools} usr/local/bin"]
        for mount in self.service.mounts:
            source, target = self._source(mount), f"{NEW_ROOT}{mount.target}"
            make = f"mkdir -p {target}" if source.is_dir() else f"mkdir -p {Path(target).parent}; touch {target}"
            lines += [make, f"mount --bind {'-o ro' if mount.read_only else ''} {source} {target}"]
        lines += [
            f"cp {IMAGES / 'init.py'} init.py",
            f"mount --bind {self.folder / 'hosts'} etc/hosts",
            f"mount --bind {self.folder / 'passwd'} etc/passwd",
            "[ ! -e etc/resolv.conf ] || mount --bind /dev/null etc/resolv.conf",  # there is no DNS
            f"hostname {hostname_of(self.service.name)}",
            "ip link set lo up",
            "until ip link show host0 >/dev/null 2>&1; do sleep 0.05; done",
            f"ip address add {address}/24 dev host0",
            "ip link set host0 up",
            f"ip route add default via {_NETWORK}.254",
            f'unset PWD OLDPWD; PATH=$image_path; exec {_CHROOT} {NEW_ROOT} "$@"',
        ]
        return "\n".join(lines)

    def _source(self, mount: Mount) -> Path:
        if not mount.is_volume:
            return (self.source / mount.source).resolve() if mount.source.startswith(".") else Path(mount.source)
        volume = self.folder / "volumes" / mount.source
        if not volume.exists():
            volume.mkdir(parents=True)
            made = self.layer / mount.target.lstrip("/")
            if made.exists():  # an empty volume gets what the image has there, owner included
                os.chown(volume, made.stat().st_uid, made.stat().st_gid)
        return volume

    def _write_users(self) -> None:
        lines = [line for line in Path("/etc/passwd").read_text().splitlines() if line.split(":")[2] != "1000"]
        (self.folder / "passwd").write_text("\n".join([*lines, "rlflow:x:1000:1000::/home/rlflow:/bin/sh", ""]))


def hostname_of(service: str) -> str:
    """The same after each restart, as docker's."""
    return hashlib.sha256(service.encode()).hexdigest()[:12]


def image_of(service: Service, dockerfile: Path) -> Image:
    if service.target:
        return read_image(dockerfile, service.target)
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
