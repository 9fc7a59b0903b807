"""``rlflow`` and commands that are Python: ``python -m MODULE`` and ``python -c TEXT``. A command of ``rlflow`` is
parsed; one that runs a flow goes on up to the call of the flow, whose parameters Prefect then binds and validates."""

from __future__ import annotations

import ast
import importlib
import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import chdir, nullcontext, redirect_stderr, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import typer
from prefect import Flow
from prefect.exceptions import ParameterBindError, ParameterTypeError
from prefect.utilities.callables import get_call_parameters
from typer.main import get_command

from rlcore.errors import ConfigError
from rlcore.evaluation.suites import all_suites
from tasks.cli import app, estimate, foreground
from tasks.experiments import load_experiment
from tests.docs.finding import Finding
from tests.docs.pages import ROOT

TINY = "grpo-geo3k-tiny"
RUNS_A_FLOW = ("train", "prepare", "ablate", "evaluate", "merge", "estimate")


class _Called(BaseException):
    """Ends a flow's command where it has done everything but its work."""


def check_module(module: str, words: Sequence[str]) -> None:
    """Options of a module, as its ``add_argument`` calls say. Modules are only read: those of tests begin with torch.

    Raises:
        Finding: there is no such module, or it has no such option.
    """
    file = _file_of(module)
    if not file.is_file():
        raise Finding(f"there is no module {module}")
    known = _options_in(file)
    for word in words:
        if word.startswith("--") and " " not in word and word.partition("=")[0] not in known:
            raise Finding(f"{module} has no option {word}; it has {sorted(known)}")


def check_rlflow(words: Sequence[str]) -> dict[str, Any]:
    """Parse the words. A flow's command runs in an empty data folder up to the call of the flow: Prefect binds and
    validates the arguments of that call. Runs that the command names exist.

    Returns:
        The command's parameters.

    Raises:
        Finding: the command refuses its words, or the flow does not take what the command calls it with.
    """
    said = io.StringIO()
    commands: Any = get_command(app)
    if words[0].startswith("-"):  # such options act while they are parsed
        if words[0] not in {
            name for item in commands.get_params(commands.context_class(commands)) for name in item.opts
        }:
            raise Finding(f"rlflow has no option {words[0]}")
        return {}
    try:
        with redirect_stderr(said), commands.make_context("rlflow", list(words)) as context:
            name, command, rest = commands.resolve_command(context, [*context._protected_args, *context.args])
            parameters: dict[str, Any] = command.make_context(name, rest, parent=context).params
    except typer.TyperException as error:
        raise Finding(f"rlflow: {error.format_message()}") from error
    if name in RUNS_A_FLOW:
        _call(words, parameters)
    return parameters


def _call(words: Sequence[str], parameters: Mapping[str, Any]) -> None:
    said = io.StringIO()
    copies = parameters.get("data") if parameters.get("suite") else None
    with (
        tempfile.TemporaryDirectory() as folder,
        chdir(folder) if copies else nullcontext(),
        patch.dict(os.environ, {"RLFLOW_DATA_DIR": folder, "RLFLOW_STORE": ""}),
        patch.object(foreground, "run_once", lambda call, *_, **__: call()),
        patch.object(estimate, "run_job", _end_of_command),
        patch.object(Flow, "__call__", _bind),
        redirect_stderr(said),
    ):
        for suite in all_suites() if copies else ():
            (Path(folder) / str(copies) / suite).mkdir(parents=True)
        trunk, _, step = (parameters.get("trunk") or "").partition("@")
        run_id = trunk or parameters.get("run") or parameters.get("run_id") or parameters.get("model")
        if run_id and "/" not in run_id:  # what rlflow evaluate takes is a run, a path or an address
            run_dir = Path(folder) / "runs" / run_id
            run_dir.mkdir(parents=True)
            if trunk:
                (run_dir / "checkpoints" / f"step-{int(step):06d}").mkdir(parents=True)
            with suppress(ConfigError):  # the command itself refuses the name
                experiment = load_experiment(parameters.get("experiment", TINY))
                (run_dir / "experiment.json").write_text(experiment.model_dump_json())
        try:
            app(list(words), standalone_mode=False)
        except _Called:
            return
        except SystemExit as error:
            raise Finding(f"rlflow: {error.code}") from error
        except (ParameterBindError, ParameterTypeError) as error:
            raise Finding(f"rlflow: {error}") from error
    raise Finding(f"rlflow {words} calls no flow")


def bind(flow: Flow[..., Any], arguments: Mapping[str, Any]) -> None:
    """
    Raises:
        Finding: Prefect does not take these arguments for the flow.
    """
    try:
        flow.validate_parameters(get_call_parameters(flow.fn, (), dict(arguments)))
    except (ParameterBindError, ParameterTypeError) as error:
        raise Finding(f"{flow.name}: {error}") from error


def _bind(flow: Flow[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
    flow.validate_parameters(get_call_parameters(flow.fn, args, kwargs))
    raise _Called


def _end_of_command(*_: Any, **__: Any) -> NoReturn:
    raise _Called


def check_text(text: str) -> None:
    """``python -c``: it compiles, and what it imports is there.

    Raises:
        Finding: otherwise.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Finding(f"python -c: {error}") from error
    for node in ast.walk(tree):
        modules = [node.module] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for module in filter(None, modules):
            try:
                found = importlib.import_module(module)
            except ImportError as error:
                raise Finding(f"python -c: {error}") from error
            if isinstance(node, ast.ImportFrom):
                missing = [alias.name for alias in node.names if not hasattr(found, alias.name)]
                if missing:
                    raise Finding(f"python -c: {module} has no {missing}")


def _file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _options_in(file: Path) -> frozenset[str]:
    """Of a module and of those of the project that it imports, as their ``add_argument`` calls say."""
    tree = ast.parse(file.read_text())
    imported = [
        f"{node.module}.{alias.name}" for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ] + [str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)]
    found = _added_arguments(tree)
    for name in imported:
        if (other := _file_of(name)).is_file():
            found |= _added_arguments(ast.parse(other.read_text()))
    return frozenset(found)


def _added_arguments(tree: ast.Module) -> set[str]:
    return {
        str(argument.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("-")
    }
