"""Notebooks hold no outputs, and nothing that is worth importing."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_outputs_are_stripped_and_nothing_is_defined(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines() if not line.startswith("%")]
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assert not [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, defined)]


def test_all_three_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["ablation", "compare_runs", "inspect_rollouts"]
