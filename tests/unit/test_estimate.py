"""The estimate against what was measured on one H200, and against what it must be whatever the constants are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from rlcore.algorithms.estimate import BANDWIDTH, GIB, Architecture, Plan, estimate_memory, estimate_seconds
from rlcore.algorithms.flops import PEAK_BF16
from rlcore.config import LoraConfig, ModelConfig
from rlcore.errors import ModelError
from rlcore.job import ArchitectureSpec
from rlcore.models.architecture import architecture, describe
from tasks.estimate import estimated
from tasks.experiments import load_experiment
from tests.bench.update import SHAPES, build_model

BENCH = Path(__file__).resolve().parents[1] / "bench"
UPDATES = json.loads((BENCH / "update_h200.json").read_text())["results"]
PEAK, BYTES = PEAK_BF16["H200"], BANDWIDTH["H200"]


@pytest.fixture(scope="module")
def models() -> dict[str, Architecture]:
    return {
        kind: architecture(build_model(kind, False, torch.device("meta"), torch.float32), ModelConfig())
        for kind in SHAPES
    }


def plan(
    kind: str, measured: dict[str, Any], regime: str, *, checkpointing: str, compiled: bool, bf16: bool = False
) -> Plan:
    shape = SHAPES[kind]
    return Plan(
        workers=1, rollout_workers=0, engine_workers=1, group_size=8, problems=measured["problems"], passes=1,
        prompt_tokens=shape.prompt, completion_tokens=measured[regime]["mean_completion"],
        longest=shape.prompt + shape.cap, image_size=(shape.side, shape.side) if shape.side else None,
        tokens_per_microbatch=round(measured[regime]["computed_tokens"] / measured[regime]["microbatches"]),
        checkpointing=checkpointing, compiled=compiled, bf16_optimizer=bf16, reshard=False, offload=False,
        reference=False, old_logprobs=False, sampler_share=0.5, max_sequences=1024, in_flight=1.0,
        beside=False, device="H200",
    )  # fmt: skip


VARIANTS = [
    ("text", "kept", "fixed", "none", True), ("text", "compiled", "fixed", "full", True),
    ("text", "kept_eager", "fixed", "none", False), ("vl", "kept", "fixed", "none", True),
    ("vl", "kept_eager", "fixed", "none", False), ("text-7b", "selective_bf16", "fixed", "selective", True),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "variant", "regime", "checkpointing", "compiled"), VARIANTS)
def test_memory_of_an_update_is_within_a_tenth_of_what_was_measured(
    models: dict[str, Architecture], kind: str, variant: str, regime: str, checkpointing: str, compiled: bool
) -> None:
    measured = UPDATES[kind][variant]
    bf16 = variant.endswith("_bf16")
    here = plan(kind, measured, regime, checkpointing=checkpointing, compiled=compiled, bf16=bf16)
    found = estimate_memory(models[kind], here)
    assert found.training / GIB == pytest.approx(measured[regime]["peak_gib"], rel=0.10)


@pytest.mark.parametrize(
    ("kind", "variant", "regime", "checkpointing", "within"),
    [
        ("text", "kept", "fixed", "none", 0.05), ("text", "kept", "ragged", "none", 0.15),
        ("text", "compiled", "fixed", "full", 0.05), ("vl", "kept", "fixed", "none", 0.05),
        ("vl", "kept", "ragged", "none", 0.15), ("text-7b", "selective_bf16", "fixed", "selective", 0.05),
    ],
)  # fmt: skip
def test_time_of_an_update_is_near_what_was_measured(
    models: dict[str, Architecture], kind: str, variant: str, regime: str, checkpointing: str, within: float
) -> None:
    measured = UPDATES[kind][variant]
    bf16 = variant.endswith("_bf16")
    here = plan(kind, measured, regime, checkpointing=checkpointing, compiled=True, bf16=bf16)
    found = estimate_seconds(models[kind], here, PEAK, BYTES)
    assert found.update == pytest.approx(measured[regime]["seconds"], rel=within)


@pytest.mark.parametrize(
    ("kind", "problems", "prompt", "completion", "seconds"),
    [
        ("text", 128, 256, 512, 6.823), ("vl", 32, 64 + 324, 512, 4.177),  # accepted/rollout-*-h200.json
        ("text", 32, 256, 1024, 5.106),  # accepted/step-text-h200.json
    ],
)  # fmt: skip
def test_time_of_sampling_is_within_a_sixth_of_what_was_measured(
    models: dict[str, Architecture], kind: str, problems: int, prompt: int, completion: int, seconds: float
) -> None:
    here = plan(kind, UPDATES[kind]["kept"], "fixed", checkpointing="none", compiled=True)
    here = replace(here, problems=problems, prompt_tokens=prompt, completion_tokens=completion)
    assert estimate_seconds(models[kind], here, PEAK, BYTES).generate == pytest.approx(seconds, rel=1 / 6)


def test_the_models_are_those_of_their_cards(models: dict[str, Architecture]) -> None:
    assert models["text"].parameters == pytest.approx(1.54e9, rel=0.01)
    assert models["vl"].parameters == pytest.approx(3.75e9, rel=0.01)
    assert models["vl"].tower_parameters == pytest.approx(0.67e9, rel=0.01)


def test_memory_follows_what_it_must(models: dict[str, Architecture]) -> None:
    model = models["text"]
    one = replace(plan("text", UPDATES["text"]["kept"], "fixed", checkpointing="none", compiled=True), reference=True)
    assert estimate_memory(model, one).weights == 4 * model.parameters
    assert estimate_memory(model, one).optimizer == 8 * model.parameters
    eight = estimate_memory(model, replace(one, workers=8, reshard=True))
    assert eight.optimizer == model.parameters
    assert eight.reference == 2 * model.parameters // 8
    small = estimate_memory(model, replace(one, bf16_optimizer=True))
    assert small.weights + small.optimizer == 8 * model.parameters
    embedding = 151_936 * 1536
    assert estimate_memory(model, replace(one, offload=True)).optimizer == 8 * embedding
    half = replace(one, tokens_per_microbatch=one.tokens_per_microbatch // 2)
    assert estimate_memory(model, half).activations == pytest.approx(estimate_memory(model, one).activations / 2)
    kept = [
        estimate_memory(model, replace(one, checkpointing=name)).activations for name in ("full", "selective", "none")
    ]
    assert kept == sorted(kept)
    assert estimate_memory(model, one).sampling(offload=True) < estimate_memory(model, one).sampling(offload=False)


def test_workers_that_hold_one_sampler_share_its_memory_and_its_time(models: dict[str, Architecture]) -> None:
    model = models["text"]
    each = replace(plan("text", UPDATES["text"]["kept"], "fixed", checkpointing="none", compiled=True), workers=4)
    together = replace(each, engine_workers=4)
    alone, shared = estimate_memory(model, each), estimate_memory(model, together)
    assert 4 * shared.sampler_weights == alone.sampler_weights
    assert shared.sampler_weights + shared.kv_cache == alone.sampler_weights + alone.kv_cache, "the engine's share"
    assert 4 * shared.kv_cache_wanted == alone.kv_cache_wanted
    # four samplers read the weights four times as often as one on four times the bandwidth, and the cache as often
    few = [replace(one, problems=4, group_size=1) for one in (each, together)]
    times = [estimate_seconds(model, one, PEAK, BYTES).generate for one in few]
    assert times[1] < times[0] / 3


def test_more_in_flight_reads_the_weights_less_often_and_computes_what_was_begun_again(
    models: dict[str, Architecture],
) -> None:
    model = models["text"]
    plain = replace(
        plan("text", UPDATES["text"]["kept"], "fixed", checkpointing="none", compiled=True),
        problems=2, group_size=2, prompt_tokens=10.0, completion_tokens=100.0,
    )  # fmt: skip
    # on a device that computes at once 100 steps become 50; on one that reads at once only what was begun is added
    reading = [estimate_seconds(model, replace(plain, in_flight=n), 1e30, BYTES).generate for n in (1.0, 2.0)]
    assert reading[1] == pytest.approx(reading[0] / 2, rel=0.01)
    computing = [estimate_seconds(model, replace(plain, in_flight=n), PEAK, 1e30).generate for n in (1.0, 2.0)]
    assert computing[1] / computing[0] == pytest.approx((420 + 4 * 60) / 420)


def test_what_is_sampled_beside_the_training_takes_the_longer_of_the_two(models: dict[str, Architecture]) -> None:
    apart = replace(
        plan("text", UPDATES["text"]["kept"], "fixed", checkpointing="none", compiled=True), rollout_workers=1
    )
    first, ahead = (estimate_seconds(models["text"], replace(apart, beside=b), PEAK, BYTES) for b in (False, True))
    assert first.total == pytest.approx(first.generate + first.update + first.weight_sync)
    assert ahead.total == pytest.approx(max(ahead.generate, ahead.update) + ahead.weight_sync)


def test_adapters_and_frozen_towers_have_no_gradients_elsewhere() -> None:
    hf = build_model("vl", True, torch.device("meta"), torch.float32)
    lora = architecture(hf, ModelConfig(lora=LoraConfig(rank=4)))
    assert 0 < lora.trained_parameters < lora.parameters / 5
    assert not lora.shape.weights_train
    frozen = architecture(
        build_model("vl", True, torch.device("meta"), torch.float32), ModelConfig(freeze_vision_tower=True)
    )
    assert frozen.trained_parameters == frozen.parameters - frozen.tower_parameters
    assert frozen.shape.tower is not None
    assert not frozen.shape.tower.trains


def test_the_width_of_qwen2_vls_tower_is_not_its_hidden_size() -> None:
    """There hidden_size is the decoder's."""
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2VLConfig(
        text_config=text, vision_config={"depth": 2, "num_heads": 2, "embed_dim": 32, "hidden_size": 16, "mlp_ratio": 3}
    )
    with torch.device("meta"):
        shape = architecture(Qwen2VLForConditionalGeneration(config), ModelConfig())
    assert (shape.tower_hidden, shape.tower_intermediate) == (32, 96)
    tower = shape.shape.tower
    assert tower is not None
    # qkv, proj and two matrices of the feed-forward part a block; 3 channels x 2 frames x 14 x 14 pixels a patch
    assert (tower.width, tower.parameters) == (32, 2 * (4 * 32 * 32 + 2 * 32 * 96) + 3 * 2 * 14 * 14 * 32)


def test_a_folder_with_nothing_but_config_json_will_do(tmp_path: Path) -> None:
    config = build_model("vl", True, torch.device("meta"), torch.float32).config
    assert isinstance(config, Qwen2_5_VLConfig)
    config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    spec = ArchitectureSpec(result=tmp_path / "r.json", model=ModelConfig(path=str(tmp_path)))
    model = describe(spec).architecture
    experiment = load_experiment("grpo-geo3k", [f"model.path={tmp_path}"])
    found = estimated(experiment, model, "H100")
    assert found.fits
    assert found.batches == 60
    assert "Memory per GPU" in found.text()


def test_a_model_that_cannot_be_fetched_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spec = ArchitectureSpec(result=tmp_path / "r.json", model=ModelConfig(path="nobody/nothing"))
    with pytest.raises(ModelError, match=r"put it into a folder and add --set model\.path=FOLDER"):
        describe(spec)


def test_a_model_that_is_too_large_does_not_fit(models: dict[str, Architecture]) -> None:
    experiment = load_experiment("grpo-geo3k", ["resources.workers=1", "model.gradient_checkpointing=none"])
    found = estimated(experiment, models["vl"], "A100")
    assert not found.fits
    assert "DOES NOT FIT" in found.text()
