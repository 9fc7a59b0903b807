"""An engine whose model is transformers' own gets a class of its own, because vLLM changes it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModel, AutoModelForCausalLM, Olmo2Config, Olmo2Model

from rlcore.sampler.start import give_own_class
from tests.checking import FAMILIES, Size


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    FAMILIES["olmo2"](Size(head=8, heads=2, vocabulary=20)).save_pretrained(tmp_path)
    yield tmp_path
    AutoModel._model_mapping._extra_content.pop(Olmo2Config, None)


def test_the_engine_builds_a_subclass_and_the_trainer_transformers_own(folder: Path) -> None:
    config = Olmo2Config.from_pretrained(folder)
    before = {name: getattr(Olmo2Model, name) for name in ("__init__", "__call__", "__bases__")}
    for _ in range(2):  # a second engine of the process takes the same class
        give_own_class(folder, False)
        engines = type(AutoModel.from_config(config))
        assert engines.__bases__ == (Olmo2Model,)
    engines.__init__ = lambda self: None  # type: ignore[misc]  # as vLLM does
    assert type(AutoModelForCausalLM.from_config(config).model) is Olmo2Model
    assert {name: getattr(Olmo2Model, name) for name in before} == before
