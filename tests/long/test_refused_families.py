"""What is missing for the model types that are refused, measured, so that a new version that has it is noticed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import CONFIG_MAPPING

from rlcore.errors import ModelError
from rlcore.families import FAMILIES as TABLE
from rlcore.families import REFUSED, qwen2
from tests.checking import REFUSED as MODELS
from tests.checking import checked, differing, make_model
from tests.integration.engine_bench import measured


@pytest.mark.parametrize("model_type", REFUSED)
def test_check_model_refuses_it_with_what_is_missing(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"model_type '{model_type}', which is refused: "):
        checked(make_model(tmp_path / "model", model_type), with_engine=False)


def test_every_refused_model_type_has_a_model() -> None:
    assert REFUSED.keys() == MODELS.keys()


def test_the_packed_attention_has_no_sinks(tmp_path: Path) -> None:
    with mock.patch.dict(TABLE, {"gpt_oss": qwen2.FAMILY}), pytest.raises(ModelError, match="attention with s_aux"):
        checked(make_model(tmp_path / "model", "gpt_oss"), with_engine=False)


def test_transformers_does_not_know_kimi_vl() -> None:
    assert "kimi_vl" not in CONFIG_MAPPING


def of_gemma3(folder: Path) -> dict[str, Any]:
    """The rows that differ with vLLM on a CPU, and those that differ if trainer and transformers see backwards only."""
    from rlcore.families.gemma3 import Gemma3Images
    from rlcore.jobs import check_model
    from rlcore.sampler import start

    backwards = partial(mock.patch.object, Gemma3Images)
    plain, layout = Gemma3Images.plain_arguments, Gemma3Images.layout
    with mock.patch.object(check_model, "require_pictures"), mock.patch.object(start, "require_pictures"):
        both_ways = differing(checked(make_model(folder / "model", "gemma3")))
        with (
            backwards("plain_arguments", lambda *given: {"pixel_values": plain(*given)["pixel_values"]}),
            backwards("layout", lambda *given: replace(layout(*given), both_ways=False)),
        ):
            causal = differing(checked(make_model(folder / "causal", "gemma3")))
    return {"both ways": both_ways, "causal": causal}


def test_vllm_on_a_cpu_attends_causally_within_a_picture_and_agrees_in_all_else(tmp_path: Path) -> None:
    result = measured(of_gemma3, tmp_path)
    assert result["causal"] == {}
    assert result["both ways"].keys() == {"vLLM", "vLLM after a weight sync"}
    assert all(place.startswith("decoder layer 0 (") for place in result["both ways"].values())
