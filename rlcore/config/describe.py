"""What a setting allows, in words: for error messages and for the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_BOUNDS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"), (MaxLen, "max_length", "length <="))
_WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true / false",
    Path: "path",
    NoneType: "null",
    dict: "mapping",
}


def describe_type(field: FieldInfo) -> str:
    """The type of a setting, its bounds and its pattern: ``whole number or null, >= 1``."""
    return ", ".join([_words(field.annotation), *_limits(field.metadata)])


def describe_entry(field: FieldInfo) -> str:
    """What an entry of a list or a mapping may be; empty if the setting is neither."""
    for several in _lists_and_mappings(field.annotation):
        return _words(get_args(several)[-1 if get_origin(several) is dict else 0])
    return ""


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The groups of settings that a value of this type may be, or may contain."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models_in(argument)]


def tag_of(model: type[BaseModel]) -> str | None:
    """The name that chooses this group among several, None if nothing is to be chosen."""
    field = model.model_fields.get("name")
    return field.default if field is not None and get_origin(field.annotation) is Literal else None


def _lists_and_mappings(annotation: Any) -> list[Any]:
    return [choice for choice in (annotation, *get_args(annotation)) if get_origin(choice) in (list, tuple, dict)]


def _limits(metadata: Sequence[Any]) -> Iterator[str]:
    for item in metadata:
        yield from (f"{sign} {getattr(item, name):g}" for kind, name, sign in _BOUNDS if isinstance(item, kind))
        if getattr(item, "allow_inf_nan", None) is False:
            yield "finite"
        if pattern := getattr(item, "pattern", None):
            yield f"`{pattern}`"


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if models_in(annotation) and origin is not dict:
        return "list of groups of settings" if _lists_and_mappings(annotation) else "group of settings"
    if origin is Annotated:
        inner = [item for field in arguments[1:] if isinstance(field, FieldInfo) for item in field.metadata]
        return " ".join([_words(arguments[0]), *_limits(inner)])
    if origin is Literal:
        return " / ".join(str(item) for item in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_words(item) for item in arguments))
    if origin in (tuple, list):
        listed = arguments[:-1] if arguments[-1] is Ellipsis else arguments
        return f"list of {' and '.join(dict.fromkeys(map(_words, listed)))}"
    return _WORDS.get(origin or annotation) or str(annotation.__name__)
