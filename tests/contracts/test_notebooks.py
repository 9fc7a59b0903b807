"""Notebooks hold no outputs, define nothing, and import only names that exist."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def code_of(path: Path) -> ast.Module:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines() if not line.startswith("%")]
    return ast.parse("\n".join(lines))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_stripped_and_nothing_is_defined(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None]
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assert not [node for node in ast.walk(code_of(path)) if isinstance(node, defined)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_imported_names_exist(path: Path) -> None:
    imports = [node for node in ast.walk(code_of(path)) if isinstance(node, ast.ImportFrom)]
    assert imports
    for node in imports:
        module = importlib.import_module(str(node.module))
        missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
        assert not missing, f"{node.module} has no {missing}"


def test_all_three_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["ablation", "compare_runs", "inspect_rollouts"]
