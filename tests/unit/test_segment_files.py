"""What processes say to each other through the files of a run: no unknown key, no change after it was read."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from rlcore import adjustments
from rlcore.segment import lease, spec, store

KINDS = [
    kind
    for module in (adjustments, lease, spec, store)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__module__ == module.__name__
]


def test_every_kind_of_file_is_known_here() -> None:
    assert {kind.__name__ for kind in KINDS} == {
        "Intervention", "Adjustments", "LeaseInfo", "ControlState", "SegmentSpec", "SegmentManifest", "FileEntry",
        "CheckpointManifest",
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_key_is_refused(kind: type[BaseModel]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"no_such_key": 1})
    assert ("no_such_key",) in [error["loc"] for error in refused.value.errors() if error["type"] == "extra_forbidden"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_does_not_change(kind: type[BaseModel]) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(kind.model_construct(), next(iter(kind.model_fields)), 1)
