"""What every part of the configuration is."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Frozen(BaseModel):
    """Immutable; a key that is not a field is an error; docstrings are the descriptions that people see."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def named_by_default(name: str) -> BeforeValidator:
    """For a tagged union: values without a ``name`` are settings of this choice."""

    def with_name(value: Any) -> Any:
        return {"name": name, **value} if isinstance(value, dict) else value

    return BeforeValidator(with_name)
