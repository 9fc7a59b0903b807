"""Commands that are Python: ``python -m MODULE``, held against the module's own parser, and ``python -c TEXT``."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import runpy
import sys
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from tests.docs.finding import Finding
from tests.docs.pages import ROOT


class _Parsed(BaseException):
    """Ends a module where its arguments are parsed. No Exception, so that the module does not handle it."""


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

    def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise Finding(f"{module}: {message}")

    with (
        patch.object(argparse.ArgumentParser, "parse_args", stop),
        patch.object(argparse.ArgumentParser, "error", refuse),
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
    """Whether it parses its arguments, itself or as flows do, so that running it ends there."""
    return any(call in file.read_text() for call in (".parse_args(", "foreground.main("))


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
