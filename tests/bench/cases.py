"""What the benchmarks train on: models of real shapes with random weights, prompts, pictures and a reward.

Everything is made from a seed; nothing is downloaded. The shapes, lengths and settings are those of the scripts that
run TRL, so that both do the same work. ``tiny`` models have 4 layers of width 128 and 512 words, for a CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.config import ExperimentConfig, build_experiment
from rlcore.data.processor import load_processor
from rlcore.data.prompts import PromptBuilder
from rlcore.data.tiny import CHAT_TEMPLATE, END_OF_TURN, PAD, SPECIAL_TOKENS
from rlcore.models.tiny import sampling_defaults
from rlcore.types import Completion, ImageRef, Problem, Score

VOCABULARY = 151_936
_TINY_VOCABULARY = 512
_FIRST_SPECIAL = 151_643  # id of Qwen2.5's first special token
_GRID = 28  # pixels a side of an image token


@dataclass(frozen=True, slots=True)
class Shape:
    prompt: int  # tokens, image tokens included
    cap: int
    side: int  # of the image in pixels; 0: none
    patch: int = 14  # pixels a side; four patches are a token


SHAPES = {"text": Shape(256, 1024, 0), "vl": Shape(431, 512, 504)}  # 512 pixels are rounded to 36 patches of 14
SHAPES |= {"text-7b": SHAPES["text"], "vl-7b": SHAPES["vl"]}
TINY_SHAPES = {"text": Shape(32, 64, 0), "vl": Shape(48, 48, 56)}
TINY_SHAPES |= {"text-7b": TINY_SHAPES["text"], "vl-7b": TINY_SHAPES["vl"]}


def shape_of(kind: str, tiny: bool) -> Shape:
    return (TINY_SHAPES if tiny else SHAPES)[kind]


def vocabulary_of(tiny: bool) -> int:
    return _TINY_VOCABULARY if tiny else VOCABULARY


def special_token(text: str, tiny: bool) -> int:
    """Id of a special token. They are where Qwen2.5 has them; the tiny vocabulary ends with them."""
    return min(_FIRST_SPECIAL, vocabulary_of(tiny) - len(SPECIAL_TOKENS)) + SPECIAL_TOKENS.index(text)


def vision_tokens(tiny: bool) -> tuple[int, int, int, int]:
    """Ids of the start and end of a picture, of a picture's token and of a video's."""
    start, end, image, video = (
        special_token(f"<|{name}|>", tiny) for name in ("vision_start", "vision_end", "image_pad", "video_pad")
    )
    return start, end, image, video


# ---- models --------------------------------------------------------------------------------------------------------


def build_model(kind: str, tiny: bool, device: Any, dtype: Any) -> Any:
    """Random weights, made where they will be used."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2Config

    text = {
        "text": _text(1536, 8960, 28, 12, 2),
        "vl": _text(2048, 11_008, 36, 16, 2),
        "text-7b": _text(3584, 18_944, 28, 28, 4, tied=False),
        "vl-7b": _text(3584, 18_944, 28, 28, 4, tied=False),
    }[kind]
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
    vision |= {"fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": text["hidden_size"]}
    section = [16, 24, 24]
    if tiny:
        text = _text(128, 256, 4, 4, 2) | {"vocab_size": _TINY_VOCABULARY}
        vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
        vision |= {"fullatt_block_indexes": [1], "out_hidden_size": 128}
        section = [4, 6, 6]
    vision_start, vision_end, image, video = vision_tokens(tiny)
    end, pad = special_token(END_OF_TURN, tiny), special_token(PAD, tiny)
    text |= {"bos_token_id": None, "eos_token_id": end, "pad_token_id": pad}
    torch.manual_seed(0)
    with torch.device(device):
        if kind.startswith("text"):
            rope = {"rope_type": "default", "rope_theta": 1e6}
            return AutoModelForCausalLM.from_config(Qwen2Config(rope_parameters=rope, **text), dtype=dtype)
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
        return AutoModelForImageTextToText.from_config(
            Qwen2_5_VLConfig(
                text_config={"rope_parameters": rope, **text},
                vision_config={"window_size": 112, "patch_size": 14, "spatial_merge_size": 2, **vision},
                image_token_id=image,
                video_token_id=video,
                vision_start_token_id=vision_start,
                vision_end_token_id=vision_end,
                tie_word_embeddings=text["tie_word_embeddings"],
            ),
            dtype=dtype,
        )


def _text(
    hidden: int, intermediate: int, layers: int, heads: int, key_heads: int, *, tied: bool = True
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": tied,
    }


def build_tokenizer(tiny: bool) -> Any:
    """One token per byte. Each id of the vocabulary has a text, since an engine decodes what it samples."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"word{number}" for number in range(len(words), vocabulary_of(tiny))]  # no text is encoded to these
    first = special_token(SPECIAL_TOKENS[0], tiny)
    words[first : first + len(SPECIAL_TOKENS)] = SPECIAL_TOKENS
    tokenizer = Tokenizer(models.BPE(vocab={word: rank for rank, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    others = [text for text in SPECIAL_TOKENS if text not in (END_OF_TURN, PAD)]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=others,
        clean_up_tokenization_spaces=False,
    )


def save_model(kind: str, folder: Path, tiny: bool) -> None:
    """The model with tokenizer and, where it sees, processor, as a Hugging Face folder in bfloat16."""
    import torch
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    tokenizer = build_tokenizer(tiny)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(kind, tiny, device, torch.bfloat16)
    model.generation_config = sampling_defaults(tokenizer)
    model.save_pretrained(folder)
    if kind.startswith("text"):
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        tokenizer.save_pretrained(folder)
        return
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


# ---- cases ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A model folder and problems with their images."""

    model: Path
    dataset: Path  # images lie here
    template: Path
    problems: list[Problem]
    max_prompt_tokens: int
    max_pixels: int
    tiny: bool

    @property
    def end_of_turn(self) -> int:
        return special_token(END_OF_TURN, self.tiny)


def random_case(
    kind: str,
    folder: Path,
    *,
    problems: int,
    prompt_tokens: int,
    side: int,
    tiny: bool,
    seed: int = 0,
    model: Path | None = None,
) -> Case:
    """Prompts of exactly ``prompt_tokens`` tokens, each with a picture of its own where the model sees.

    Args:
        model: instead of one that is made here. With a tokenizer that merges bytes, prompts have fewer tokens.

    Raises:
        ValueError: the picture and the chat around it leave no room for text.
    """
    model, template = model or _model(kind, folder, tiny), _template(folder)
    side = side // _GRID * _GRID
    images: list[tuple[ImageRef, ...]] = [()] * problems
    if not kind.startswith("text"):
        images = [(picture,) for picture in _pictures(folder, problems, side, seed)]
    marker = "<image>" * len(images[0])
    case = Case(model, folder, template, [], prompt_tokens, max(side, 2 * _GRID) ** 2, tiny)
    around = len(prompts_of(case).tokens(Problem("empty", marker, images[0], "0", "bench")))
    if around >= prompt_tokens:
        raise ValueError(f"a prompt of {prompt_tokens} tokens has no room for text: {around} are the picture and chat")
    words = random.Random(seed)
    for number, found in enumerate(images):
        text = "".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=prompt_tokens - around))
        case.problems.append(Problem(f"p{number}", f"{marker}{text}", found, "0", "bench"))
    return case


def prepared_case(kind: str, folder: Path, dataset: Path, *, tiny: bool) -> Case:
    """The problems of a prepared dataset, with its pictures."""
    from rlcore.data.prepare.folder import load_report
    from rlcore.data.table import load_problems

    pixels = load_report(dataset).max_pixels
    case = Case(_model(kind, folder, tiny), dataset, _template(folder), load_problems(dataset), 0, pixels, tiny)
    prompts = prompts_of(case)
    return replace(case, max_prompt_tokens=max(len(prompts.tokens(problem)) for problem in case.problems))


def _model(kind: str, folder: Path, tiny: bool) -> Path:
    model = folder / f"{kind}{'-tiny' if tiny else ''}"
    if not (model / "config.json").exists():
        save_model(kind, model, tiny)
    return model


def _template(folder: Path) -> Path:
    path = folder / "plain.jinja"
    path.write_text("{{ content }}")
    return path


def _pictures(folder: Path, count: int, side: int, seed: int) -> list[ImageRef]:
    from PIL import Image

    (folder / "images").mkdir(parents=True, exist_ok=True)
    pixels, made = np.random.default_rng(seed), []
    for _ in range(count):
        small = Image.fromarray(pixels.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        picture = small.resize((side, side), Image.Resampling.BICUBIC)
        name = hashlib.sha256(picture.tobytes()).hexdigest()
        picture.save(folder / "images" / f"{name}.png", compress_level=1)
        made.append(ImageRef(name, side, side))
    return made


def prompts_of(case: Case) -> PromptBuilder:
    config = experiment(case, ["data.max_prompt_tokens=8192"])
    return PromptBuilder(load_processor(config.model), config.data)


def experiment(case: Case, overrides: Sequence[str]) -> ExperimentConfig:
    """TRL's setting: no KL term, clip 0.2 / 0.28, token mean, truncated token importance weights, no decay."""
    values = {
        "name": "bench",
        "model": {"path": str(case.model)},
        "data": {
            "template": str(case.template),
            "min_pixels": _GRID * _GRID * 4,
            "max_pixels": case.max_pixels,
            "max_prompt_tokens": case.max_prompt_tokens,
            "max_images": 1,
        },
        "algorithm": {"kl": {"coefficient": 0.0}, "correction": {"name": "truncate", "max_weight": 2.0}},
        "training": {"learning_rate": 1e-6, "weight_decay": 0.0, "steps": 100_000},
        "segment": {"steps": 100_000},
    }
    return build_experiment(values, list(overrides))


class CrcGrader:
    """Grades at once, by a checksum of the tokens, so that rewards vary within a group. Implements ``types.Grader``."""

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        done: Future[list[Score]] = Future()
        values = [zlib.crc32(c.token_ids.tobytes()) % 1000 / 999 for c in completions]
        done.set_result([Score(value, {}, True) for value in values])
        return done

    def last_failures(self) -> Sequence[str]:
        return ()

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


# ---- lengths and work ----------------------------------------------------------------------------------------------


def stop_chance(mean: float, cap: int) -> float:
    """The chance p to stop at each token with which lengths, cut at the cap, have this mean: (1 - (1 - p)^cap) / p."""
    low, high = 1e-9, 0.999
    for _ in range(100):
        p = math.sqrt(low * high)
        low, high = (p, high) if (1 - (1 - p) ** cap) / p > mean else (low, p)
    return p


def end_bias(mean: float, cap: int, case: Case) -> float:
    """A first bias on the end of the turn, as if all tokens were equally likely."""
    return math.log(stop_chance(mean, cap) * vocabulary_of(case.tiny))


def trl_flops(model: Any, side: int) -> Callable[[Mapping[str, int]], float]:
    """TRL's count of a step's work, from its token counts: 6 N T for the matrix products and 6 L D sum(s^2) for causal
    attention. A tower adds, for each rollout of P patches, 6 N_v P and 12 D_v P x (P, or a window's patches) by layer.

    Args:
        side: of each rollout's picture in pixels, for a model that sees.
    """
    config = model.config
    text, tower_parameters, tower = config.get_text_config(), 0, 0.0
    if vision := getattr(config, "vision_config", None):
        tower_parameters = sum(p.numel() for p in model.model.visual.parameters())
        patches = (side // _GRID * 2) ** 2
        window = (vision.window_size // vision.patch_size) ** 2
        full = len(vision.fullatt_block_indexes)
        seen = full * patches + (vision.depth - full) * window
        tower = 6.0 * tower_parameters * patches + 12 * vision.hidden_size * patches * seen
    parameters = sum(p.numel() for p in model.parameters()) - tower_parameters
    width = text.num_hidden_layers * text.hidden_size

    def of_step(tokens: Mapping[str, int]) -> float:
        real = tokens["prompt"] + tokens["completion"]
        return 6 * parameters * real + 6 * width * tokens["sum_sq"] + tower * tokens["rollouts"]

    return of_step


# ---- what the programs share ---------------------------------------------------------------------------------------


def common_arguments(parser: argparse.ArgumentParser, folder: str) -> None:
    parser.add_argument("--folder", type=Path, default=Path(folder), help="models and prompts are made here")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small numbers: runs on a CPU")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the experiment")
    parser.add_argument("--out", type=Path)


def write(out: Path | None, result: Mapping[str, Any]) -> None:
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if out is not None:
        out.write_text(text + "\n")
