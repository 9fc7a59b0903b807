"""Promise 3: the sampler holds the weights that the trainer says it holds, pictures included."""

from __future__ import annotations

import pytest

from tests.integration.engine_bench import all_weights, measured


@pytest.mark.parametrize("model", ["tiny_model"])
def test_a_sync_reaches_every_weight_and_every_cache(model: str, request: pytest.FixtureRequest) -> None:
    result = measured(all_weights, request.getfixturevalue(model))
    assert result["before"] < 1e-4
    assert result["stale"] > 1e-2  # the same pictures and prompts under old weights are told apart
    assert result["after"] < 1e-4  # so no cache kept features of the old vision tower
    assert result["version"] == 1
    assert "not every weight" in result["lm_head.weight"]
    assert "not every weight" in result["model.visual.merger.mlp.0.weight"]
