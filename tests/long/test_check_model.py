"""check-model with vLLM: every family agrees, a fault in the engine or in a sync is refused and its place named, and a
model that vLLM does not take is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from rlcore.errors import ModelError
from tests.bench import tiny
from tests.checking import FAMILIES, checked, differing, make_model, sampled_on_a_cpu, settings_on_a_cpu
from tests.integration.engine_bench import measured

VLLM, SYNC = "vLLM", "vLLM after a weight sync"
WITHOUT_ENGINE = ["trainer: packed row", "trainer: gradient", "adapters at zero", "adapters, merged", "merge"]


@contextmanager
def rotary_base_of_the_engine() -> Iterator[None]:
    from rlcore.sampler.engine import Engine

    right = Engine.__init__

    def changed(self: Engine, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        for module in self.llm.apply_model(lambda model: model)[0].modules():
            if hasattr(module, "cos_sin_cache"):
                module.cos_sin_cache = module.cos_sin_cache.roll(3, 0)

    with mock.patch.object(Engine, "__init__", changed):
        yield


@contextmanager
def frames_of_the_engine_reversed() -> Iterator[None]:
    from rlcore.sampler import engine

    right = engine.engine_prompt

    def reversed_frames(token_ids: Any, images: Any, store: Any) -> dict[str, Any]:
        prompt = right(token_ids, images, store)
        if len({image.width for image in images}) == 1 and len(images) > 1:  # other sizes would be other tokens
            prompt["multi_modal_data"]["image"].reverse()
            prompt["multi_modal_uuids"]["image"].reverse()
        return prompt

    with mock.patch.object(engine, "engine_prompt", reversed_frames):
        yield


@contextmanager
def video_of_the_engine(change: Callable[[Any, dict[str, Any]], Any]) -> Iterator[None]:
    """
    Args:
        change: of the frames [frames, height, width, 3] and vLLM's facts about them; returns the frames.
    """
    from rlcore.sampler import engine

    right = engine._engine_video

    def changed(image: Any, ref: Any) -> tuple[Any, dict[str, Any]]:
        frames, facts = right(image, ref)
        return change(frames, facts), facts

    with mock.patch.object(engine, "_engine_video", changed):
        yield


def backwards(frames: Any, facts: dict[str, Any]) -> Any:
    return frames[::-1].copy()


def half_as_fast(frames: Any, facts: dict[str, Any]) -> Any:
    facts["total_num_frames"] *= 2
    return frames


@contextmanager
def stale(tensor: str) -> Iterator[None]:
    """A sync that sends an old value of a tensor, so that its checksum is the one that was sent."""
    from rlcore.sampler.vllm_sampler import VllmSampler

    right = VllmSampler.load_weights
    old: dict[str, Tensor] = {}

    def load(self: VllmSampler, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        return right(self, ((n, old.setdefault(n, v.clone()) if n == tensor else v) for n, v in weights), version)

    with mock.patch.object(VllmSampler, "load_weights", load):
        yield


@contextmanager
def experts_packed_once() -> Iterator[None]:
    from rlcore.sampler import weights

    with mock.patch.object(weights, "forget_expert_kernels"):
        yield


# The family, how it is broken, and the rows that differ with the place of each.
CONTROLS: dict[str, tuple[str, Callable[[], Any], dict[str, str]]] = {
    # first, because vLLM makes the group of ranks that share experts only with the first engine of a process
    "stale experts": (
        "qwen3_moe",
        lambda: stale("model.layers.1.mlp.experts.down_proj"),
        {SYNC: "decoder layer 1"},
    ),
    "experts that are not packed": (
        "qwen3_moe",
        experts_packed_once,
        {VLLM: "decoder layer 0", SYNC: "decoder layer 0"},
    ),
    "pictures": (
        "qwen2_5_vl",
        frames_of_the_engine_reversed,
        {VLLM: "the features of pictures (a video", SYNC: "the features of pictures (a video"},
    ),
    "a video backwards": (
        "qwen3_vl",
        lambda: video_of_the_engine(backwards),
        {VLLM: "the features of pictures", SYNC: "the features of pictures"},
    ),
    "a video half as fast": (
        "qwen2_5_vl",
        lambda: video_of_the_engine(half_as_fast),
        {VLLM: "decoder layer 0", SYNC: "decoder layer 0"},
    ),
    "stale LM head": ("qwen2", lambda: stale("lm_head.weight"), {SYNC: "the final norm or the LM head"}),
    "stale layer": ("mistral", lambda: stale("model.layers.1.mlp.up_proj.weight"), {SYNC: "decoder layer 1"}),
    "stale embeddings": ("phi3", lambda: stale("model.embed_tokens.weight"), {SYNC: "the token embeddings"}),
    "stale tower": (
        "qwen2_vl",
        lambda: stale("model.visual.merger.mlp.0.weight"),
        {SYNC: "the features of pictures"},
    ),
    "stale inputs of a state": (
        "qwen3_5_text",
        lambda: stale("model.layers.1.linear_attn.in_proj_qkv.weight"),
        {SYNC: "decoder layer 1"},
    ),
    # the last one, because engines of one process share their rotary tables
    "rotary base": ("llama", rotary_base_of_the_engine, {VLLM: "decoder layer 0", SYNC: "decoder layer 0"}),
}


NATIVE = "data.video_input=native"


def broken(folder: Path) -> dict[str, Any]:
    from rlcore.jobs import check_model

    result: dict[str, Any] = {}
    for name, (family, fault, _) in CONTROLS.items():
        model = make_model(folder / name.replace(" ", "-"), family)
        with fault(), mock.patch.object(check_model, "_check_small", return_value=[]):
            settings = (*settings_on_a_cpu(family), *((NATIVE,) if "a video" in name else ()))
            result[name] = differing(checked(model, *settings))
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    return measured(broken, tmp_path_factory.mktemp("controls"))


@pytest.mark.parametrize("control", CONTROLS)
def test_a_fault_of_the_engine_is_refused_and_the_place_is_named(
    control: str, found: dict[str, dict[str, str]]
) -> None:
    wanted, places = CONTROLS[control][2], found[control]
    assert places.keys() == wanted.keys()
    assert all(places[name].startswith(place) for name, place in wanted.items()), places


def compared(folder: Path) -> dict[str, Any]:
    """By family, and for adapters: the rows that differ and their names, or the refusal."""
    result: dict[str, Any] = {}
    more = {
        "adapters": ("qwen2_5_vl", "model.lora.rank=8"),
        "bfloat16": ("llama", "model.compute_dtype=bfloat16"),
        "an engine in bfloat16": ("llama", "rollout.dtype=bfloat16"),
    }
    for family in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"):
        more[f"videos, {family}"] = (family, NATIVE, *settings_on_a_cpu(family))
    # those with experts come first, as in CONTROLS
    models = {f: (f, *settings_on_a_cpu(f)) for f in sorted(FAMILIES, key=lambda name: "_moe" not in name)} | more
    for number, (name, (family, *overrides)) in enumerate(models.items()):
        try:
            check = checked(make_model(folder / str(number), family), *overrides)
            result[name] = (differing(check), [row.name for row in check.rows])
        except ModelError as error:
            result[name] = str(error)
    return result


def test_every_family_agrees_with_vllm_or_is_refused_with_the_reason(tmp_path: Path) -> None:
    result = measured(compared, tmp_path)
    for name in FAMILIES:
        if not sampled_on_a_cpu(name):
            assert "it would sample from another model" in result.pop(name)
    assert {name: answer for name, answer in result.items() if answer[0]} == {}
    assert all(rows == [*WITHOUT_ENGINE, VLLM, SYNC] for _, rows in result.values())


def test_the_page_of_models_is_written_from_what_was_measured(tmp_path: Path) -> None:
    tiny.run("models", tmp_path)
    head, *rows = [line for line in (tmp_path / "models.md").read_text().splitlines() if line.startswith("| ")]
    assert all(f" {name} |" in head for name in [*WITHOUT_ENGINE, VLLM, SYNC])
    (row,) = (row for row in rows if row.startswith("| `qwen2` |"))
    assert all(float(cell) < 1e-3 for cell in row.strip("|").split("|")[1:])
