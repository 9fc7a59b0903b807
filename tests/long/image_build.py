"""Executes the steps of a Dockerfile without docker: ``python -m tests.long.image_build FOLDER``, as root.

Each stage gets a root file system of its own. Debian's packages (debootstrap) stand for the base images of CUDA, Ubuntu
and Python, this machine's Python for the one that uv would download, and the repository's uv for the image of uv.
Everything else is what the Dockerfile says: its packages come from the network, its files from the repository. A step
that fails ends the build.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.long.compose_file import NotUnderstoodError, place, read_stages
from tests.long.hosts import ROOT

DOCKERFILE = ROOT / "infra" / "deploy" / "docker" / "Dockerfile"
_SUITE = "bookworm"
# what this machine's Python is linked against
_LIBRARIES = (
    "libssl3", "libsqlite3-0", "libffi8", "libbz2-1.0", "liblzma5", "libreadline8", "zlib1g", "libncursesw6",
    "libexpat1", "libuuid1",
)  # fmt: skip
_PYTHON_OF_DEBIAN = ("python3", "python3-venv")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CERTIFICATES = "usr/local/share/certificates-of-the-host.crt"
_ENTER = """
for name in proc sys dev; do /bin/mount --rbind /$name "$0/$name"; done
user=$1; shift; exec /usr/sbin/chroot --userspec=$user "$0" "$@"
"""


class StepFailedError(Exception):
    """A step of the Dockerfile ended with an error."""


class Build:
    """The root file systems of all stages."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._stages = folder, read_stages(DOCKERFILE)

    def root(self, stage: str) -> Path:
        return self.folder / stage

    def all(self, arguments: Mapping[str, str]) -> None:
        """
        Args:
            arguments: values of the ARG instructions.
        """
        self._make_base()
        for name, stage in self._stages.items():
            if not stage.steps:  # the image of uv
                continue
            self._begin(name, stage.base)
            self._execute(name, arguments)

    def run(self, stage: str, words: Sequence[str], *, user: str = "0:0", **variables: str) -> str:
        """What a command prints that runs in the root of a stage.

        Raises:
            StepFailedError: it fails.
        """
        environment = {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8", **self._certificates(), **variables}
        inside = ["/usr/bin/env", "-C", variables.get("PWD", "/"), *words]
        done = subprocess.run(
            ["unshare", "--mount", "/bin/sh", "-ec", _ENTER, str(self.root(stage)), user, *inside],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise StepFailedError(f"{stage}: {shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout

    # ---- the steps

    def _execute(self, name: str, arguments: Mapping[str, str]) -> None:
        variables, shell = {"PWD": "/"}, ["/bin/sh", "-c"]
        for word, rest in self._stages[name].steps:
            sys.stdout.write(f"{name}: {word} {rest[:100]}\n")
            sys.stdout.flush()
            match word:
                case "RUN":
                    self.run(name, [*shell, rest], **variables)
                case "SHELL":
                    shell = json.loads(rest)
                case "ENV":
                    for item in shlex.split(rest):
                        key, value = item.split("=", 1)
                        variables[key] = value.replace("$PATH", variables.get("PATH", _PATH))
                case "ARG":
                    key, _, default = rest.partition("=")
                    variables[key] = arguments.get(key, default)
                case "WORKDIR":
                    variables["PWD"] = rest
                    (self.root(name) / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
                case "COPY":
                    self._copy(name, rest, variables["PWD"])
                case "USER" | "VOLUME" | "CMD":
                    pass  # for those who start a container
                case _:
                    raise NotUnderstoodError(f"{word} {rest}")

    def _copy(self, name: str, rest: str, folder: str) -> None:
        words, origin = rest.split(), ROOT
        if words[0].startswith("--from="):
            origin = self.root(words.pop(0).removeprefix("--from="))
        *sources, target = words
        for source in sources:
            found = origin / source.lstrip("/") if origin.name != "uv" else ROOT / ".uv" / "bin" / "uv"
            inside = self.root(name) / place(folder, source, target).lstrip("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            # hard links between stages: the packages have 10 GB
            how = ["--link"] if origin not in (ROOT, self.root("uv")) else []
            subprocess.run(["cp", "--archive", *how, "--no-target-directory", str(found), str(inside)], check=True)

    # ---- what stands for the base images

    def _make_base(self) -> None:
        site = _first_line("apt-get", "indextargets", "--format", "$(SITE)")
        extra = ",".join((*_LIBRARIES, *_PYTHON_OF_DEBIAN))
        _call("debootstrap", "--variant=minbase", f"--include={extra}", _SUITE, str(self.root("base")), site)
        shutil.copy("/etc/resolv.conf", self.root("base") / "etc/resolv.conf")
        bundle = os.environ.get("SSL_CERT_FILE")
        if bundle is not None:  # this machine reaches the registries through a proxy of its own
            (self.root("base") / _CERTIFICATES).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(bundle, self.root("base") / _CERTIFICATES)

    def _begin(self, name: str, base: str) -> None:
        root = self.root(name)
        subprocess.run(["cp", "--archive", str(self.root("base")), str(root)], check=True)
        if base.startswith("python:"):
            (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
            for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
                marker.unlink()
            return
        own = Path(sys.base_prefix).resolve()
        for library in own.glob("lib/libpython*.so*"):  # the build's path to it is not there
            shutil.copy(library, root / "usr/lib")
        if name == "build":
            version = ".".join(map(str, sys.version_info[:3]))
            managed = root / "opt/python" / f"cpython-{version}-linux-x86_64-gnu"  # where uv looks for its own Python
            left_out = shutil.ignore_patterns("site-packages", "test", "__pycache__")
            shutil.copytree(own, managed, symlinks=True, ignore=left_out)

    def _certificates(self) -> dict[str, str]:
        path = f"/{_CERTIFICATES}"
        if not (self.root("base") / _CERTIFICATES).exists():
            return {}
        return {name: path for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")}


def _call(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def _first_line(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[0]


def why_not() -> str:
    """What this machine lacks for a build; empty: nothing."""
    if os.geteuid() != 0:
        return f"this is user {os.geteuid()}, not root"
    return "" if shutil.which("debootstrap") else "it is not on the PATH"


def main() -> None:
    Build(Path(sys.argv[1])).all({})


if __name__ == "__main__":
    main()
