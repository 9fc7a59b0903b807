"""Who may import whom (the layers of docs/design.md), and what tests import."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tasks import data, evaluate, models

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("flows", "tasks", "rlcore", "infra")
COMMANDS = "tasks/cli/commands.py"  # calls flows; no flow imports it
FORBIDDEN = {
    "flows": {"notebooks", "tests"},
    "tasks": {"flows", "notebooks", "tests"},
    "rlcore": {"flows", "tasks", "infra", "notebooks", "tests"},
    "infra": {"flows", "tasks", "rlcore", "notebooks", "tests"},
}
# Third party -> where it may be imported: files or folders, as prefixes of the path.
HOMES = {
    "prefect": ("flows/", "tasks/", "infra/prefect_plugin.py", "infra/stack/apps.py"),
    "mlflow": ("infra/tracking/", "infra/stack/apps.py", "infra/deploy/docker/"),
    "tensorboard": ("infra/tracking/sinks.py",),
    "wandb": ("infra/tracking/sinks.py",),
    "swanlab": ("infra/tracking/sinks.py",),
    "prometheus_client": ("tasks/watch/exporter.py",),
    "fsspec": ("infra/store/",),
    "s3fs": ("infra/store/bucket.py",),
    "botocore": ("infra/store/s3_errors.py",),
    "vllm": ("rlcore/sampler/",),
    "httpx": ("rlcore/endpoint.py", "tasks/driver/outbox.py"),
    "ray": ("rlcore/distributed/",),
    "mathruler": ("rlcore/rewards/grading.py",),
    "math_verify": ("rlcore/rewards/grading.py",),
    "datasets": ("rlcore/data/",),
    "torch": ("rlcore/",),
    "transformers": ("rlcore/",),
}
# The packages and files of each part. Each may import from the rows above its own, and from its own package.
LAYERS = {
    "rlcore": (
        ("types", "errors"),
        ("artifacts", "endpoint", "files", "flops", "gpus", "process"),
        ("config", "families"),
        ("adjustments", "batch", "failures", "specs"),
        ("algorithms", "estimate", "rewards"),
        ("data",),
        ("models",),
        ("inference",),
        ("sampler",),
        ("distributed",),
        ("rollout",),
        ("training",),
        ("segment",),
        ("evaluation",),
        ("ablation",),
        ("jobs", "migrate"),
    ),
    "infra": (
        ("errors", "files", "launch", "settings"),
        ("environment", "load", "logs"),
        ("processes", "provenance"),
        ("store",),
        ("tracking",),
        ("stack",),
        ("deploy", "prefect_plugin"),
    ),
    "tasks": (
        ("pictures", "store"),
        ("run",),
        ("driver",),
        ("experiments", "lineage", "named", "retries"),
        ("registered", "serve", "traces"),
        ("data", "evaluate", "fork", "models", "open", "train"),
        ("chat", "suites"),
        ("preflight", "report"),
        ("ablation", "champion"),
        ("clean", "compare", "recovery", "watch"),
        ("push",),
        ("cli",),
    ),
}
NO_TORCH = tuple(
    f"rlcore/{name}"
    for name in (
        *("types.py", "errors.py", "artifacts.py", "endpoint.py", "files.py", "flops.py", "gpus.py", "config/"),
        *("adjustments.py", "failures.py", "specs.py", "estimate.py", "rewards/", "migrate/"),
    )
)
# Parts of rlcore that a cached job imports and that do not change its result: plain data, and what starts and checks.
NOT_IN_KEYS = {"artifacts", "config", "errors", "failures", "files", "flops", "gpus", "process", "specs", "types"}
NOT_IN_KEY_OF = {"evaluate": {"adjustments", "algorithms", "batch", "distributed", "training"},
                 "merge": {"adjustments", "data", "distributed", "segment"},
                 "check_model": {"adjustments", "segment"}}  # fmt: skip
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
from ..jobs.prepare import prepare
"""
    here = Path("rlcore/rewards/grading.py")
    assert modules_imported(source, here) == {
        *("json", "torch.nn", "vllm", "vllm.LLM"),
        *("rlcore.rewards", "rlcore.rewards.sampler", "rlcore.rewards.pool", "rlcore.rewards.pool.Pool"),
        *("rlcore", "rlcore.types", "rlcore.jobs.prepare", "rlcore.jobs.prepare.prepare"),
    }
    assert "rlcore.rewards.pool" in modules_imported("from .pool import Pool", here.with_name("__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_keep_to_their_side(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): sorted(imported(path) & FORBIDDEN[package])
        for path in sorted((ROOT / package).rglob("*.py"))
        if imported(path) & FORBIDDEN[package]
    }
    assert found == ({COMMANDS: ["flows"]} if package == "tasks" else {})


def imports_of_the_project() -> dict[str, set[str]]:
    """Module -> the modules of the project that it imports: inside functions and for type checkers as well."""
    files = {module_name(path): path for path in modules()}
    return {
        name: {found for found in modules_imported(path.read_text(), path.relative_to(ROOT)) if found in files} - {name}
        for name, path in files.items()
    }


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer_of(module: str) -> int:
    part, name = module.split(".")[:2]
    (layer,) = [number for number, row in enumerate(LAYERS[part]) if name in row]
    return layer


@pytest.mark.parametrize("part", LAYERS)
def test_a_layer_imports_from_the_layers_above_it(part: str) -> None:
    found = [
        f"{module} imports {other}"
        for module, others in imports_of_the_project().items()
        for other in sorted(others)
        if module.startswith(f"{part}.") and other.startswith(f"{part}.")
        if module.split(".")[1] != other.split(".")[1] and layer_of(module) <= layer_of(other)
    ]
    assert not found


@pytest.mark.parametrize("part", LAYERS)
def test_every_file_has_a_layer(part: str) -> None:
    names = {path.relative_to(ROOT / part).parts[0].removesuffix(".py") for path in (ROOT / part).rglob("*.py")}
    assert sorted(names - {"__init__"}) == sorted(name for row in LAYERS[part] for name in row)


@pytest.mark.parametrize("part", LAYERS)
def test_the_design_page_has_the_same_layers(part: str) -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    table = page.partition(f"\n| {part} | holds |\n")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert [sorted(re.findall(r"`(\w+)`", cell)) for cell in cells] == [sorted(row) for row in LAYERS[part]]


def test_no_files_import_each_other() -> None:
    assert circles(imports_of_the_project()) == []


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ("prepare", data.CODE),
        ("resize", data.CODE),
        ("duplicates", data.DUPLICATES_CODE),
        ("bootstrap", models.BOOTSTRAP_CODE),
        ("evaluate", evaluate.CODE),
        ("merge", models.MERGE_CODE),
        ("check_model", models.CHECK_CODE),
    ],
)
def test_a_cached_result_depends_on_the_code_that_makes_it(job: str, code: Sequence[str]) -> None:
    """The source list of each cache key names the job's own file and every package that the job imports."""
    reached = {
        name.split(".")[1]
        for name in reachable(f"rlcore.jobs.{job}", imports_of_the_project())
        if name.startswith("rlcore.")
    }
    listed = {Path(source).parts[1].removesuffix(".py") for source in code}
    assert f"rlcore/jobs/{job}.py" in code
    assert reached - listed <= NOT_IN_KEYS | NOT_IN_KEY_OF.get(job, set())
    assert listed <= reached


def test_a_circle_is_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d"}}
    assert circles(imports) == [["a", "b", "c"]]


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others."""
    reached = {module: reachable(module, imports) for module in imports}
    groups = {tuple(sorted(other for other in reached[module] if module in reached[other])) for module in imports}
    return sorted(list(group) for group in groups if group)


def reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    waiting, found = set(imports[start]), set[str]()
    while waiting:
        module = waiting.pop()
        found.add(module)
        waiting |= imports[module] - found
    return found


def test_each_third_party_has_its_home() -> None:
    found = [
        f"{path.relative_to(ROOT)} imports {name}; allowed in {', '.join(HOMES[name])}"
        for path in modules()
        for name in sorted(imported(path) & HOMES.keys())
        if not str(path.relative_to(ROOT)).startswith(HOMES[name])
    ]
    assert not found


def test_vllm_is_imported_by_three_files() -> None:
    assert [str(path.relative_to(ROOT)) for path in modules() if "vllm" in imported(path)] == [
        "rlcore/sampler/engine.py",
        "rlcore/sampler/kernels.py",
        "rlcore/sampler/start.py",
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


def test_the_command_line_starts_with_nothing_heavy(tmp_path: Path) -> None:
    """Help and completion answer in less than a second, because commands import what they need when they run."""
    heavy = (*HEAVY, "prefect", "mlflow", "pandas", "matplotlib", "s3fs", "rlcore.config")
    code = f"import sys, tasks.cli\nprint([name for name in {heavy!r} if name in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "RLFLOW_DATA_DIR": str(tmp_path), "PREFECT_PLUGINS_ENABLED": "0"},
    )
    assert answer.stdout == "[]\n"


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
