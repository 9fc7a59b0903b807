"""docs/reference.md: every setting as the code has it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infra.settings import Settings
from rlcore.config import ExperimentConfig
from rlcore.config.describe import describe_type, models_in, tag_of
from rlcore.config.experiment import FREE_SETTINGS, STEPS

_HEAD = """\
# Reference: every setting

Written by `make docs` from the code; a test holds it equal, so edit the help texts there.

Keys are written as in `prefect.yaml`, or dotted: `--set training.steps=40`, `-p 'overrides=["training.steps=40"]'`.
Where a group has a `name`, it chooses one of several; setting the name drops the settings of the choice before. null is
written `null`. A run may be continued with another value where the last column says so; any other change needs
`--allow-changes` ([reliability](reliability.md), [tutorial](tutorial.md)).
"""
_COLUMNS = ("key", "type", "default", "what it does", "on continuing")
_SEVERAL: dict[Any, str] = {tuple: ", a list of these", dict: ", one per name"}
_SOURCE = "data.mixture.NAME."


def page() -> str:
    """docs/reference.md."""
    return "\n".join([_HEAD, *_group(ExperimentConfig, "", "Experiment", 2), _machine()])


def _group(model: type[BaseModel], prefix: str, title: str, level: int) -> Iterator[str]:
    """A heading, a table of the values, and the groups below."""
    yield f"{'#' * level} {title}\n"
    if text := _text(model.__doc__ or ""):
        yield f"{text}\n"
    fields = [item for item in model.model_fields.items() if item[0] != "name" or not prefix]
    rows = [_row(f"{prefix}{name}", field) for name, field in fields if _is_row(prefix, field)]
    if rows:
        yield _table(_COLUMNS, rows)
    for name, field in fields:
        choices = models_in(field.annotation) if prefix != _SOURCE else []  # those of a source are shown elsewhere
        for choice in choices:
            key = f"{prefix}{name}.NAME" if get_origin(field.annotation) is dict else f"{prefix}{name}"
            named = f"`{key}: {{name: {tag_of(choice)}}}`" if tag_of(choice) else f"`{key}`"
            listed = _SEVERAL.get(get_origin(field.annotation), "")
            off = " (or null)" if NoneType in get_args(field.annotation) else ""
            by_default = ", the default" if len(choices) > 1 and isinstance(field.default, choice) else ""
            yield from _group(choice, f"{key}.", f"{named}{listed}{off}{by_default}", min(level + 1, 4))


def _is_row(prefix: str, field: FieldInfo) -> bool:
    return prefix == _SOURCE or get_origin(field.annotation) is dict or not models_in(field.annotation)


def _machine() -> str:
    rows = [_row(f"RLFLOW_{name.upper()}", field)[:-1] for name, field in Settings.model_fields.items()]
    table = _table(("variable", *_COLUMNS[1:-1]), rows)
    return f"## This machine\n\nRead from the environment; no experiment knows them.\n\n{table}"


def _row(key: str, field: FieldInfo) -> tuple[str, ...]:
    free = "more" if key == STEPS else "free" if key.startswith(FREE_SETTINGS) else ""
    return f"`{key}`", _type(field), _default(field), _text(field.description or ""), free


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _type(field: FieldInfo) -> str:
    models = [] if get_origin(field.annotation) is dict else models_in(field.annotation)
    if models:  # of a source
        return "as `reward`" if len(models) > 1 else "as `data.layout`"
    return describe_type(field)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if str(value) == sys.executable:
        return "the running Python"
    plain = value if isinstance(value, int | float | tuple | dict | NoneType) else str(value)
    return f"`{plain}`" if isinstance(plain, str) and plain else f"`{json.dumps(plain)}`"


def _text(text: str) -> str:
    return " ".join(text.replace("``", "`").split())
