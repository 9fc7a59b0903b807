"""check-model on a GPU: bfloat16, FlashAttention and an engine that sleeps."""

from __future__ import annotations

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


def compared(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, (family, overrides) in CASES.items():
        check = checked(make_model(folder / name, family), "resources.device=cuda", *overrides)
        result[name] = (differing(check), len(check.rows), check.markdown())
    return result


def test_models_agree_on_a_gpu(tmp_path: Path) -> None:
    result = measured(compared, tmp_path)
    assert {name: (differ, rows) for name, (differ, rows, _) in result.items()} == dict.fromkeys(CASES, ({}, 7))
