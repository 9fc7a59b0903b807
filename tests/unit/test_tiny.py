"""The tiny policy: a tokenizer of bytes, image tokens by area, one folder that loads everywhere."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from rlcore.artifacts import ModelRef
from rlcore.config import ModelConfig, TinyModelConfig
from rlcore.config.policy import TinyFamily
from rlcore.data.synthetic.geometry import draw_problem
from rlcore.data.tiny import SPECIAL_TOKENS, TEXT_TOKENS, PictureProcessor, build_processor
from rlcore.errors import ModelError
from rlcore.jobs.bootstrap import bootstrap
from rlcore.models.tiny import build_model, completion_text, create_tiny_policy
from rlcore.specs import BootstrapSpec, tiny_folder

torch.set_num_threads(1)
FAMILIES = get_args(TinyFamily)


@cache
def processor() -> PictureProcessor:
    return build_processor()


def prompt(question: str, own: PictureProcessor | None = None) -> str:
    content = [{"type": "image"}, {"type": "text", "text": question}]
    text = (own or processor()).apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    assert isinstance(text, str)
    return text


def digest_of(model: torch.nn.Module) -> str:
    state = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        state.update(name.encode() + value.numpy().tobytes())
    return state.hexdigest()


# ---- tokenizer and processor


@pytest.mark.parametrize("text", ["Angle x?", "  two\n\nlines ", "50\N{DEGREE SIGN} \N{GREEK SMALL LETTER PI}", ""])
def test_text_is_encoded_as_bytes_and_decoded_again(text: str) -> None:
    ids = processor().tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert max(ids, default=0) < 256
    assert processor().tokenizer.decode(ids) == text


def test_special_tokens_are_single_and_vanish_but_thoughts_stay() -> None:
    tokenizer = processor().tokenizer
    for text in SPECIAL_TOKENS + TEXT_TOKENS:
        assert len(tokenizer(text)["input_ids"]) == 1
    assert len(tokenizer) == 256 + len(SPECIAL_TOKENS) + len(TEXT_TOKENS)
    ids = tokenizer("<think>a</think>\\boxed{3}<|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>\\boxed{3}"
    assert ids[-1] == tokenizer.eos_token_id


def test_chat_template_has_no_default_system_message() -> None:
    assert prompt("Sides?") == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Sides?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_template_takes_plain_text_and_several_turns() -> None:
    turns = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    text = processor().apply_chat_template(turns)
    assert (
        text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    )


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("family", [None, "qwen2_vl", "qwen3_vl"])
def test_image_tokens_by_area(family: str | None, index: int) -> None:
    """With patches of 16 pixels instead of 14 a picture is enlarged, and each label still fills a patch."""
    made = build_processor(family)
    problem = draw_problem("train", index, 0)
    inputs = made(text=[prompt(problem.question)], images=[problem.picture], return_tensors="pt")
    width, height = problem.picture.size
    pads = int((inputs["input_ids"] == made.image_token_id).sum())
    assert pads == (height // 28) * (width // 28)
    assert inputs["image_grid_thw"].tolist() == [[1, height // 14, width // 14]]


def test_paper_is_zero_and_ink_negative() -> None:
    problem = draw_problem("train", 0, 0)
    pixels = processor()(text=[prompt("")], images=[problem.picture], return_tensors="pt")["pixel_values"]
    assert pixels.max().item() == 0
    assert pixels.min().item() == pytest.approx(-2, abs=0.1)


@pytest.mark.parametrize(("family", "paper"), [("internvl", 0.0), ("idefics3", 0.02)])
def test_a_tile_s_token_is_a_letter_s_cell(family: str, paper: float) -> None:
    """Pictures of six by four cells are 3 x 2 tiles of 28 x 28 pixels, and the whole picture is one more. They are not
    enlarged. In named tiles paper is only almost zero."""
    made = build_processor(family)
    problem = draw_problem("train", 2, 0)
    assert problem.picture.size == (84, 56)
    inputs = made(text=[prompt(problem.question, made)], images=[problem.picture], return_tensors="pt")
    tiles = inputs["pixel_values"].flatten(0, -4)
    assert tiles.shape == (7, 3, 28, 28)
    assert int((inputs["input_ids"] == made.image_token_id).sum()) == 7 * 4
    assert tiles.max().item() == pytest.approx(paper, abs=1e-5)
    top_left = problem.picture.convert("L").crop((0, 0, 28, 28))
    ink = torch.tensor(list(top_left.tobytes())).view(28, 28) / 255
    grey = (tiles[0] * 0.5 + 1 - paper / 2).mean(0)
    torch.testing.assert_close(grey, ink, atol=0.01, rtol=0)


def test_completions_are_short_and_in_the_math_format() -> None:
    for index in range(8):
        problem = draw_problem("train", index, 0)
        text = completion_text(problem)
        assert re.fullmatch(rf"<think>[^<]+</think>\\boxed\{{{problem.answer}\}}", text)
        assert len(processor().tokenizer(text)["input_ids"]) + 1 <= 32


# ---- weights


def test_weights_depend_on_the_seed_and_the_generator_is_unchanged() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    same, again, other = (digest_of(build_model(None, seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert same == again != other


@pytest.mark.parametrize("family", FAMILIES)
def test_size(family: str | None) -> None:
    parameters = sum(p.numel() for p in build_model(family, 0).parameters())
    assert 9e5 < parameters < 4e6


def test_warm_start_is_reproducible_and_learns(tmp_path: Path) -> None:
    config = TinyModelConfig(warm_start_steps=2)
    counts = [create_tiny_policy(tmp_path / name, config) for name in "ab"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert counts[0] == counts[1]
    assert weights[0] == weights[1]
    create_tiny_policy(tmp_path / "cold", TinyModelConfig(warm_start_steps=0))
    assert weights[0] != (tmp_path / "cold" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_loads_and_computes_the_same(family: TinyFamily, tmp_path: Path) -> None:
    """The folder equals the model built from the same seed, and a fresh processor makes the same inputs."""
    create_tiny_policy(tmp_path, TinyModelConfig(family=family, warm_start_steps=0))
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    fresh, built = build_processor(family), build_model(family, 0).eval()
    assert loaded.config.model_type == family
    assert digest_of(loaded) == digest_of(built)
    assert loaded.generation_config.eos_token_id[0] == processor().tokenizer.eos_token_id
    problem = draw_problem("test", 1, 0)
    read = AutoProcessor.from_pretrained(tmp_path)
    assert type(read) is type(fresh)
    assert read.chat_template == fresh.chat_template
    text = prompt(problem.question, fresh)
    inputs, again = (p(text=[text], images=[problem.picture], return_tensors="pt") for p in (read, fresh))
    assert all(torch.equal(inputs[key], again[key]) for key in again)
    with torch.no_grad():
        logits = [model(**inputs).logits for model in (loaded, built)]
    assert torch.equal(*logits)
    assert not list(tmp_path.glob("*.bin"))


# ---- bootstrap


def spec(tmp_path: Path, path: str, steps: int = 0) -> BootstrapSpec:
    model = ModelConfig(path=path, tiny=TinyModelConfig(warm_start_steps=steps))
    return BootstrapSpec(result=tmp_path / "result.json", model=model, models_dir=tmp_path / "models")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_bootstrap_makes_the_tiny_policy_once(tmp_path: Path) -> None:
    first = bootstrap(spec(tmp_path, "tiny"))
    weights = Path(first.path) / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert bootstrap(spec(tmp_path, "tiny")) == first
    assert weights.stat().st_mtime_ns == made
    assert [folder.name for folder in (tmp_path / "models").iterdir()] == [Path(first.path).name]
    assert first.num_parameters == sum(p.numel() for p in build_model(None, 0).parameters())


@pytest.mark.usefixtures("threads")
def test_of_two_concurrent_runs_the_first_makes_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(folder: Path, config: TinyModelConfig) -> None:
        monkeypatch.undo()
        made.append(bootstrap(spec(tmp_path, "tiny")))  # another process is faster
        create_tiny_policy(folder, config)

    made: list[ModelRef] = []
    monkeypatch.setattr("rlcore.models.tiny.create_tiny_policy", slower)
    assert bootstrap(spec(tmp_path, "tiny")) == made[0]
    assert [str(folder) for folder in (tmp_path / "models").iterdir()] == [made[0].path]


def test_another_configuration_is_another_folder(tmp_path: Path) -> None:
    configs = [TinyModelConfig(), TinyModelConfig(seed=1), TinyModelConfig(warm_start_steps=7)]
    configs += [TinyModelConfig(task="sums"), TinyModelConfig(task="countdown"), TinyModelConfig(family="qwen3_vl")]
    assert len({tiny_folder(tmp_path, config) for config in configs}) == 6


def test_a_family_of_pictures_for_a_task_of_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"family is qwen3_vl.*task is sums.*Set model\.tiny\.task to geometry or"):
        TinyModelConfig(task="sums", family="qwen3_vl")


def test_a_local_folder_is_used_in_place(tmp_path: Path, tiny_model: Path) -> None:
    found = bootstrap(spec(tmp_path, str(tiny_model)))
    assert Path(found.path) == tiny_model.resolve()
    assert found.num_parameters > 1e6
    assert not (tmp_path / "models").exists()


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="safetensors"):
        bootstrap(spec(tmp_path, str(folder)))


def test_neither_a_folder_nor_an_id(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="owner/name"):
        bootstrap(spec(tmp_path, "no/such/model"))
