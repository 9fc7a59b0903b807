"""Commands that are Python: ``python -m MODULE``, held against the module's own parser, and ``python -c TEXT``. The
command of a flow runs up to the call of the flow, whose parameters Prefect then binds and validates."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import os
import runpy
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from prefect import Flow
from prefect.exceptions import ParameterBindError, ParameterTypeError
from prefect.utilities.callables import get_call_parameters

from rlcore.errors import ConfigError
from tasks.cli import foreground
from tasks.experiments import load_experiment
from tests.docs.finding import Finding
from tests.docs.pages import ROOT

TINY = "grpo-geo3k-tiny"


class _Parsed(BaseException):
    """Ends a module where its arguments are parsed. No Exception, so that the module does not handle it."""


class _Called(BaseException):
    """Ends a flow's command where it has done everything but its work."""


def parse(module: str, words: Sequence[str]) -> argparse.Namespace:
    """What the module's own parser makes of the words; the module is left as soon as they are parsed. Modules of tests
    are only read: theirs begin with torch. One without a parser takes no option.

    Raises:
        Finding: there is no such module, or its parser refuses the words.
    """
    file = _file_of(module)
    if not file.is_file():
        raise Finding(f"there is no module {module}")
    if module.startswith("tests.") or not _parses(file):
        known = _options_in(file)
        for word in words:
            if word.startswith("--") and " " not in word and word.partition("=")[0] not in known:
                raise Finding(f"{module} has no option {word}; it has {sorted(known)}")
        return argparse.Namespace()
    return _really_parsed(module, words)


def is_flow(module: str) -> bool:
    file = _file_of(module)
    return module.startswith("flows.") and file.is_file() and "foreground.main(" in file.read_text()


def call_flow(module: str, words: Sequence[str]) -> None:
    """Run a flow's command in an empty data folder, up to the call of the flow. Prefect binds and validates the
    arguments of that call; the flow itself does not run. Runs that the command names exist, with the values of the
    experiment that it names.

    Raises:
        Finding: the command refuses its words, or the flow does not take what the command calls it with.
    """
    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {"RLFLOW_DATA_DIR": folder, "RLFLOW_STORE": ""}),
        patch.object(foreground, "run_once", lambda call, *_: call()),
        patch.object(foreground, "dry_run", _end_of_command),
        patch.object(argparse.ArgumentParser, "error", _refuse),
        patch.object(Flow, "__call__", _bind),
        patch.object(sys, "argv", [module, *words]),
        warnings.catch_warnings(action="ignore"),  # it is imported already, and its flow is there twice
        contextlib.redirect_stderr(said),
    ):
        _store_runs(Path(folder), words)
        try:
            runpy.run_module(module, run_name="__main__")
        except _Called:
            return
        except SystemExit as error:
            raise Finding(f"{module}: {said.getvalue().strip()}") from error
        except (ParameterBindError, ParameterTypeError) as error:
            raise Finding(f"{module}: {error}") from error
    raise Finding(f"{module} calls no flow")


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


def _end_of_command(*_: Any) -> NoReturn:
    raise _Called


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise Finding(f"{parser.prog}: {message}")


def _store_runs(data_dir: Path, words: Sequence[str]) -> None:
    name = words[0] if words and not words[0].startswith("-") else TINY
    for before, run_id in zip(words, words[1:], strict=False):
        if before == "--run-id":
            folder = data_dir / "runs" / run_id
            folder.mkdir(parents=True)
            with contextlib.suppress(ConfigError):  # the command itself refuses the name
                (folder / "experiment.json").write_text(load_experiment(name).model_dump_json())


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


def _really_parsed(module: str, words: Sequence[str]) -> argparse.Namespace:
    real, parsed = argparse.ArgumentParser.parse_args, []

    def stop(parser: argparse.ArgumentParser, given: Any = None, namespace: Any = None) -> NoReturn:
        parsed.append(real(parser, given, namespace))
        raise _Parsed

    with (
        patch.object(argparse.ArgumentParser, "parse_args", stop),
        patch.object(argparse.ArgumentParser, "error", _refuse),
        patch.object(sys, "argv", [module, *words]),
        warnings.catch_warnings(action="ignore"),  # it is imported already, and its flow is there twice
        contextlib.suppress(_Parsed),
    ):
        runpy.run_module(module, run_name="__main__")
    (namespace,) = parsed
    return namespace


def _file_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def _parses(file: Path) -> bool:
    """Whether it parses its arguments, so that running it ends there."""
    return ".parse_args(" in file.read_text()


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
        argument.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument"
        for argument in node.args
        if isinstance(argument, ast.Constant) and str(argument.value).startswith("-")
    }
