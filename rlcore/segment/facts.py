"""What a checkpoint says about the code that made it. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import cache
from importlib import metadata
from pathlib import Path

_SOURCES = Path(__file__).resolve().parents[1]  # rlcore


@cache
def code_digest(folder: Path = _SOURCES) -> str:
    """Hash of the sources that training runs on: rlcore's modules and prompt templates, as first asked for."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".jinja")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def installed_versions(packages: Collection[str]) -> dict[str, str]:
    """Versions of those ``packages`` that are installed; importing none of them."""
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # absent from the manifest says so
    return versions
