"""The base of every part of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Frozen(BaseModel):
    """Immutable. An unknown key is an error. The docstrings of fields are their help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def named_by_default(name: str) -> BeforeValidator:
    """For a tagged union: values without ``name`` are settings of the choice ``name``."""

    def with_name(value: Any) -> Any:
        return {"name": name, **value} if isinstance(value, dict) else value

    return BeforeValidator(with_name)


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            yield from flatten(value, name)
        else:
            yield name, value
