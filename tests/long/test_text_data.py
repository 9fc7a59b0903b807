"""Text problems (GSM8K, MATH), prepared whole under the template of their recipe: no row is lost silently."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlcore.config import DataConfig, ModelConfig, TinyModelConfig
from rlcore.data.prepare.folder import load_report
from rlcore.data.rejects import read_rejects
from rlcore.data.table import load_rows
from rlcore.jobs.prepare import prepare
from rlcore.specs import PrepareSpec
from tasks.experiments import load_experiment

TEXT, SEEING = (ModelConfig(tiny=TinyModelConfig(task=task)) for task in ("sums", "geometry"))


@pytest.mark.parametrize("model", [TEXT, SEEING], ids=["text", "seeing"])
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("gsm8k/train", "grpo-gsm8k"),
        ("gsm8k/test", "grpo-gsm8k"),
        ("math12k/train", "grpo-math12k"),
        ("math500/test", "grpo-math12k"),
        ("math500/test", "dapo-math17k"),
    ],
)
def test_every_row_is_kept_or_set_aside_with_a_reason(tmp_path, data_sets, name, recipe, model):
    """At a token per byte a few problems are longer than the 2048 tokens that their recipe has for words."""
    path, rows, too_long = data_sets.file(name), data_sets.counts[name].rows, data_sets.counts[name].too_long
    template = load_experiment(recipe).data.template
    data = DataConfig(template=template, max_prompt_tokens=2048)
    spec = PrepareSpec(
        result=tmp_path / "result.json",
        source=str(path),
        source_path=path,
        split="train",
        data=data,
        model=model,
        datasets_dir=tmp_path / "datasets",
    )
    ref = prepare(spec)
    kept, rejects = load_rows(Path(ref.path)), read_rejects(Path(ref.path) / "rejects.jsonl")
    assert len(kept) + len(rejects) == rows == pq.read_metadata(path).num_rows
    assert Counter(reject.reason for reject in rejects) == Counter({"prompt_too_long": too_long})
    assert {row.row for row in kept} | {reject.row for reject in rejects} == set(range(rows))
    assert load_report(Path(ref.path)).rejected == ({"prompt_too_long": too_long} if too_long else {})
    assert max(row.prompt_tokens for row in kept) == ref.max_prompt_tokens <= data.max_prompt_tokens
    assert all(row.problem.answer for row in kept)
    assert len({row.problem.problem_id for row in kept}) == len(kept)
    if template == "gsm8k":
        assert all(Decimal(row.problem.answer).is_finite() for row in kept)  # what the reward compares with
