"""Promise 3 for an LM head of its own, for another dtype, and for adapters."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine_bench import Bench, all_weights, measured


def sixteen_bits(dtype: str, model: Path) -> dict[str, Any]:
    """An engine that computes in another dtype than the policy."""
    bench = Bench(model, None, dtype=dtype)
    at_start = max(float(value.abs().max()) for value in bench.held())
    bench.sampler.load_weights(bench.policy.full_weights(), 0)
    result = {"before": bench.delta(), "at_start": at_start}
    bench.shake()
    result["stale"] = bench.delta()
    bench.sampler.load_weights(bench.policy.full_weights(), 1)
    return result | {"after": bench.delta(), "held": {str(value.dtype) for value in bench.held()}}


def quantised(model: Path) -> dict[str, Any]:
    """An engine that quantises linear weights, and what a sync says of weights that were quantised differently."""
    from rlcore.errors import SamplerError
    from rlcore.sampler.quantised import FP8, fp8_rows

    bench = Bench(model, None, dtype="bfloat16", quantization="fp8")
    sampler, policy = bench.sampler, bench.policy
    sampler.load_weights(policy.full_weights(), 0)
    result: dict[str, Any] = {"before": bench.delta(), "layers": sum(value.dtype == FP8 for value in bench.held())}
    bench.shake()
    result["stale"] = bench.delta()
    sampler.load_weights(policy.full_weights(), 1)
    result["after"] = bench.delta()
    layer, sent = bench.quantised_layers("o_proj")[0], dict(policy.full_weights())
    name = next(name for name in sent if name.endswith("layers.0.self_attn.o_proj.weight"))
    mine, of_rows = fp8_rows(sent[name].bfloat16())
    result["same"] = bool((layer.weight.t().float() == mine.float()).all() and (layer.weight_scale == of_rows).all())
    layer = bench.quantised_layers("qkv_proj")[0]
    process = type(layer.quant_method).process_weights_after_loading

    def rounds_down(self: Any, layer: Any) -> None:
        process(self, layer)
        layer.weight_scale.data.mul_(0.99)

    type(layer.quant_method).process_weights_after_loading = rounds_down
    try:
        sampler.load_weights(policy.full_weights(), 2)
    except SamplerError as error:
        result["other scale"] = str(error)
    type(layer.quant_method).process_weights_after_loading = process
    try:
        sampler.load_weights(
            ((n, v) for n, v in policy.full_weights() if "layers.1.self_attn.v_proj.weight" not in n), 2
        )
    except SamplerError as error:
        result["missing"] = str(error)
    sampler.load_weights(policy.full_weights(), 3)
    return result | {"again": bench.delta(), "version": bench.version()}


def adapters(model: Path, *, vision_tower: bool) -> dict[str, Any]:
    """The same with adapters, and frozen weights that are sent once."""
    from rlcore.errors import SamplerError

    bench = Bench(model, {"rank": 4, "alpha": 12.0, "vision_tower": vision_tower})
    sampler, policy = bench.sampler, bench.policy
    sampler.load_base(policy.full_weights())
    sampler.load_adapter(policy.adapter_weights(), 0)
    result: dict[str, Any] = {"before": bench.delta()}
    bench.shake()
    result["stale"] = bench.delta()
    tensors = dict(policy.adapter_weights())
    for wrong in ("up_proj", "self_attn.k_proj"):  # vLLM keeps quiet about an adapter of a layer that it does not have
        try:
            sampler.load_adapter([(name.replace(wrong, f"{wrong}_"), value) for name, value in tensors.items()], 1)
        except SamplerError as error:
            result[wrong] = str(error)
    try:
        sampler.load_base((name, value) for name, value in policy.full_weights() if "o_proj" not in name)
    except SamplerError as error:
        result["base"] = str(error)
    sampler.load_base((name, value * 1.001) for name, value in policy.full_weights())
    sampler.load_adapter(policy.adapter_weights(), 2)
    result["other_base"] = bench.delta()
    sampler.load_base(policy.full_weights())
    started = time.monotonic()
    sampler.load_adapter(policy.adapter_weights(), 2)
    result["seconds"] = time.monotonic() - started
    result["after"] = bench.delta()
    bench.shake()
    sampler.load_adapter(policy.adapter_weights(), 3)
    assert all((value == tensors[name]).all() for name, value in tensors.items())
    return result | {"again": bench.delta(), "version": bench.version()}


def adapters_in_the_vision_tower(model: Path) -> dict[str, Any]:
    return adapters(model, vision_tower=True)


def adapters_in_the_language_model(model: Path) -> dict[str, Any]:
    return adapters(model, vision_tower=False)


@pytest.mark.parametrize("model", ["tiny_model", "untied_model"])
def test_a_sync_reaches_every_weight_and_every_cache(model: str, request: pytest.FixtureRequest) -> None:
    result = measured(all_weights, request.getfixturevalue(model))
    assert result["before"] < 1e-4
    assert result["stale"] > 1e-2  # the same pictures and prompts under old weights are told apart
    assert result["after"] < 1e-4  # so no cache kept features of the old vision tower
    assert result["version"] == 1
    assert "not every weight" in result["without head"]
    assert "not every weight" in result["without tower"]


def test_an_engine_in_another_dtype_holds_the_weights_rounded_to_it(tiny_model: Path) -> None:
    result = measured(partial(sixteen_bits, "float16"), tiny_model)
    assert result["at_start"] == 0  # it read none
    assert result["held"] == {"torch.float16"}
    assert 1e-4 < result["before"] < 40 * 2**-11
    assert result["after"] < 40 * 2**-11 < result["stale"]


def _assert_adapters_arrive(result: dict[str, Any]) -> None:
    assert result["before"] < 1e-5
    assert result["stale"] > 1e-2
    assert result["after"] < 1e-4  # the weights were shaken by far more than training does
    assert result["again"] < 1e-4
    assert result["version"] == 3
    assert "not every tensor" in result["up_proj"]
    assert "not every tensor" in result["self_attn.k_proj"]
    assert "not every weight" in result["base"]
    assert result["other_base"] > 1e-4


@pytest.mark.parametrize("measure", [adapters_in_the_language_model, adapters_in_the_vision_tower])
def test_adapters_go_from_memory_to_memory(tiny_model: Path, measure: Callable[[Path], dict[str, Any]]) -> None:
    _assert_adapters_arrive(measured(measure, tiny_model))


def test_adapters_of_a_text_model_as_well(tmp_path: Path) -> None:
    from rlcore.config import TinyModelConfig
    from rlcore.models.tiny import create_tiny_policy

    create_tiny_policy(tmp_path, TinyModelConfig(task="sums", warm_start_steps=0))
    _assert_adapters_arrive(measured(adapters_in_the_language_model, tmp_path))


# qkv, o, gate_up and down of each of three decoder layers; nothing of the tower, and no experts
@pytest.mark.parametrize(("model", "layers"), [("tiny_model", 3 * 4), ("experts_model", 3 * 2)])
def test_an_engine_holds_the_weights_quantised(model: str, layers: int, request: pytest.FixtureRequest) -> None:
    result = measured(quantised, request.getfixturevalue(model))
    assert result["layers"] == layers
    assert 1e-3 < result["before"] < 2  # nats, the largest of all tokens
    assert result["after"] < min(2.5, result["stale"] / 1.5)  # rounding sends some tokens to other experts
    assert result["same"]
    assert "not every weight" in result["other scale"]
    assert "not every weight" in result["missing"]
    assert result["again"] == result["after"]
    assert result["version"] == 3
