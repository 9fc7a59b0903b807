"""The whole flow for policies whose folders are laid out as hubs distribute them: tests/downloaded.py says how."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.data.synthetic.geometry import draw_problem
from tests.downloaded import make_downloaded
from tests.whole_flow import run_flow

pytestmark = pytest.mark.timeout(1200)
SMALL = {
    "data.template": "math",
    "data.max_prompt_tokens": 1000,
    "training.steps": 2,
    "segment.steps": 1,
    "training.problems_per_batch": 4,
    "training.mini_batches": 1,
    "training.tokens_per_microbatch": 2048,
    "rollout.group_size": 2,
    "rollout.max_completion_tokens": 8,
    "evaluation.problems": 4,
    "evaluation.samples": 1,
    "resources.workers": 1,
}


def test_a_vision_language_model_in_the_older_layout_becomes_a_registered_model(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        rows = []
        for index in range(6):
            drawn = draw_problem(split, index, 0)
            drawn.picture.save(tmp_path / f"{split}-{index}.png")
            images = [f"{split}-{index}.png"]
            rows.append({"problem": f"<image>{drawn.question}", "answer": drawn.answer, "images": images})
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {f"data.{split}": tmp_path / f"{split}.jsonl" for split in ("train", "validation")}
    model = make_downloaded(tmp_path / "vl", "tiny-vl", rope_keys="older")
    result = run_flow("grpo-geo3k-tiny", {**SMALL, "model.path": model, **data}, tmp_path)
    assert_as_downloaded(result, model)


def test_a_text_model_in_the_newer_layout_becomes_a_registered_model(tmp_path: Path) -> None:
    model = make_downloaded(tmp_path / "text", "tiny-text", rope_keys="newer")
    settings = {**SMALL, "model.path": model, "data.synthetic_problems": 64, "algorithm.kl.coefficient": 0.001}
    result = run_flow("grpo-gsm8k-tiny", settings, tmp_path)
    assert_as_downloaded(result, model)


def assert_as_downloaded(result: dict[str, object], model: Path) -> None:
    merged = Path(str(result["merged_model"]))
    assert result["steps"] == 2
    assert (merged / "verified.json").is_file()
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (merged / name).read_text() == (model / name).read_text()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, merged))
    assert {**after, "dtype": 0, "torch_dtype": 0} == {**before, "dtype": 0, "torch_dtype": 0}
