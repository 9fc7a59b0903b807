"""check-model on a GPU: bfloat16, FlashAttention and an engine that sleeps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.checking import checked, differing, make_model
from tests.integration.engine_bench import measured

pytestmark = pytest.mark.gpu
CASES = {
    "text": ("llama", ()),
    "images": ("qwen2_5_vl", ()),
    "adapters": ("qwen2_5_vl", ("model.lora.rank=8",)),
    "float32": ("qwen2", ("model.compute_dtype=float32",)),
}


def compared(folder: Path, name: str) -> dict[str, Any]:
    family, overrides = CASES[name]
    check = checked(make_model(folder / "model", family), "resources.device=cuda", *overrides)
    return {"differ": differing(check), "rows": len(check.rows), "table": check.markdown()}


@pytest.mark.parametrize("name", CASES)
def test_models_agree_on_a_gpu(name: str, tmp_path: Path) -> None:
    """In a process of its own, because a process can have only one engine that sleeps."""
    result = measured(partial(compared, name=name), tmp_path)
    assert (result["differ"], result["rows"]) == ({}, 7), result["table"]
