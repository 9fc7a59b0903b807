"""What both sides of a comparison share: the peer's random models, prompts and reward, loaded from its scripts.

Nothing of the peer is imported but through ``Peer``, by a path from the command line.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcore.config import ExperimentConfig, build_experiment
from rlcore.types import Completion, ImageRef, Problem, Score

Kind = Literal["text", "vl"]
Size = Literal["3b", "7b"]
_OTHER_TOKENIZER = 512  # a token a letter, where the dataset was prepared with words
_PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"  # the peer's text prompts have no chat around them


@dataclass(frozen=True, slots=True)
class Case:
    """A model folder, problems with their images, and how to count a step's work."""

    kind: Kind
    model: Path
    dataset: Path
    template: Path
    problems: list[Problem]
    max_prompt_tokens: int
    max_pixels: int
    flops: Callable[[Any], Callable[[dict[str, int]], float]]  # of a model, then of a step's token counts
    reward: Callable[..., list[float]]


def text_case(scripts: Path, folder: Path, *, problems: int, prompt_tokens: int, tiny: bool) -> Case:
    peer = load_script(scripts, "trl_h200")
    model = folder / "text"
    if not (model / "config.json").exists():
        tokenizer = peer.build_text_model(model, tiny)
        tokenizer.chat_template = _PLAIN
        tokenizer.save_pretrained(model)
    prompts = peer.make_prompts(problems, prompt_tokens)
    made = [Problem(f"p{index}", text, (), "0", "bench") for index, text in enumerate(prompts)]
    return Case(
        "text", model, folder, _template(folder), made, prompt_tokens, 512 * 512, peer.text_flops, peer.hash_reward
    )


def vl_case(
    scripts: Path, folder: Path, *, problems: int, prompt_tokens: int, side: int, tiny: bool, size: Size = "3b"
) -> Case:
    """One image a problem, resized to the grid as a prepared dataset holds it."""
    peer, base = load_script(scripts, "trl_vl_h200"), load_script(scripts, "trl_h200")
    model = _vl_model(peer, folder, side, tiny, size)
    (folder / "images").mkdir(exist_ok=True)
    grid = side // 28 * 28
    made = []
    texts = base.make_prompts(problems, prompt_tokens)
    for index, (text, picture) in enumerate(zip(texts, peer.make_images(problems, side), strict=True)):
        picture = picture.resize((grid, grid))
        name = hashlib.sha256(picture.tobytes()).hexdigest()
        picture.save(folder / "images" / f"{name}.png", compress_level=1)
        made.append(Problem(f"p{index}", f"<image>{text}", (ImageRef(name, grid, grid),), "0", "bench"))
    longest = prompt_tokens + (side // 28) ** 2 + 64
    return Case(
        "vl", model, folder, _template(folder), made, longest, side * side, peer.vl_flops(side), base.hash_reward
    )


def prepared_case(scripts: Path, folder: Path, dataset: Path, *, tiny: bool, size: Size = "3b") -> Case:
    """The problems of a prepared dataset, with its pictures. Work is not counted by the peer's formula."""
    from rlcore.data.folder import load_report
    from rlcore.data.table import load_rows

    peer, base = load_script(scripts, "trl_vl_h200"), load_script(scripts, "trl_h200")
    report, rows = load_report(dataset), load_rows(dataset)
    longest = max(row.prompt_tokens for row in rows) + _OTHER_TOKENIZER
    side = math.isqrt(report.max_pixels)
    model = _vl_model(peer, folder, side, tiny, size)
    problems = [row.problem for row in rows]
    template = _template(folder)
    return Case(
        "vl",
        model,
        dataset,
        template,
        problems,
        longest,
        report.max_pixels,
        lambda model: _not_counted,
        base.hash_reward,
    )


def _not_counted(tokens: dict[str, int]) -> float:
    return math.nan


def _vl_model(peer: Any, folder: Path, side: int, tiny: bool, size: Size) -> Path:
    model = folder / (f"vl-{size}")
    if not (model / "config.json").exists():
        small = peer.vl_config
        peer.vl_config = small if size == "3b" else lambda tiny: _seven(small(tiny))
        peer.build_vl_model(model, tiny, side)
        peer.vl_config = small
    return model


def _seven(config: Any) -> Any:
    """The text part and the merger of Qwen2.5-VL-7B."""
    shape = {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28}
    shape |= {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False}
    values = config.to_dict()
    text = {k: v for k, v in values["text_config"].items() if k != "layer_types"}
    values |= {"text_config": {**text, **shape}, "tie_word_embeddings": False}
    values["vision_config"]["out_hidden_size"] = 3584
    return type(config).from_dict(values)


def experiment(case: Case, overrides: Sequence[str]) -> ExperimentConfig:
    """The peer's setting: no KL term, clip 0.2 / 0.28, token mean, truncated token importance weights, no decay."""
    values = {
        "name": "bench",
        "model": {"path": str(case.model)},
        "data": {
            "template": str(case.template),
            "min_pixels": 28 * 28 * 4,
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
    """Grades by the peer's reward on the spot. Implements ``ports.Grader``."""

    def __init__(self, reward: Callable[..., list[float]]) -> None:
        self._reward = reward

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        done: Future[list[Score]] = Future()
        values = self._reward([c.token_ids.tolist() for c in completions])
        done.set_result([Score(value, {}, True) for value in values])
        return done

    def last_failures(self) -> Sequence[str]:
        return ()

    def close(self) -> None:
        pass


def write(out: Path | None, result: dict[str, Any]) -> None:
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if out is not None:
        out.write_text(text + "\n")


def load_script(scripts: Path, name: str) -> Any:
    if str(scripts) not in sys.path:
        sys.path.insert(0, str(scripts))
    return importlib.import_module(name)


def _template(folder: Path) -> Path:
    path = folder / "plain.jinja"
    path.write_text("{{ content }}")
    return path
