"""Who may import whom (section 2 of docs/design.md), and what tests import."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "rlcore", "infra")
FORBIDDEN = {
    "flows": {"notebooks", "tests"},
    "tasks": {"flows", "notebooks", "tests"},
    "rlcore": {"flows", "tasks", "infra", "notebooks", "tests"},
    "infra": {"flows", "tasks", "rlcore", "notebooks", "tests"},
}
# Third party -> where it may be imported: files or folders, as prefixes of the path.
HOMES = {
    "prefect": ("flows/", "tasks/", "infra/prefect_plugin.py", "infra/prefect_app.py"),
    "mlflow": ("infra/tracking.py", "infra/registry.py", "infra/results.py", "infra/mlflow_app.py", "infra/docker/"),
    "tensorboard": ("infra/tracker_sinks.py",),
    "wandb": ("infra/tracker_sinks.py",),
    "swanlab": ("infra/tracker_sinks.py",),
    "fsspec": ("infra/storage.py", "infra/store.py"),
    "s3fs": ("infra/store.py",),
    "botocore": ("infra/s3_errors.py",),
    "vllm": ("rlcore/rollout/",),
    "ray": ("rlcore/distributed/",),
    "mathruler": ("rlcore/rewards/grading.py",),
    "math_verify": ("rlcore/rewards/grading.py",),
    "datasets": ("rlcore/data/",),
    "torch": ("rlcore/",),
    "transformers": ("rlcore/",),
}
NO_TORCH = tuple(
    f"rlcore/{name}" for name in ("config/", "types.py", "artifacts.py", "errors.py", "ports.py", "rewards/")
)
HEAVY = ("torch", "vllm", "ray", "transformers", "datasets")


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def modules_imported(source: str, path: Path) -> set[str]:
    """Full names of all modules that ``source`` imports, wherever in the file. ``path`` is relative to the root and
    resolves relative imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (package, node.module)))
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def imported(path: Path) -> set[str]:
    """First names of everything that a module imports."""
    return {name.split(".")[0] for name in modules_imported(path.read_text(), path.relative_to(ROOT))}


def test_no_import_is_overlooked() -> None:
    source = """
import json
if TYPE_CHECKING:
    import torch.nn
def late():
    from vllm import LLM
from . import sampler
from .pool import Pool
from .. import types
from ..data.problems import prepare
"""
    here = Path("rlcore/rewards/grading.py")
    assert modules_imported(source, here) == {
        *("json", "torch.nn", "vllm", "vllm.LLM"),
        *("rlcore.rewards", "rlcore.rewards.sampler", "rlcore.rewards.pool", "rlcore.rewards.pool.Pool"),
        *("rlcore", "rlcore.types", "rlcore.data.problems", "rlcore.data.problems.prepare"),
    }
    assert "rlcore.rewards.pool" in modules_imported("from .pool import Pool", here.with_name("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_keep_to_their_side(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): sorted(imported(path) & FORBIDDEN[package])
        for path in sorted((ROOT / package).rglob("*.py"))
        if imported(path) & FORBIDDEN[package]
    }
    assert not found


def test_each_third_party_has_its_home() -> None:
    found = [
        f"{path.relative_to(ROOT)} imports {name}; allowed in {', '.join(HOMES[name])}"
        for path in modules()
        for name in sorted(imported(path) & HOMES.keys())
        if not str(path.relative_to(ROOT)).startswith(HOMES[name])
    ]
    assert not found


def test_vllm_is_imported_by_one_file() -> None:
    assert [str(path.relative_to(ROOT)) for path in modules() if "vllm" in imported(path)] == [
        "rlcore/rollout/engine.py"
    ]


def test_the_light_part_of_rlcore_never_mentions_torch() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in modules()
        if str(path.relative_to(ROOT)).startswith(NO_TORCH) and imported(path) & {"torch", "transformers"}
    ]
    assert not found


def test_importing_every_flow_loads_nothing_heavy(tmp_path: Path) -> None:
    flows = sorted(f"flows.{path.stem}" for path in (ROOT / "flows").glob("*.py"))
    code = (
        f"import sys, json, importlib\nfor name in {flows!r}: importlib.import_module(name)\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "RLFLOW_DATA_DIR": str(tmp_path)},
    )
    assert json.loads(answer.stdout.splitlines()[-1]) == []


def test_notebooks_and_tests_are_imported_by_nothing_shipped() -> None:
    assert not [path for path in modules() if imported(path) & {"tests", "notebooks"}]


def test_no_test_imports_from_another_test() -> None:
    """What several tests use is in a module that holds no tests, or in a conftest.py."""
    found = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in sorted(modules_imported(path.read_text(), path.relative_to(ROOT)))
        if re.match(r"tests\..*\btest_", name)
    ]
    in_scripts = [
        f"{path.relative_to(ROOT)} writes: {match[0]}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for match in re.finditer(r"(from|import) tests\.\S*\btest_\w+", path.read_text())
    ]
    assert not found + in_scripts
