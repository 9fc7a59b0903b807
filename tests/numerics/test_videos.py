"""Videos in a family's own input: tokens, pixels, positions, the packed pass and its gradient are transformers' own."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText
from transformers.video_utils import VideoMetadata

from rlcore.batch import ImageFeatures, pack
from rlcore.config import DataConfig
from rlcore.data.pixels import ImageStore, frames_in, load_rgb, video_file
from rlcore.data.prompts import PromptBuilder
from rlcore.data.tiny import build_processor
from rlcore.errors import ModelError
from rlcore.families import FAMILIES
from rlcore.families.qwen2_vl import GridLayout
from rlcore.models.packed import PackedModel
from rlcore.models.vision import feature_bytes
from rlcore.sampler.engine import engine_prompt
from rlcore.types import ImageRef, Problem, TrainingSample
from tests.checking import FAMILIES as CONFIGURATIONS
from tests.checking import Size

NATIVE = DataConfig(template="tiny", video_input="native")
OF_TYPE = [name for name, family in FAMILIES.items() if family.images is not None and family.images.videos]
DENSE = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
FILES: dict[str, bytes] = {}


def prompts_of(model_type: str) -> PromptBuilder:
    return PromptBuilder(build_processor(model_type), NATIVE)


def noise(seed: int, size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3)).astype(np.uint8))


def video(prompts: PromptBuilder, frames: Sequence[int], seconds: float = 0.25) -> ImageRef:
    """Frames of noise, each by its seed."""
    drawn = [noise(seed, prompts.target_size(112, 84)) for seed in frames]
    data = video_file(drawn, seconds)
    name = hashlib.sha256(data).hexdigest()
    FILES[name] = data
    return ImageRef(name, *drawn[0].size, frames=len(frames), seconds_per_frame=seconds)


def picture(prompts: PromptBuilder, seed: int) -> ImageRef:
    drawn = noise(seed, prompts.target_size(84, 112))
    data = video_file([drawn], 0.0)
    FILES[str(seed)] = data
    return ImageRef(str(seed), *drawn.size)


def features(prompts: PromptBuilder, ref: ImageRef) -> ImageFeatures:
    return ImageFeatures(*prompts.read(load_rgb(FILES[ref.sha256]), ref))


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("count", [1, 4, 5])
def test_tokens_and_pixels_are_those_of_the_family_s_processor(model_type: str, count: int) -> None:
    processor, prompts = build_processor(model_type), prompts_of(model_type)
    ref = video(prompts, range(count))
    problem = Problem("p", "<video>What moves?", (ref,), "", "test")
    frames = frames_in(load_rgb(FILES[ref.sha256]), ref)
    out = processor(
        text=[prompts.text(problem)],
        videos=[np.stack([np.asarray(frame) for frame in frames])],
        # four frames of each second, of which all were taken, the first of them 1/8 s after the start
        video_metadata=[VideoMetadata(count, 4.0, frames_indices=[index + 0.5 for index in range(count)])],
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    tokens, read = prompts.tokens(problem), features(prompts, ref)
    assert tokens.tolist() == out["input_ids"][0].tolist()
    assert torch.equal(read.pixel_values, out["pixel_values_videos"])
    assert read.pixel_values.nbytes == feature_bytes(ref)
    assert [list(read.grid_thw)] == out["video_grid_thw"].tolist() == [[(count + 1) // 2, *read.grid_thw[1:]]]
    assert prompts.placeholders.collapse(tokens.tolist(), [ref]) == prompts.unexpanded(problem).tolist()
    assert prompts.placeholders.num_tokens(ref) == len(tokens) - len(prompts.unexpanded(problem)) + 1


def test_qwen3_writes_the_time_before_each_pair_of_frames() -> None:
    """Frames at 0.5, 1.5, 2.5 s; the last one is repeated."""
    prompts = prompts_of("qwen3_vl")
    ref = video(prompts, range(3), seconds=1.0)
    text = prompts.tokenizer.decode(prompts.tokens(Problem("p", "<video>?", (ref,), "", "test")))
    one = "<|vision_start|>" + "<|video_pad|>" * (prompts.resizing.factor**-2 * ref.width * ref.height).__int__()
    assert f"<|vision_start|><1.0 seconds>{one}<|vision_end|><2.5 seconds>{one}<|vision_end|><|vision_end|>?" in text


def test_positions_of_a_video_worked_out_by_hand() -> None:
    """The example in the Qwen2.5-VL code of transformers: 25 positions a second, a pair of frames every 2 s, three
    pairs of 2 x 2 tokens. Text goes on after the largest position, as the models were trained."""
    layout = GridLayout(1, 2, video_token_id=2, frames_per_step=2, tokens_per_second=25)
    tokens = np.array([7, *[2] * 12, 8, 9, 1, 10])
    images = (ImageRef("v", 56, 56, frames=6, seconds_per_frame=1.0), ImageRef("i", 28, 28))
    time, height, width = layout.positions(tokens, [(3, 4, 4), (1, 2, 2)], images).tolist()
    assert time == [0, *[1] * 4, *[51] * 4, *[101] * 4, 102, 103, 104, 105]
    assert height == [0, *[1, 1, 2, 2] * 3, 102, 103, 104, 105]
    assert width == [0, *[1, 2, 1, 2] * 3, 102, 103, 104, 105]
    plain = replace(layout, tokens_per_second=None)  # Qwen2-VL: one position for each pair
    assert plain.positions(tokens, [(3, 4, 4), (1, 2, 2)], images)[0].tolist()[:14] == [
        0, *[1] * 4, *[2] * 4, *[3] * 4, 4,
    ]  # fmt: skip
    apart = replace(layout, steps_apart=True)  # Qwen3-VL: each pair is placed as an image
    spread = np.array([7, *[2] * 4, 8, *[2] * 4, 9, *[2] * 4, 10])
    found = apart.positions(spread, [(3, 4, 4)], images[:1])
    assert found[0].tolist() == [0, *[1] * 4, 3, *[4] * 4, 6, *[7] * 4, 9]
    assert found[1].tolist() == [0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6, 7, 7, 8, 8, 9]
    with pytest.raises(ValueError, match="does not fit the image tokens at 1"):
        layout.positions(np.array([7, *[2] * 11, 8]), [(3, 4, 4)], images[:1])


def test_text_after_a_long_video_goes_on_after_it_and_not_inside_it() -> None:
    """Where transformers 5.19 goes on inside it, its own pass is given the positions."""
    layout = GridLayout(1, 2, video_token_id=2, frames_per_step=2, tokens_per_second=25)
    grids = [(3, 4, 4)]
    short = ImageRef("v", 56, 56, frames=6, seconds_per_frame=1 / 256)
    long = replace(short, seconds_per_frame=1.0)
    assert (layout.outlasts(grids, [short]), layout.outlasts(grids, [long])) == (False, True)
    images, tokens = FAMILIES["qwen2_5_vl"].images, torch.tensor([7, *[2] * 12, 8])
    assert images is not None
    of_short, of_long = (
        images.plain_arguments(layout, tokens, torch.zeros(48, 3), torch.tensor(grids), [ref]) for ref in (short, long)
    )
    assert of_long.keys() - of_short.keys() == {"position_ids"}
    assert of_long["position_ids"][:, 0, -1].tolist() == [102] * 3


def test_the_engine_gets_pictures_and_videos_by_kind_and_every_time_exactly(tmp_path: Path) -> None:
    """transformers takes the seconds of a pair, and the middle of a pair, from these facts."""
    prompts = prompts_of("qwen2_5_vl")
    refs = (picture(prompts, 1), video(prompts, range(3), seconds=85 / 256), picture(prompts, 2))
    (tmp_path / "images").mkdir()
    for ref in refs:
        (tmp_path / "images" / f"{ref.sha256}.png").write_bytes(FILES[ref.sha256])
    prompt = engine_prompt([1, 2], refs, ImageStore(tmp_path))
    assert {kind: len(items) for kind, items in prompt["multi_modal_data"].items()} == {"image": 2, "video": 1}
    assert {kind: len(names) for kind, names in prompt["multi_modal_uuids"].items()} == {"image": 2, "video": 1}
    ((frames, facts),) = prompt["multi_modal_data"]["video"]
    assert frames.shape == (3, refs[1].height, refs[1].width, 3)
    assert all(np.array_equal(frames[k], np.asarray(noise(k, (refs[1].width, refs[1].height)))) for k in range(3))
    metadata = VideoMetadata(**{name: value for name, value in facts.items() if name != "do_sample_frames"})
    assert metadata.timestamps == [0.5 * 85 / 256, 1.5 * 85 / 256, 2.5 * 85 / 256]
    assert torch.tensor(2 / metadata.sampled_fps) == torch.tensor(2 * 85 / 256)
    only = engine_prompt([1], refs[:1], ImageStore(tmp_path))
    assert list(only["multi_modal_data"]) == list(only["multi_modal_uuids"]) == ["image"]


def small(model_type: str) -> tuple[Any, Any]:
    """A random model of the type, and its configuration."""
    tokenizer = build_processor(model_type).tokenizer
    config = CONFIGURATIONS[model_type](Size(head=8, heads=4, vocabulary=len(tokenizer)), initializer_range=0.2)
    config.vision_config.initializer_range = 0.3
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).eval(), config


@pytest.mark.parametrize("model_type", OF_TYPE)
def test_positions_are_transformers_own(model_type: str) -> None:
    """A picture, a video and a picture, in text. The video takes fewer positions in time than in width."""
    model, config = small(model_type)
    prompts, images = prompts_of(model_type), FAMILIES[model_type].images
    assert images is not None
    refs = (picture(prompts, 100), video(prompts, range(5), seconds=0.0625), picture(prompts, 101))
    tokens = prompts.tokens(Problem("p", "a<image><video>b<image>c", refs, "", "test"))
    read = [features(prompts, ref) for ref in refs]
    layout, grids = images.layout(config), [each.grid_thw for each in read]
    ids, pixels = torch.from_numpy(tokens).long(), torch.cat([each.pixel_values for each in read])
    named = images.plain_arguments(layout, ids, pixels, torch.tensor(grids), refs)
    own = {name: value for name, value in named.items() if "pixel" not in name}
    expected, _ = model.model.get_rope_index(ids[None], **own)
    np.testing.assert_array_equal(layout.positions(tokens, grids, refs), expected[:, 0].numpy())


def samples_of(prompts: PromptBuilder, seconds: float = 0.25) -> list[TrainingSample]:
    """A text, two completions of a prompt with a picture, two of one with a video, and one with both."""
    clip, odd, image = video(prompts, range(4), seconds), video(prompts, range(10, 13), 0.5), picture(prompts, 50)
    asked: list[tuple[str, tuple[ImageRef, ...]]] = [
        ("text", ()),
        *[("<image>what?", (image,))] * 2,
        *[("<video>what moves?", (clip,))] * 2,
        ("<video> or <image>?", (odd, image)),
    ]
    made, random = [], np.random.default_rng(0)
    for question, images in asked:
        prompt = prompts.tokens(Problem("p", question, images, "", "test"))
        answer = random.integers(0, 256, random.integers(5, 12)).astype(np.int32)
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        zeros = np.zeros(len(mask), np.float32)
        made.append(TrainingSample(np.concatenate([prompt, answer]), mask, zeros, images, 0, advantages=zeros))
    return made


def of_transformers(model: Any, prompts: PromptBuilder, item: TrainingSample) -> torch.Tensor:
    tokens, images = torch.from_numpy(item.token_ids).long(), FAMILIES[model.config.model_type].images
    named: dict[str, Any] = {}
    assert images is not None
    if item.images:
        read = [features(prompts, ref) for ref in item.images]
        pixels, grids = torch.cat([each.pixel_values for each in read]), torch.tensor([each.grid_thw for each in read])
        named = images.plain_arguments(images.layout(model.config), tokens, pixels, grids, item.images)
        assert ("pixel_values_videos" in named) is any(ref.is_video for ref in item.images)
    values = model(input_ids=tokens[None], **named).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    return values[torch.from_numpy(item.loss_mask[1:])]


@pytest.mark.parametrize("model_type", OF_TYPE)
def test_a_row_of_text_pictures_and_videos_is_transformers_own(model_type: str) -> None:
    """Log-probs, and the gradient of their sum, of one row with shared prompts; and what is wrong shows."""
    model, _ = small(model_type)
    prompts = prompts_of(model_type)
    samples = samples_of(prompts)
    packed = PackedModel(copy.deepcopy(model), temperature=1.0, banned_token_ids=())
    batch = pack(samples, layout=packed.image_layout, features=lambda ref: features(prompts, ref))
    assert len(batch.token_ids) < sum(item.num_tokens for item in samples)  # prompts are shared
    found = packed(batch).logprobs
    expected = torch.cat([of_transformers(model, prompts, item) for item in samples])
    assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.sum().backward()
    expected.sum().backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    own = dict(packed.hf.named_parameters())
    apart = [(p.grad - own[name].grad).flatten() for name, p in model.named_parameters() if p.grad is not None]
    assert float(torch.cat(apart).norm() / whole.norm()) < 1e-4
    of_tower = [p.grad for name, p in packed.hf.named_parameters() if ".visual.patch_embed" in name]
    assert all(float(grad.abs().max()) > 0 for grad in of_tower if grad is not None)

    swapped = video(prompts, [1, 0, 2, 3])
    wrong = [replace(item, images=(swapped,)) if len(item.images) == 1 and item.images[0].is_video else item
             for item in samples]  # fmt: skip
    with torch.no_grad():
        other = packed(pack(wrong, layout=packed.image_layout, features=lambda ref: features(prompts, ref))).logprobs
    assert float((other - expected).abs().max()) > 1e-2  # the order of frames counts


@pytest.mark.parametrize(("model_type", "counts"), [("qwen2_vl", False), ("qwen2_5_vl", True)])
def test_the_time_between_frames_counts_where_the_family_has_it(model_type: str, counts: bool) -> None:
    """Of Qwen3-VL it is in the tokens."""
    model, _ = small(model_type)
    prompts = prompts_of(model_type)
    packed = PackedModel(model, temperature=1.0, banned_token_ids=())
    found = []
    for seconds in (0.25, 0.75):
        samples = samples_of(prompts, seconds)[3:5]
        with torch.no_grad():
            batch = pack(samples, layout=packed.image_layout, features=lambda ref: features(prompts, ref))
            found.append(packed(batch).logprobs)
    assert (float((found[0] - found[1]).abs().max()) > 1e-3) is counts


@pytest.mark.parametrize("model_type", ["glm4v", "internvl", "smolvlm"])
def test_a_family_without_it_is_refused_with_what_is_allowed(model_type: str) -> None:
    with pytest.raises(ModelError, match=r'video_input is "native".* qwen2_vl, .*Set data.video_input to "frames"'):
        prompts_of(model_type)
