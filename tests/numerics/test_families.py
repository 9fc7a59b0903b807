"""Every model type of the table through the packed forward pass, against transformers' own."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rlcore.batch import pack
from rlcore.errors import ModelError
from rlcore.families import FAMILIES
from rlcore.models.packed import PackedModel
from rlcore.types import TrainingSample
from tests.checking import FAMILIES as CONFIGURATIONS
from tests.checking import Size, takes_images
from tests.numerics import toy

SIZE = Size(head=8, heads=4, vocabulary=50)
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


def sample(prompt: int, completion: int, seed: int) -> TrainingSample:
    mask = np.arange(prompt + completion) >= prompt
    tokens = np.random.default_rng(seed).integers(1, 50, len(mask)).astype(np.int32)
    zeros = np.zeros(len(mask), np.float32)
    return TrainingSample(
        token_ids=tokens, loss_mask=mask, sampler_logprobs=zeros, advantages=zeros, images=(), policy_version=0
    )


def logprobs(config: Any, samples: list[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the trained tokens, packed and by transformers one sequence after the other."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = []
    with torch.no_grad():
        for item in samples:
            tokens = torch.from_numpy(item.token_ids).long()
            values = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
            expected.append(values[torch.from_numpy(item.loss_mask[1:])])
        packed = PackedModel(copy.deepcopy(model), temperature=1.0, banned_token_ids=())
        found = packed(pack(samples, layout=None, features=None)).logprobs
    return found, torch.cat(expected)


WITH_IMAGES = [name for name in CONFIGURATIONS if takes_images(name)]
WITH_GRIDS = [name for name in WITH_IMAGES if not FAMILIES[name.partition(",")[0]].images.takes_tiles]
TEXT = {name: make(SIZE) for name, make in CONFIGURATIONS.items() if name not in WITH_IMAGES} | {
    "qwen2 with windows": CONFIGURATIONS["qwen2"](SIZE, **WINDOWS),
    "mistral with windows": CONFIGURATIONS["mistral"](SIZE, sliding_window=4),
    "gemma2 with windows": CONFIGURATIONS["gemma2"](SIZE, sliding_window=4),
    "gemma3_text with windows": CONFIGURATIONS["gemma3_text"](SIZE, sliding_window=4),
}


def test_every_model_type_of_the_table_is_compared() -> None:
    with_images = {name.partition(",")[0] for name in WITH_IMAGES}
    assert {config.model_type for config in TEXT.values()} | with_images == set(FAMILIES)


@pytest.mark.parametrize("config", TEXT.values(), ids=TEXT)
def test_the_packed_pass_is_transformers_own(config: Any) -> None:
    """Nine tokens, and windows of four."""
    assert_close(*logprobs(config, [sample(4, 5, 0), sample(2, 3, 1)]), rtol=1e-4, atol=1e-5)


def small_with_images(name: str) -> Any:
    processor = toy.PROCESSORS.get(name.partition(",")[0], toy.PROCESSOR)
    config = CONFIGURATIONS[name](replace(SIZE, vocabulary=len(processor.tokenizer)))
    config.vision_config.initializer_range = 0.3
    return config


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_packed_pass_with_pictures_is_transformers_own(name: str) -> None:
    torch.manual_seed(0)
    config = small_with_images(name)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2 and not parameter.any():  # Gemma 3's projection of features
            torch.nn.init.normal_(parameter, std=0.3)
    pictures, text = toy.samples(4, group=2, model_type=config.model_type), toy.samples(1, text_only=True, seed=1)
    samples = [*pictures, *text]
    features = partial(toy.features, model_type=config.model_type)
    packed = PackedModel(copy.deepcopy(model), temperature=1.0, banned_token_ids=())
    with torch.no_grad():
        found = packed(pack(samples, layout=packed.image_layout, features=features)).logprobs
        expected = torch.cat([of_transformers(model, item) for item in samples])
        blind = torch.cat([of_transformers(model, item, brightness=1e-6) for item in samples])
    assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert float((blind - expected).abs().max()) > 1e-2  # the pictures are looked at


@pytest.mark.parametrize("model_type", WITH_GRIDS)
def test_positions_are_transformers_own(model_type: str) -> None:
    """Text around three pictures, of which two stand almost side by side."""
    config = small_with_images(model_type)
    layout = FAMILIES[model_type].images.layout(config)
    grids = [(1, 4, 6), (1, 8, 2), (1, 2, 2)]
    text = [[5, 6, 7], [8], [9, 10], [11]]
    pictures = [[config.image_token_id] * layout.num_rows(grid) for grid in grids] + [[]]
    tokens = np.array([t for pair in zip(text, pictures, strict=True) for part in pair for t in part])
    found = layout.positions(tokens, grids)
    ids = torch.from_numpy(tokens)[None]
    model = AutoModelForImageTextToText.from_config(config).model
    types = (ids == config.image_token_id).int()
    expected, _ = model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=torch.tensor(grids))
    np.testing.assert_array_equal(found, expected[:, 0].numpy())


def test_an_image_in_tiles_has_a_tile_of_the_whole_image_and_equally_many_tokens_for_each() -> None:
    layout = FAMILIES["internvl"].images.layout(small_with_images("internvl"))
    grids = [(1, 28, 28), (7, 28, 28)]
    assert [layout.num_inputs(grid) for grid in grids] == [1, 7]
    assert [layout.num_rows(grid) for grid in grids] == [4, 28]  # (28 / 7)^2 / 4 a tile
    tokens = np.array([1, *[layout.image_token_id] * 4, 2, *[layout.image_token_id] * 28])
    assert layout.positions(tokens, grids).tolist() == list(range(34))
    with pytest.raises(ValueError, match="32 image tokens, and the 1 images of the sequence have 28"):
        layout.positions(tokens, grids[1:])


def test_named_tiles_have_equally_many_tokens_at_positions_that_count() -> None:
    layout = FAMILIES["idefics3"].images.layout(small_with_images("idefics3"))
    assert [layout.num_rows(grid) for grid in [(1, 28, 28), (10, 28, 28)]] == [4, 40]  # (28 / 7)^2 / 2^2 a tile
    tokens = np.array([1, *[layout.image_token_id] * 4, 2])
    assert layout.positions(tokens, [(1, 28, 28)]).tolist() == list(range(6))


def test_a_tile_of_zeros_is_no_padding() -> None:
    """transformers leaves it out, and would then miss its tokens."""
    torch.manual_seed(0)
    hf = AutoModelForImageTextToText.from_config(small_with_images("idefics3")).eval()
    images = FAMILIES["idefics3"].images
    pixels = torch.zeros(2, 3, 28, 28)
    pixels[1] += 0.5
    with torch.no_grad():
        found = images.features(images.tower(hf)(pixels))
        ordinary = hf.model.get_image_features(pixels[None]).pooler_output
    assert found.shape == (8, 32)
    assert_close(found[4:], ordinary[0])
    assert len(ordinary) == 1


def test_the_features_of_each_deepstack_layer_count() -> None:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(small_with_images("qwen3_vl")).eval()
    packed = PackedModel(model, temperature=1.0, banned_token_ids=())
    features = partial(toy.features, model_type="qwen3_vl")
    batch = pack(toy.samples(2, group=2), layout=packed.image_layout, features=features)
    with torch.no_grad():
        whole = packed(batch).logprobs
        for layer in range(2):
            without = copy.deepcopy(packed)
            without.hf.model.visual.deepstack_merger_list[layer].linear_fc2.weight.zero_()
            assert float((without(batch)[0] - whole).abs().max()) > 1e-3  # ten times what the comparison allows


def of_transformers(model: torch.nn.Module, item: TrainingSample, brightness: float = 1.0) -> torch.Tensor:
    tokens = torch.from_numpy(item.token_ids).long()
    inputs: dict[str, torch.Tensor] = {}
    if item.images:
        (image,) = (toy.features(image, model.config.model_type) for image in item.images)
        images = FAMILIES[model.config.model_type].images
        pixels, grids = brightness * image.pixel_values, torch.tensor([image.grid_thw])
        inputs = images.plain_arguments(images.layout(model.config), tokens, pixels, grids)
    values = model(input_ids=tokens[None], **inputs).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return values[torch.from_numpy(item.loss_mask[1:])]


def test_unsupported_attention_is_refused_in_the_forward_pass_too() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGURATIONS["qwen2"](SIZE, attention_dropout=0.5)).train()
    packed = PackedModel(model, temperature=1.0, banned_token_ids=())
    with pytest.raises(ModelError, match=r"Attention calls attention with .*dropout"):
        packed(pack([sample(5, 5, 0)], layout=None, features=None))
