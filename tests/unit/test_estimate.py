"""The estimate compared with measurements on one H200, and properties that hold for any constants."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from rlcore.config import LoraConfig, ModelConfig
from rlcore.errors import ModelError
from rlcore.estimate import (
    GIB,
    Architecture,
    ArchitectureSpec,
    Efficiency,
    Plan,
    batch_work,
    estimate_memory,
    estimate_seconds,
)
from rlcore.flops import pass_work
from rlcore.jobs.architecture import architecture, describe
from tasks.cli import estimate
from tasks.cli.estimate import compute_estimate, plan_of
from tasks.experiments import load_experiment
from tests.bench import estimates, loading
from tests.bench.estimates import BYTES, PEAK
from tests.bench.tables import DOCS, with_tables
from tests.bench.update import build_model
from tests.ranks import FORKED


@pytest.fixture(scope="module")
def models() -> dict[str, Architecture]:
    return estimates.models()


def kept_plan() -> Plan:
    return estimates.update_plan("text", "kept", "fixed")


ROWS = list(estimates.rows())


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.quantity}: {row.label}" for row in ROWS])
def test_an_estimate_is_as_near_to_what_was_measured_as_its_row_says(row: estimates.Row) -> None:
    assert row.estimated() == pytest.approx(row.measured, rel=row.within)


@pytest.mark.parametrize("recipe", list(loading.TEXT))
def test_loading_is_estimated_as_sharding_over_so_many_ranks_gives_it(recipe: str) -> None:
    experiment = load_experiment(recipe)
    with ProcessPoolExecutor(1, mp_context=FORKED) as process:  # this one may be in a group already
        simulated = process.submit(loading.simulate_recipe, recipe).result()
    model = architecture(loading.large_model(recipe), experiment.model)
    memory = estimate_memory(model, plan_of(experiment, model, "H200"))
    assert (memory.weights + memory.reference + memory.largest_tensor) / GIB == pytest.approx(
        simulated["device_gib"], rel=0.02
    )
    assert memory.loading < 0.1 * memory.device < simulated["whole_model_gib"] * GIB


def test_most_rows_were_measured_after_the_constants_were_fitted() -> None:
    later = [row for row in ROWS if not row.fitted]
    assert {row.quantity for row in later} == {"peak", "update", "sampling"}
    assert len(later) > len(ROWS) / 2


def test_the_table_of_estimates_is_what_make_docs_writes() -> None:
    page = DOCS / "cost.md"
    assert page.read_text() == with_tables(page.read_text()), "run make docs"


def test_the_models_are_those_of_their_cards(models: dict[str, Architecture]) -> None:
    assert models["text"].parameters == pytest.approx(1.54e9, rel=0.01)
    assert models["vl"].parameters == pytest.approx(3.75e9, rel=0.01)
    assert models["vl"].tower_parameters == pytest.approx(0.67e9, rel=0.01)


def test_memory_follows_what_it_must(models: dict[str, Architecture]) -> None:
    model = models["text"]
    one = replace(kept_plan(), reference=True)
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


def test_a_reward_model_on_the_policy_s_gpu_takes_its_memory_all_the_time(models: dict[str, Architecture]) -> None:
    alone = estimate_memory(models["text"], kept_plan())
    beside = estimate_memory(models["text"], replace(kept_plan(), reward_model=6 * GIB))
    assert (alone.reward_model, beside.reward_model) == (0, 8 * GIB)  # 2 GiB for its process
    for phase in ("loading", "training"):
        assert getattr(beside, phase) - getattr(alone, phase) == 8 * GIB
    assert beside.sampling(offload=False) - alone.sampling(offload=False) == 8 * GIB


def test_a_teacher_is_one_more_frozen_model_and_one_more_pass(models: dict[str, Architecture]) -> None:
    model, teacher = models["text"], models["vl"]
    alone = replace(kept_plan(), workers=4, offload=False)
    taught = replace(alone, teacher=teacher)
    before, after = estimate_memory(model, alone), estimate_memory(model, taught)
    share = 2 * teacher.parameters // 4
    assert after.teacher == share
    for moment in ("loading", "training"):
        assert getattr(after, moment) - getattr(before, moment) >= share
    assert after.sampling(False) - before.sampling(False) == share
    assert after.sampling(True) == before.sampling(True)
    assert (
        estimate_memory(model, replace(taught, offload=True)).host_offload
        - estimate_memory(model, replace(alone, offload=True)).host_offload
        == share
    )
    seconds = [estimate_seconds(model, plan, 1e15, 1e12) for plan in (alone, taught)]
    forward = batch_work(teacher, alone).forward_flops / (4 * 1e15 * Efficiency().forward)
    assert seconds[1].logprobs - seconds[0].logprobs == pytest.approx(forward)
    assert seconds[1].update == seconds[0].update


def test_workers_that_hold_one_sampler_share_its_memory_and_its_time(models: dict[str, Architecture]) -> None:
    model = models["text"]
    each = replace(kept_plan(), workers=4)
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
        kept_plan(),
        problems=2, group_size=2, prompt_tokens=10.0, completion_tokens=100.0,
    )  # fmt: skip
    # on a device that computes at once 100 steps become 50; on one that reads at once only what was begun is added
    reading = [estimate_seconds(model, replace(plain, in_flight=n), 1e30, BYTES).generate for n in (1.0, 2.0)]
    assert reading[1] == pytest.approx(reading[0] / 2, rel=0.01)
    computing = [estimate_seconds(model, replace(plain, in_flight=n), PEAK, 1e30).generate for n in (1.0, 2.0)]
    assert computing[1] / computing[0] == pytest.approx((420 + 4 * 60) / 420)


def test_overlapped_sampling_and_training_take_the_longer_of_the_two(models: dict[str, Architecture]) -> None:
    apart = replace(kept_plan(), rollout_workers=1)
    first, ahead = (estimate_seconds(models["text"], replace(apart, overlapped=b), PEAK, BYTES) for b in (False, True))
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


def test_tiles_count_as_windows_and_the_whole_image_as_one_more() -> None:
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 96}
    config = InternVLConfig(text_config=text, vision_config={**vision, "image_size": [56, 56]})
    with torch.device("meta"):
        shape = architecture(InternVLForConditionalGeneration(config), ModelConfig())
    assert (shape.tower_hidden, shape.tower_intermediate, shape.tower_layers) == (32, 96, 2)
    tower = shape.shape.tower
    assert tower is not None
    assert (tower.width, tower.parameters) == (32, 2 * (4 * 32 * 32 + 2 * 32 * 96) + 3 * 14 * 14 * 32)
    assert (tower.merged, tower.merger_parameters) == (4, 4 * 32 * 16 + 16 * 16)
    assert [tower.patches(56, 56), tower.patches(112, 56)] == [16, 3 * 16]
    one, two = (pass_work(shape.shape, [], [size]).forward_flops for size in [(56, 56), (112, 56)])
    assert one == 2 * 16 * (tower.parameters + tower.merger_parameters / 4) + 4 * 32 * 16 * 2 * 16
    assert two == 3 * one


def test_a_convolution_that_merges_patches_counts_as_part_of_the_merger() -> None:
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"depth": 2, "num_heads": 2, "hidden_size": 32, "out_hidden_size": 16, "intermediate_size": 96}
    with torch.device("meta"):
        hf = Glm4vForConditionalGeneration(Glm4vConfig(text_config=text, vision_config=vision))
        shape = architecture(hf, ModelConfig())
    tower = shape.shape.tower
    assert tower is not None
    assert (tower.merged, tower.merger_parameters) == (4, 16 * 16 + 3 * 16 * 96 + 4 * 32 * 16)
    assert tower.parameters == 2 * (4 * 32 * 32 + 3 * 32 * 16) + 2 * 3 * 14 * 14 * 32


def test_named_tiles_count_as_windows_too() -> None:
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 96}
    config = Idefics3Config(text_config=text, vision_config={**vision, "image_size": 56, "patch_size": 14})
    with torch.device("meta"):
        shape = architecture(Idefics3ForConditionalGeneration(config), ModelConfig())
    assert (shape.tower_hidden, shape.tower_intermediate, shape.tower_layers) == (32, 96, 2)
    tower = shape.shape.tower
    assert tower is not None
    assert (tower.width, tower.parameters) == (32, 2 * (4 * 32 * 32 + 2 * 32 * 96) + 3 * 14 * 14 * 32)
    assert (tower.merged, tower.merger_parameters) == (4, 4 * 32 * 16)
    assert [tower.patches(56, 56), tower.patches(112, 56)] == [16, 3 * 16]


def test_a_picture_that_is_one_square_counts_as_a_whole_frame() -> None:
    text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 96}
    square = {"image_size": 56, "patch_size": 14, "vision_use_head": False}
    config = Gemma3Config(text_config=text, vision_config={**vision, **square}, mm_tokens_per_image=4)
    with torch.device("meta"):
        shape = architecture(Gemma3ForConditionalGeneration(config), ModelConfig())
    assert (shape.tower_hidden, shape.tower_intermediate, shape.tower_layers) == (32, 96, 2)
    tower = shape.shape.tower
    assert tower is not None
    assert (tower.width, tower.parameters) == (32, 2 * (4 * 32 * 32 + 2 * 32 * 96) + 3 * 14 * 14 * 32)
    assert (tower.merged, tower.merger_parameters) == (4, 32 * 16)
    work = pass_work(shape.shape, [], [(56, 56)]).forward_flops
    assert work == 2 * 16 * (tower.parameters + tower.merger_parameters / 4) + 4 * 32 * 16 * 2 * 16


A3B = {  # of Qwen3-30B-A3B
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
}


@pytest.fixture(scope="module")
def a3b() -> Architecture:
    with torch.device("meta"):
        return architecture(Qwen3MoeForCausalLM(Qwen3MoeConfig(**A3B)), ModelConfig())


def test_all_experts_count_for_memory_and_those_that_a_token_uses_for_work(a3b: Architecture) -> None:
    attention, router, expert = 2048 * (2 * 32 + 2 * 4) * 128, 128 * 2048, 3 * 768 * 2048
    norms, head = 2 * 2048 + 2 * 128, 151_936 * 2048
    assert a3b.shape.parameters == 48 * (attention + router + 8 * expert)
    assert a3b.decoder_parameters == 48 * (attention + router + 128 * expert)
    assert a3b.parameters == a3b.decoder_parameters + 48 * norms + 2048 + 2 * head
    assert a3b.parameters == pytest.approx(30.5e9, rel=0.002)  # its card: 30.5 B, of which a token uses 3.3 B
    assert a3b.shape.parameters + 2 * head == pytest.approx(3.35e9, rel=0.002)
    assert (a3b.intermediate, a3b.experts_per_token) == (8 * 768, 8)
    assert a3b.largest_parameter == a3b.largest_stack == 128 * 2 * 768 * 2048
    memory = estimate_memory(a3b, replace(kept_plan(), workers=8, reshard=True))
    assert memory.weights == 4 * a3b.parameters // 8
    assert memory.sampler_weights == 2 * a3b.parameters
    assert memory.host_stack == 3 * 2 * a3b.largest_stack


def test_a_step_of_few_sequences_reads_only_the_experts_that_they_use(a3b: Architecture) -> None:
    plan = replace(kept_plan(), problems=1, prompt_tokens=1.0, completion_tokens=1000.0)

    def weights_read(sequences: int) -> float:
        asked = replace(plan, group_size=sequences, max_sequences=sequences)
        seconds = estimate_seconds(a3b, asked, peak=1e30, bandwidth=1.0).generate * Efficiency().decode
        cache = sequences * (1 + 500) * 2 * 48 * 4 * 128 * 2
        return seconds / 1000 - cache

    head = 151_936 * 2048
    assert weights_read(1) == pytest.approx(2 * (a3b.shape.parameters + head))
    assert weights_read(4) == pytest.approx(2 * (4 * a3b.shape.parameters + head))
    assert weights_read(64) == pytest.approx(2 * (a3b.decoder_parameters + head))


def test_the_decoder_of_the_model_that_sees_is_that_of_the_text_model(a3b: Architecture) -> None:
    """Qwen3-VL-30B-A3B."""
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    config = Qwen3VLMoeConfig(text_config=A3B | {"rope_parameters": rope}, tie_word_embeddings=False)
    with torch.device("meta"):
        found = architecture(Qwen3VLMoeForConditionalGeneration(config), ModelConfig())
    assert found.shape.parameters == a3b.shape.parameters
    assert found.decoder_parameters == a3b.decoder_parameters
    assert found.parameters - found.tower_parameters == a3b.parameters
    assert (found.intermediate, found.experts_per_token) == (8 * 768, 8)


def test_each_deepstack_layer_has_a_merger_of_its_own() -> None:
    text = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2}
    tower = {"hidden_size": 32, "intermediate_size": 96, "out_hidden_size": 16, "num_heads": 2, "depth": 4}
    config = Qwen3VLConfig(text_config=text, vision_config={**tower, "deepstack_visual_indexes": [0, 2]})
    with torch.device("meta"):
        found = architecture(Qwen3VLForConditionalGeneration(config), ModelConfig())
    assert (found.tower_hidden, found.tower_intermediate, found.tower_layers) == (32, 96, 4)
    shape = found.shape.tower
    assert shape is not None
    assert shape.parameters == 4 * (4 * 32 * 32 + 2 * 32 * 96) + 3 * 2 * 16 * 16 * 32
    assert shape.merger_parameters == 3 * (4 * 32 * 4 * 32 + 4 * 32 * 16)  # four patches become one
    assert (shape.patch_size, shape.full_layers, shape.window_layers) == (16, 4, 0)


def test_a_folder_with_nothing_but_config_json_will_do(tmp_path: Path) -> None:
    config = build_model("vl", True, torch.device("meta"), torch.float32).config
    assert isinstance(config, Qwen2_5_VLConfig)
    config.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    spec = ArchitectureSpec(result=tmp_path / "r.json", model=ModelConfig(path=str(tmp_path)))
    model = describe(spec).architecture
    experiment = load_experiment("grpo-geo3k", [f"model.path={tmp_path}"])
    found = compute_estimate(experiment, model, "H100")
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
    found = compute_estimate(experiment, models["vl"], "A100")
    assert not found.fits
    assert "DOES NOT FIT" in found.text()


def test_a_dry_run_tells_the_estimate_of_the_models_architecture(
    models: dict[str, Architecture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    experiment = load_experiment("grpo-geo3k")
    model = next(iter(models.values()))
    asked: list[tuple[Any, ...]] = []

    def job(*words: Any, quiet: bool) -> SimpleNamespace:
        asked.append((*words, quiet))
        return SimpleNamespace(architecture=model)

    monkeypatch.setattr(estimate, "run_job", job)
    found = estimate.dry_run(experiment, "H100")
    assert found == estimate.compute_estimate(experiment, model, "H100")
    assert capsys.readouterr().err == f"{found.text()}\n"
    ((module, spec, kind, settings, quiet),) = asked
    assert (module, kind, quiet) == ("rlcore.jobs.architecture", estimate.ArchitectureRef, True)
    assert spec.model == experiment.model
    assert settings.data_dir == tmp_path
    assert spec.result.parent.name.startswith("architecture-")
