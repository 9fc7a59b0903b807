"""The code as the documentation speaks of it: its texts, metrics and settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.docs.pages import ROOT

_HOLE = "\0"  # where a text has a value filled in
# Files that the code writes and pages name; what lies in a store is in the folders of the same names.
_RUN, _DATASET, _ABLATION = "data/runs/RUN", "data/datasets/DIGEST", "data/ablations/ABLATION"
_CHECKPOINT = f"{_RUN}/checkpoints/step-N"
PRODUCED = (
    "data/stack/login",
    *(f"{_DATASET}/{name}" for name in ("problems.parquet", "rejects.jsonl", "report.json", "images/IMAGE")),
    *(f"data/models/MODEL/{name}" for name in ("config.json", "chat_template.jinja")),
    *(
        f"{_RUN}/{name}.json"
        for name in (
            "adjustments",
            "control",
            "ended",
            "experiment",
            "fork",
            "lease",
            "mirror",
            "mlflow",
            "outage",
            "samples/step-N",
        )
    ),
    *(
        f"{_RUN}/{name}.jsonl"
        for name in ("changes", "drivers", "evaluations", "failures", "health", "journal", "origins", "recoveries")
    ),
    "data/duplicates/PAIR/duplicates.jsonl",
    *(f"{_RUN}/{name}" for name in ("spec.json", "trained/step-N.json", "trainer.log", "origins/NAME")),
    *(f"{_RUN}/report/{name}" for name in ("report.html", "cost.json")),
    f"{_RUN}/stacks/hang-N/PROCESS",
    f"{_RUN}/validation/step-N/completions.parquet",
    *(f"{_CHECKPOINT}/{name}" for name in ("groups.parquet", "manifest.json", ".sealed.json")),
    "data/evaluations/EVALUATION/completions.parquet",
    *(f"{_ABLATION}/{name}" for name in ("plan.json", "table.md", "results/RESULT", "logs/LOG")),
)
_METRIC = re.compile(r"(?:reward|reward_model|rollout|loss|optim|time|perf|system|judge|teacher)/[a-z_0-9]+")


def sources() -> Iterator[Path]:
    for package in ("rlcore", "tasks", "infra", "flows"):
        yield from sorted((ROOT / package).rglob("*.py"))


@cache
def trees() -> tuple[ast.Module, ...]:
    return tuple(ast.parse(path.read_text()) for path in sources())


@cache
def texts() -> frozenset[str]:
    """Every text that the code can say, with a hole for each value that it fills in; docstrings are none."""
    found = set()
    for tree in trees():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp) and id(node) not in docstrings:
                found.add(_text(node))
    return frozenset(item for item in found if item.strip(_HOLE))


def _text(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(value)):
            return re.sub(r"%[.\d]*[sdfg]", _HOLE, value)  # of log lines
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
    return _HOLE


def says(message: str, found: frozenset[str] | None = None) -> bool:
    """Whether some text of the code is ``message``, or has it within; ``...`` stands for values."""
    parts = [part.strip() for part in message.split("...") if part.strip(" .:,()")]
    pattern = re.compile(f".*?{_HOLE}.*?".join(map(re.escape, parts)).replace(r"\ ", r"\s+"), re.DOTALL)
    return any(pattern.search(text) for text in (texts() if found is None else found))


def writes(path: str) -> bool:
    """Whether ``path`` is one of ``PRODUCED`` or a part of one; numbers are as good as N: step-000020.json, hang-N."""
    asked = re.sub(r"\d+", "N", path).strip("/").split("/")
    for produced in PRODUCED:
        parts = produced.split("/")
        if any(parts[start : start + len(asked)] == asked for start in range(len(parts))):
            return True
    return False


def unwritten() -> list[str]:
    """Paths of ``PRODUCED`` with a part that is no text of the code. Capitals stand for values."""
    return [
        path
        for path in PRODUCED
        if not all(part.isupper() or _with_holes(part) in _names() for part in path.split("/"))
    ]


def _with_holes(name: str) -> str:
    return re.sub(r"\d+|(?<=-)N\b", _HOLE, name)


@cache
def _names() -> frozenset[str]:
    """Parts of the texts that may be names of files and folders; a value is a hole, whatever its format is."""
    words = (word for text in texts() for word in text.split())
    return frozenset(
        _with_holes(part) for word in words for part in word.strip("`'\"(),:;").rstrip(".").split("/") if part
    )


@cache
def metrics() -> frozenset[str]:
    """Names of metrics that the code gives: written out, or ``time/`` with a phase of the clock, ``reward/`` with a
    part of a score."""
    whole = set(filter(_METRIC.fullmatch, texts()))
    phases = {f"time/{name}" for name in (*_arguments(0, "clock", "note"), *_arguments(2, "move"))} | {"time/step"}
    parts = {f"reward/{name}" for name in _keys_of_parts()}
    return frozenset(whole | phases | parts)


def _arguments(place: int, *functions: str) -> Iterator[str]:
    """Texts that functions or methods of these names get as the argument at this place."""
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and len(node.args) > place and isinstance(node.args[place], ast.Constant):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                value = node.args[place].value
                if name in functions and isinstance(value, str):
                    yield value


def _keys_of_parts() -> Iterator[str]:
    for path in sorted((ROOT / "rlcore" / "rewards").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                yield from (
                    key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
                )


def metrics_in(text: str) -> set[str]:
    return set(_METRIC.findall(text))
