"""The whole flow for policies whose folders are laid out as hubs distribute them: tests/downloaded.py says how."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.data.synthetic.geometry import draw_problem
from tests.downloaded import make_downloaded
from tests.whole_flow import run_flow, vowels

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
    """By the program of ``make demo-gpu``, which kills the trainer once."""
    problems = tmp_path / "problems"
    problems.mkdir()
    for split in ("train", "validation"):
        rows = []
        for index in range(6):
            drawn = draw_problem(split, index, 0)
            drawn.picture.save(problems / f"{split}-{index}.png")
            images = [f"{split}-{index}.png"]
            rows.append({"problem": f"<image>{drawn.question}", "answer": drawn.answer, "images": images})
        (problems / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ("--data", problems, "--folder", tmp_path / "demo", "--out", tmp_path / "demo.json")
    program = [sys.executable, "-m", "tests.whole_flow", "--shape", "tiny-vl", *map(str, options)]
    answer = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=False)
    assert answer.returncode == 0, answer.stdout[-4000:]
    outcome = json.loads((tmp_path / "demo.json").read_text())
    assert json.loads(answer.stdout.splitlines()[-1]) == outcome["result"]
    assert outcome["harms"] == []
    assert min(outcome["reward_deviations"]) > 0
    stages = {stage["name"]: stage for stage in outcome["stages"]}
    for name in ("worker and engine start", "checkpoint of step 2 is loaded", "from the kill to the next trainer"):
        assert stages[name]["seconds"] > 0
    assert stages["segment-1"]["processes_gib"] > 0
    assert_as_downloaded(outcome["result"], tmp_path / "demo" / "model", steps=4)


def test_a_text_model_in_the_newer_layout_becomes_a_registered_model(tmp_path: Path) -> None:
    model = make_downloaded(tmp_path / "text", "tiny-text", rope_keys="newer")
    settings = {**SMALL, "model.path": model, "data.synthetic_problems": 64, "algorithm.kl.coefficient": 0.001}
    flow = run_flow("grpo-gsm8k-tiny", {**settings, **vowels(tmp_path)}, tmp_path)
    assert_as_downloaded(flow.result, model, steps=2)


def assert_as_downloaded(result: dict[str, object], model: Path, *, steps: int) -> None:
    merged = Path(str(result["merged_model"]))
    assert result["steps"] == steps
    assert (merged / "verified.json").is_file()
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (merged / name).read_text() == (model / name).read_text()
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, merged))
    assert {**after, "dtype": 0, "torch_dtype": 0} == {**before, "dtype": 0, "torch_dtype": 0}
