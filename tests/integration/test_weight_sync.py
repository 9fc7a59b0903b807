"""Promise 3: the sampler holds the weights that the trainer says it holds, pictures included."""

from __future__ import annotations

from pathlib import Path

from tests.integration.engine_bench import all_weights, measured


def test_a_sync_reaches_every_weight_and_every_cache(each_model: Path) -> None:
    result = measured(all_weights, each_model)
    assert result["before"] < 1e-4
    assert result["stale"] > 1e-2  # the same pictures and prompts under old weights are told apart
    assert result["after"] < 1e-4  # so no cache kept features of the old vision tower
    assert result["version"] == 1
    assert "not every weight" in result["without head"]
    assert "not every weight" in result["without tower"]
