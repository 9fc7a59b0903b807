"""All benchmark suites on real engines: one start of vLLM, one report and one table per suite."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlcore.artifacts import DatasetRef, EvalReport, ModelRef
from rlcore.config import ExperimentConfig, build_experiment
from rlcore.evaluation.rows import read_rows
from rlcore.evaluation.suites import all_suites
from rlcore.jobs.evaluate import run
from rlcore.jobs.prepare import prepare
from rlcore.jobs.resize import resize
from rlcore.sampler.engine import Engine
from rlcore.specs import EvaluateSpec, EvaluationPart, PrepareSpec, ResizeSpec
from tests.integration.engine_bench import measured
from tests.published_layouts import NAMES, write_suites


def _dataset(folder: Path, name: str, experiment: ExperimentConfig) -> DatasetRef:
    common = {"result": folder / "result.json", "data": experiment.data, "model": experiment.model}
    spec = PrepareSpec(
        source=experiment.data.validation, source_path=folder / "copies" / name, split="validation",
        datasets_dir=folder / "datasets", **common,
    )  # fmt: skip
    return resize(ResizeSpec(dataset=prepare(spec), datasets_dir=folder / "datasets", processes=1, **common))


def _evaluated(spec: EvaluateSpec, model: Path) -> dict[str, Any]:
    """The reports, and the model of each start of an engine."""
    starts: list[str] = []
    start = Engine.__init__

    def counted(engine: Engine, model: Path, *args: object, **options: object) -> None:
        starts.append(str(model))
        start(engine, model, *args, **options)  # type: ignore[arg-type]

    Engine.__init__ = counted  # type: ignore[method-assign]
    return {"starts": starts, "reports": [report.model_dump(mode="json") for report in run(spec).reports]}


@pytest.mark.timeout(300)
def test_every_suite_with_one_start_of_the_engine(tiny_model: Path, tmp_path: Path) -> None:
    write_suites(tmp_path / "copies")
    base = build_experiment(
        {
            "name": "suites",
            "model": {"path": str(tiny_model)},
            "rollout": {"max_completion_tokens": 8},
            "resources": {"device": "cpu"},
        },
        [],
    )
    names = [*NAMES, NAMES[0]]  # the first one again, after all others
    parts = []
    for place, name in enumerate(names):
        experiment = all_suites()[name].experiment(base, folder=str(tmp_path / "copies"))
        dataset = _dataset(tmp_path, name, experiment)
        assert (dataset.num_problems, dataset.num_rejected) == (2, 0), name
        parts.append(EvaluationPart(experiment=experiment, dataset=dataset, out_dir=tmp_path / f"{place}-{name}"))
    model = ModelRef(path=str(tiny_model), digest="tiny", source="tiny", num_parameters=0)
    spec = EvaluateSpec(result=tmp_path / "result.json", policy=model, base=model, parts=tuple(parts))
    result = measured(partial(_evaluated, spec), tiny_model)
    assert result["starts"] == [str(tiny_model)]
    reports = [EvalReport.model_validate(report) for report in result["reports"]]
    for part, report in zip(parts, reports, strict=True):
        rows = read_rows(Path(report.table))
        assert len(rows) == 2 * part.experiment.evaluation.samples == 2 * report.samples_per_problem
        assert Path(report.table) == part.out_dir / "completions.parquet"
        assert all(row.graded and 0 < row.num_tokens <= 8 for row in rows)
        assert report.dataset_digest == part.dataset.digest
        assert (part.out_dir / "report.json").exists()
    first, again = read_rows(Path(reports[0].table)), read_rows(Path(reports[-1].table))
    assert first == again
    assert {"pass_at_2", "pass_at_8"} <= reports[NAMES.index("aime24")].details.keys()
