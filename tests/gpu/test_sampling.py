"""On one GPU: an evaluation in its own process, and partial rollouts: ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlcore.artifacts import DatasetRef, EvalReports, ModelRef
from rlcore.specs import EvaluateSpec, EvaluationPart
from tests.docs.pages import ROOT
from tests.integration.tiny_run import CORRECTED, ON_A_GPU, PARTIAL, experiment, journal, run

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(300)
def test_an_evaluation_needs_no_cluster_and_gives_the_same_rows_twice(
    tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    model = ModelRef(path=str(tiny_model), digest="tiny", source="tiny", num_parameters=0)
    counts = {"num_problems": 0, "num_rejected": 0, "num_images": 0, "max_prompt_tokens": 200}
    prepared = DatasetRef(path=str(dataset), digest="tiny", source="tiny", **counts)
    config = experiment(**ON_A_GPU, **{"evaluation.samples": 2})
    tables, ray = [], tmp_path / "ray"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        spec = EvaluateSpec(
            result=tmp_path / name / "result.json",
            policy=model,
            base=model,
            parts=(EvaluationPart(experiment=config, dataset=prepared, out_dir=tmp_path / name),),
        )
        (tmp_path / name / "spec.json").write_text(spec.model_dump_json())
        command = [sys.executable, "-m", "rlcore.jobs.evaluate", str(tmp_path / name / "spec.json")]
        subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"RAY_TMPDIR": str(ray)})
        assert not ray.exists()  # a Ray of its own keeps its session there
        (report,) = EvalReports.model_validate_json(spec.result.read_text()).reports
        assert report.num_problems > 0
        tables.append(pq.read_table(report.table))
    assert tables[0].num_rows == tables[1].num_rows > 0
    assert tables[0].equals(tables[1])


@pytest.mark.timeout(300)
def test_partial_rollouts(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    """The policies of one completion differ by their rates of learning only, so both sides still agree."""
    config = experiment(**ON_A_GPU, **CORRECTED, **PARTIAL, **{"training.learning_rate": 1e-6})
    run(tmp_path / "run", tiny_model, dataset, config, until=4)
    steps = [record.metrics for record in journal(tmp_path / "run")]
    assert [metrics["rollout/policy_age_max"] for metrics in steps] == [0, 1, 2, 2]
    assert all(metrics["rollout/completions_continued"] > 0 for metrics in steps[1:])
    assert all(metrics["rollout/abs_delta_logprob_mean"] < 0.02 for metrics in steps)  # bf16, random weights
    assert all(metrics["optim/grad_norm"] > 0 for metrics in steps)
