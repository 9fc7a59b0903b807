"""Models whose packed forward pass would be another model's."""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4vConfig,
    GraniteConfig,
    Idefics3Config,
    InternVLConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
)

from rlcore.config import LoraConfig
from rlcore.errors import ModelError
from rlcore.families import family_of, images_in, require_pictures
from rlcore.families.protocol import Caps
from rlcore.models.loading import exact_attention, require_supported
from rlcore.models.tiny import build_model

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 12, "num_key_value_heads": 2}
EVEN = {**SMALL, "hidden_size": 24}


def check(config: object, sequence_parallel: int = 1, tensor_parallel: int = 1) -> None:
    require_supported(config, sequence_parallel=sequence_parallel, tensor_parallel=tensor_parallel)


@pytest.mark.parametrize("family", [None, "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "idefics3"])
def test_the_tiny_policy_is_supported(family):
    check(build_model(family, 0).config, sequence_parallel=4, tensor_parallel=4)


def test_the_heads_of_the_tower_limit_tensor_parallelism():
    """Sizes of the 8B: 4,304 = 16 x 269 is the width of the tower's feed-forward layers."""
    text = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "intermediate_size": 12288}
    config = Qwen3VLConfig(text_config=text)
    check(config, tensor_parallel=16)
    with pytest.raises(ModelError, match=r"tensor_parallel is 32, .* qwen3_vl .* Allowed are \[1, 2, 4, 8, 16\]"):
        check(config, tensor_parallel=32)


def test_the_window_of_each_layer():
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
    assert masks(Qwen2Config(**SMALL)) == [None, None]
    assert masks(Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=64)) == [None, None]
    assert masks(Qwen2Config(**SMALL, **windows)) == [None, 64]
    assert masks(MistralConfig(**SMALL, sliding_window=64)) == [64, 64]  # has no kinds of layers
    every_sixth = Gemma3TextConfig(**{**EVEN, "num_hidden_layers": 7}, sliding_window=64)
    assert masks(every_sixth) == [64, 64, 64, 64, 64, None, 64]


def masks(config: object) -> list[int | None]:
    check(config)
    return [mask.window for mask in family_of(config).masks(config)]


def test_layers_with_a_state_are_refused():
    with pytest.raises(ModelError, match="linear_attention"):
        check(Qwen3NextConfig(**SMALL, layer_types=["linear_attention", "full_attention"]))


def test_ranks_share_the_heads_of_layers_with_a_state():
    states = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "intermediate_size": 48}
    config = Qwen3_5TextConfig(**SMALL, layer_types=["linear_attention", "full_attention"], **states)
    check(config, tensor_parallel=2)
    check(config, sequence_parallel=2)
    wrong = r"sequence_parallel is 3, and qwen3_5_text has 2 key heads in its layers .* Allowed are \[1, 2\]"
    with pytest.raises(ModelError, match=wrong):
        check(config, sequence_parallel=3)
    with pytest.raises(ModelError, match=r"tensor_parallel is 4, .* Allowed are \[1, 2\]"):
        check(config, tensor_parallel=4)


def test_deepstack_of_an_unknown_family_is_refused():
    config = {"model_type": "another", "vision_config": {"depth": 2, "deepstack_visual_indexes": [0]}}
    with pytest.raises(ModelError, match=r"vision layers \[0\] .*deepstack"):
        family_of(config)


def test_heads_that_do_not_split_are_refused_with_what_is_allowed():
    check(Qwen2Config(**SMALL), sequence_parallel=6)
    with pytest.raises(ModelError, match=r"is 8, and qwen2 has 12 .* Allowed are \[1, 2, 3, 4, 6, 12\]"):
        check(Qwen2Config(**SMALL), sequence_parallel=8)


def test_an_engine_cuts_each_expert() -> None:
    with pytest.raises(ModelError, match=r"tensor_parallel is 4, .* Allowed are \[1, 2, 6\]"):
        check(Qwen3MoeConfig(**{**SMALL, "intermediate_size": 48}, moe_intermediate_size=18), tensor_parallel=4)


def test_an_engine_that_cannot_be_cut_evenly_is_refused_with_what_is_allowed():
    layers = {**SMALL, "intermediate_size": 48}
    check(Qwen2Config(**layers), tensor_parallel=12)  # each of its 2 key-value heads on six ranks
    with pytest.raises(ModelError, match=r"tensor_parallel is 3, .* qwen2 .* Allowed are \[1, 2, 4, 6, 12\]"):
        check(Qwen2Config(**layers), tensor_parallel=3)  # 2 key-value heads, 3 ranks
    tiny = build_model(None, 0).config
    check(tiny, tensor_parallel=4)
    tiny.vision_config.intermediate_size = 255
    with pytest.raises(ModelError, match=r"Allowed are \[1\]"):
        check(tiny, tensor_parallel=2)


def test_adapters_of_a_tower_for_which_the_engine_has_none_are_refused() -> None:
    lora = LoraConfig(vision_tower=True)
    require_supported(build_model(None, 0).config, sequence_parallel=1, lora=lora)
    with pytest.raises(ModelError, match=r"model\.lora\.vision_tower is true, and vLLM has no adapters .* internvl"):
        require_supported(InternVLConfig(), sequence_parallel=1, lora=lora)
    require_supported(InternVLConfig(), sequence_parallel=1, lora=LoraConfig())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vision_feature_layer": -2}, "sets vision_feature_layer to -2, which vLLM ignores"),
        ({"vision_feature_select_strategy": "full"}, "sets vision_feature_select_strategy to 'full', which vLLM"),
        ({"text_config": {"model_type": "qwen3_moe"}}, "a decoder of type qwen3_moe. Allowed are qwen2 and qwen3"),
    ],
)
def test_tiles_that_vllm_reads_otherwise_and_unknown_decoders_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check(InternVLConfig(**fields))


def test_norms_and_biases_that_vllm_computes_otherwise_are_refused() -> None:
    biased = {"attention_bias": True}
    check(Glm4vConfig(text_config=biased))
    with pytest.raises(ModelError, match=r"glm4v sets rms_norm_eps of vision_config to 1e-06, which vLLM ignores"):
        check(Glm4vConfig(text_config=biased, vision_config={"rms_norm_eps": 1e-6}))
    for fields in ({}, {"attention_bias": False}):
        with pytest.raises(ModelError, match=r"does not set attention_bias of text_config to true"):
            check(Glm4vConfig(text_config=fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": {"model_type": "qwen2"}}, "a decoder of type qwen2. Allowed is llama"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings to True, and in text_config to False"),
    ],
)
def test_named_tiles_with_a_decoder_or_head_that_vllm_reads_otherwise_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        check(Idefics3Config(**fields))


def squares(text: dict[str, Any] | None = None, **fields: Any) -> Gemma3Config:
    return Gemma3Config(text_config=text or {}, vision_config={"vision_use_head": False}, **fields)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            squares({"tie_word_embeddings": False}),
            r"tie_word_embeddings to True, and in text_config to False",
        ),
        (squares({"sliding_window": 255}), r"window of 255 tokens, and a picture has 256.*Allowed is .* 256 or more"),
        (Gemma3Config(vision_config={"vision_use_head": True}), "vision_use_head of vision_config to false"),
        (squares({"attn_logit_softcapping": 50.0}), "sets attn_logit_softcapping to 50.0"),
    ],
)
def test_squares_that_vllm_masks_or_reads_otherwise_are_refused(config: Gemma3Config, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check(config)


def test_squares_as_wide_as_the_window_pass() -> None:
    check(squares({"sliding_window": 256}))


def test_an_engine_on_a_cpu_refuses_pictures_that_see_both_ways(tmp_path: Path) -> None:
    for config in (squares(), InternVLConfig()):
        config.save_pretrained(tmp_path / config.model_type)
    require_pictures(images_in(tmp_path / "gemma3"), "cuda")
    require_pictures(images_in(tmp_path / "internvl"), "cpu")
    with pytest.raises(ModelError, match=r"in both directions, and vLLM 0\.32 on a CPU .*Use a GPU"):
        require_pictures(images_in(tmp_path / "gemma3"), "cpu")


def test_the_engine_cuts_the_feed_forward_layers_of_a_tower_with_tiles() -> None:
    text = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 96}
    config = InternVLConfig(
        text_config=text, vision_config={"num_attention_heads": 5, "intermediate_size": 64, "hidden_size": 80}
    )
    with pytest.raises(ModelError, match=r"tensor_parallel is 3, .* Allowed are \[1, 2\]"):
        check(config, tensor_parallel=3)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (Gemma3TextConfig(**EVEN, attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (Gemma3TextConfig(**EVEN, use_bidirectional_attention=True), "use_bidirectional_attention"),
        (CohereConfig(**EVEN, logit_scale=0.0625), "logit_scale"),
        (GraniteConfig(**EVEN, logits_scaling=8.0), "logits_scaling"),
    ],
)
def test_what_the_head_and_attention_do_not_compute_is_refused_by_the_name_of_its_field(config, field):
    with pytest.raises(ModelError, match=rf"{config.model_type} sets {field} to "):
        check(config)


def test_caps_that_are_computed_pass_and_their_family_names_them():
    check(gemma := Gemma2Config(**EVEN, final_logit_softcapping=30.0, attn_logit_softcapping=50.0))
    assert family_of(gemma).caps(gemma) == Caps(scores=50.0, logits=30.0)
    assert exact_attention(gemma) == ("eager",)  # what a merge is compared with
    check(capped := Gemma3TextConfig(**EVEN, final_logit_softcapping=30.0))
    assert family_of(capped).caps(capped) == Caps(logits=30.0)
    assert exact_attention(capped) == ("sdpa", "eager")


def test_scales_of_one_and_caps_of_none_change_nothing():
    check(none := Gemma2Config(**EVEN, final_logit_softcapping=None, attn_logit_softcapping=None))
    assert family_of(none).caps(none) == Caps()
    check(CohereConfig(**EVEN, logit_scale=1.0))
    check(GraniteConfig(**EVEN, logits_scaling=1.0))
