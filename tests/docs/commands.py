"""Can a command be what it says? Checked without running it; an unknown program is a finding."""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import yaml
from cyclopts import CycloptsError
from prefect.cli._app import _app as prefect_app  # private: the parser; the public app starts it
from pydantic import ValidationError

from infra.settings import Settings
from rlcore.ablation.plan import make_plan
from rlcore.config import build_experiment
from rlcore.config.experiment import AblationConfig
from rlcore.errors import RlflowError
from tasks.experiments import PREFECT_YAML, SETTINGS, experiment_values
from tests.docs import modules
from tests.docs.finding import Finding
from tests.docs.pages import ROOT
from tests.docs.programs import OF_OTHERS, OF_THE_ENVIRONMENT, check_program

EXPERIMENTS = experiment_values()
DEPLOYMENTS = {item["name"]: item for item in yaml.safe_load(PREFECT_YAML.read_text())["deployments"]}
SHELL = frozenset({"cat", "df", "dmesg", "free", "grep", "head", "ls", "tail", "touch", "unset"})
INSTALLED = ".venv/bin/"  # where make puts programs
OF_OUR_ENVIRONMENT = frozenset({"python", "prefect", "pytest", "rlflow", "torchrun", *OF_THE_ENVIRONMENT})
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*|\$\w+|.*\.\.\..*")  # NAME, $RUN, and what is left to the reader
_ASSIGNMENT = re.compile(r"\w+=")


def check(
    words: Sequence[str],
    *,
    elsewhere: bool = False,
    own_files: frozenset[str] = frozenset(),
    on_path: bool = False,
) -> None:
    """
    Args:
        elsewhere: the page says that the command needs what is not here, so that programs of others pass; where they
            are installed, their options are checked.
        own_files: files that the reader has made by then.
        on_path: the environment's programs are on the PATH, as in a container; no page activates the environment.

    Raises:
        Finding: no such program, option, target, file, deployment, parameter or setting.
    """
    rest = list(words)
    if ">" in rest:
        del rest[rest.index(">") :]  # test_words looks at what is written
    while rest and _ASSIGNMENT.match(rest[0]):
        _variable(rest.pop(0))
    if not rest:
        return
    program, arguments = rest[0].removeprefix(INSTALLED), rest[1:]
    if program == rest[0] and program in OF_OUR_ENVIRONMENT and not on_path:
        raise Finding(f"a fresh machine has no {program} of ours on its PATH: write {INSTALLED}{program}")
    if program == "python":
        _python(arguments, own_files)
    elif program == "pytest":
        _pytest(arguments, own_files)
    elif check_of := _PROGRAMS.get(program):
        check_of(arguments)
    elif program in OF_OTHERS:
        if not elsewhere:
            raise Finding(f"{program} does not come with the project: write <!-- elsewhere: WHAT --> before the block")
        outer, inner = _split_at_exec(arguments)
        check_program(program, outer)
        check(inner, own_files=own_files, on_path=True)
    elif program not in SHELL and not elsewhere:
        raise Finding(f"no program {program!r} is known")


def _split_at_exec(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """A container's command: what stands behind ``exec SERVICE``."""
    if "exec" not in arguments:
        return arguments, ()
    at = arguments.index("exec") + 2
    return arguments[:at], arguments[at:]


def is_command(text: str) -> bool:
    """Whether words in a sentence are a command to be checked."""
    first, _, rest = text.partition(" ")
    program = first.removeprefix(INSTALLED)
    return bool(rest) and (program == "python" or program in _PROGRAMS)


def _variable(assignment: str) -> None:
    name, _, value = assignment.partition("=")
    if not name.startswith("RLFLOW_"):
        return
    field = name.removeprefix("RLFLOW_").lower()
    if field not in Settings.model_fields:
        raise Finding(f"infra/settings.py has no {name}")
    try:
        Settings.model_validate({field: value})
    except ValidationError as error:
        raise Finding(f"{name} does not take {value!r}: {error}") from error


def _export(arguments: Sequence[str]) -> None:
    for assignment in arguments:
        _variable(assignment)


def _make(arguments: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {name for line in re.findall(r"^([a-z][\w\- ]*):", makefile, re.MULTILINE) for name in line.split()}
    for word in arguments:
        variable = word.partition("=")[0]
        known = re.search(rf"\$\({variable}\)|^{variable} ", makefile, re.M) if "=" in word else word in targets
        if not known:
            raise Finding(f"the Makefile has no {word!r}; targets: {sorted(targets)}")


def _copy(arguments: Sequence[str]) -> None:
    for source in arguments[:-1]:
        if not (ROOT / source).is_file():
            raise Finding(f"there is no file {source!r}")


def _python(arguments: Sequence[str], own_files: frozenset[str]) -> None:
    if arguments[:1] == ["-c"]:
        modules.check_text(arguments[1])
        return
    if arguments[:1] != ["-m"]:
        file = arguments[0] if arguments else ""
        if file not in own_files and not (ROOT / file).is_file():
            raise Finding(f"there is no file {file!r}")
        return
    module, words = arguments[1], arguments[2:]
    if _PLACEHOLDER.fullmatch(module):
        return
    if module == "pytest":
        _pytest(words, own_files)
        return
    modules.check_module(module, words)


def _rlflow(arguments: Sequence[str]) -> None:
    words = [modules.TINY if word == "NAME" else word.removeprefix("$") for word in arguments]
    chosen = modules.check_rlflow(words)
    if name := chosen.get("experiment"):
        _experiment("rlflow", name, chosen["overrides"] or (), {})


def _experiment(where: str, name: str, sets: Sequence[str], of_ablation: dict[str, Any]) -> None:
    """The experiment exists, and it holds together with every ``--set``; so do the points of its ablation."""
    name = modules.TINY if _PLACEHOLDER.fullmatch(name) else name
    if name not in EXPERIMENTS:
        raise Finding(f"{where}: no experiment {name!r}; there are {sorted(EXPERIMENTS)}")
    build, given = partial(build_experiment, EXPERIMENTS[name]), [item for item in sets if "..." not in item]
    try:
        build(given)
        if of_ablation:
            make_plan("checked", name, given, AblationConfig(**of_ablation), build)
    except (RlflowError, ValidationError) as error:
        raise Finding(f"{where}: {error}") from error


def _pytest(arguments: Sequence[str], own_files: frozenset[str]) -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    known = {item.partition(":")[0] for item in options["markers"]}
    for before, word in zip(["", *arguments], arguments, strict=False):
        if before == "-m" and word not in known:
            raise Finding(f"pytest has no marker {word!r}; there are {sorted(known)}")
        if before not in ("-m", "-k") and not word.startswith("-") and word not in own_files:
            check_test(word)


def check_test(place: str) -> None:
    """
    Args:
        place: a file or folder of tests, or ``FILE::FUNCTION``, from the root of the project.

    Raises:
        Finding: there is no such file or function.
    """
    file, _, name = place.partition("::")
    if not (ROOT / file).exists():
        raise Finding(f"there is no {file}")
    if name:
        tree = ast.parse((ROOT / file).read_text())
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            raise Finding(f"{file} has no test {name}")


def _torchrun(arguments: Sequence[str]) -> None:
    _python(arguments[arguments.index("-m") :], frozenset())


def _prefect(arguments: Sequence[str]) -> None:
    """Prefect's own parser takes it, and what it names exists."""
    words = [str(UUID(int=0)) if word == "ID" else word for word in arguments]
    try:
        prefect_app.parse_args(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise Finding(f"prefect does not take {words}: {error}") from error
    if words[:2] == ["deployment", "run"] and words[2:] and not _PLACEHOLDER.fullmatch(words[2]):
        _deployment(words[2], words[3:])


def _deployment(name: str, options: Sequence[str]) -> None:
    found = DEPLOYMENTS.get(name.rpartition("/")[2])
    if found is None:
        raise Finding(f"prefect.yaml has no deployment {name!r}")
    file, _, function = found["entrypoint"].partition(":")
    flow = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), function)
    if "/" in name and name.partition("/")[0] != flow.name:
        raise Finding(f"the flow of {name!r} is called {flow.name!r}")
    given = [value for option, value in zip(options, options[1:], strict=False) if option == "-p"]
    values = {key: _value(text) for key, text in (item.split("=", 1) for item in given)}
    modules.bind(flow, {**found.get("parameters", {}), **values})
    if experiment := values.get("experiment", found.get("parameters", {}).get("experiment")):
        sets = [f"{SETTINGS[key]}={json.dumps(value)}" for key, value in values.items() if key in SETTINGS]
        of_ablation = {key: values[key] for key in AblationConfig.model_fields if key in values}
        _experiment(flow.name, experiment, [*sets, *values.get("overrides", [])], of_ablation)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


_PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    "make": _make,
    "prefect": _prefect,
    "pytest": partial(_pytest, own_files=frozenset()),
    "rlflow": _rlflow,
    "torchrun": _torchrun,
    "export": _export,
    "cp": _copy,
    **{name: partial(check_program, name) for name in OF_THE_ENVIRONMENT},
}
