"""``rlflow fork``: a new run from a checkpoint of another one; and ablations whose points are forks of one run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.ablation_point import ablation_point
from flows.train_grpo import train_grpo
from infra.settings import Settings
from rlcore.errors import CheckpointError, ConfigError
from rlcore.files import files_below
from rlcore.segment.journal import read_journal
from rlcore.segment.store import verify_checkpoint
from tasks.ablation.steps import report_ablation
from tasks.ablation.study import open_ablation, plan_ablation
from tasks.fork import fork_run
from tasks.run import existing_run, read_fork, tracker_of
from tests.flows.outcome import SMALL, trainings


def test_a_fork_has_the_steps_of_its_trunk_and_goes_on_from_its_checkpoint(data_dir: Path) -> None:
    settings = Settings()
    trunk_summary = train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="trunk")
    trunk = existing_run("trunk", settings)
    verdicts = trunk.run_dir / "verdicts" / "000001.jsonl"  # of a judge
    verdicts.parent.mkdir()
    verdicts.write_text("{}\n")
    before = {path: path.read_bytes() for path in files_below(trunk.run_dir)}

    forked = fork_run(trunk, 2, "forked", settings)
    assert [record.step for record in read_journal(forked.run_dir / "journal.jsonl")] == [1, 2]
    assert (forked.run_dir / "verdicts" / verdicts.name).read_text() == "{}\n"
    assert verify_checkpoint(forked.run_dir / "checkpoints" / "step-000002").run_id == "forked"
    assert fork_run(trunk, 2, "forked", settings) == forked, "a command that is typed again"

    summary = train_grpo(
        "grpo-geo3k-tiny", overrides=["training.steps=4", "training.learning_rate=0.5"], run_id="forked",
        allow_changes=True,
    )  # fmt: skip
    assert trainings(data_dir) == ["train from segment 0", "train from segment 1"]
    assert (summary.steps, summary.segments) == (4, 2)
    assert summary.mlflow_run_id != trunk_summary.mlflow_run_id
    client = MlflowClient(tracking_uri=settings.tracking_uri)
    for name, steps in (("reward/mean", [1, 2, 3, 4]), ("eval/accuracy", [0, 2, 4])):
        assert [point.step for point in client.get_metric_history(summary.mlflow_run_id, name)] == steps
    tags = client.get_run(summary.mlflow_run_id).data.tags
    assert (tags["mlflow.parentRunId"], tags["rlflow.forked_from"]) == (trunk_summary.mlflow_run_id, "trunk@2")
    (change,) = map(json.loads, (forked.run_dir / "changes.jsonl").read_text().splitlines())
    assert (change["step"], sorted(item["key"] for item in change["changes"])) == (
        2, ["training.learning_rate", "training.steps"]
    )  # fmt: skip
    run = existing_run("forked", settings)
    last = run.manifest(1)
    assert last is not None
    registered = json.loads((run.report_dir / "evaluations.json").read_text())
    assert [item["step"] for item in registered] == [0, 2, 4]
    page = (run.report_dir / "report.html").read_text()
    assert "trunk@2" in page
    assert {path: path.read_bytes() for path in before} == before, "the trunk is as it was"


def test_what_cannot_be_forked_is_refused_and_leaves_nothing(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    train_grpo("grpo-geo3k-tiny", overrides=SMALL, run_id="trunk")
    trunk = existing_run("trunk", settings)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 3 on this machine\. Found: 2, 4, 5\."):
        fork_run(trunk, 3, "forked", settings)
    with pytest.raises(ConfigError, match="'trunk' already, and it is no fork"):
        fork_run(trunk, 2, "trunk", settings)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            fork_run(trunk, 2, "forked", settings)
    assert sorted(os.listdir(settings.runs_dir)) == ["trunk"]

    forked = fork_run(trunk, None, "forked", settings)
    origin = read_fork(forked)
    assert (str(origin), read_fork(trunk)) == ("trunk@5", None)
    with pytest.raises(ConfigError, match=r"'forked' already, and it is forked from trunk@5"):
        fork_run(trunk, 4, "forked", settings)


def test_the_points_of_an_ablation_are_forks_of_its_trunk(data_dir: Path) -> None:
    train_grpo("grpo-geo3k-tiny", overrides=[*SMALL, "training.learning_rate=0.25"], run_id="trunk")
    wanted = {"points": [["training.learning_rate=0.5"]], "seeds": [7]}
    for trunk, kind, why in (
        ("trunk@3", CheckpointError, "no checkpoint of step 3"),
        ("trunk@5", ConfigError, "training.steps=5, and the points start from trunk@5"),
        ("nothing@2", ConfigError, "no run 'nothing'"),
    ):
        with pytest.raises(kind, match=why):
            plan_ablation("grpo-geo3k-tiny", None, "study", **wanted, trunk=trunk)
    with pytest.raises(ConfigError, match="its trunk trunk is a run of grpo-geo3k-tiny"):
        plan_ablation("grpo-gsm8k-tiny", None, "study", **wanted, trunk="trunk@2")

    ablation = open_ablation.fn("grpo-geo3k-tiny", None, "study", **wanted, trunk="trunk@2")
    rates = [point.experiment.training.learning_rate for point in ablation.plan.points]
    assert rates == [0.25, 0.5], "the base has the trunk's values"
    for job in ablation.plan.jobs(["base", "p01"], 0):
        assert ablation_point("study", job.point.name, job.seed, job.steps).steps == 5
    assert trainings(data_dir) == ["train from segment 0", "train from segment 1", "train from segment 1"]
    client = MlflowClient(tracking_uri=Settings().tracking_uri)
    for folder in ablation.run_dirs(ablation.plan.points[1]):
        run = existing_run(folder.name, Settings())
        assert [record.step for record in run.journal()] == [1, 2, 3, 4, 5]
        assert (run.experiment.seed, str(read_fork(run))) == (7, "trunk@2")
        tags = client.get_run(json.loads((folder / "mlflow.json").read_text())["mlflow_run_id"]).data.tags
        assert tags["rlflow.ablation"] == "study"
        assert tags["mlflow.parentRunId"] == tracker_of(ablation.run, Settings()).mlflow_run_id
    summary = report_ablation.fn(ablation)
    # three steps of 0.2 s on two devices, and evaluations of 0.1 s at steps 4 and 5
    assert [row.gpu_hours for row in summary.rows] == [pytest.approx(2 * (3 * 0.2 + 2 * 0.1) / 3600)] * 2
    text = (Path(summary.folder) / "table.md").read_text()
    assert "All 2 runs are forks of trunk@2" in text
    assert f"{2 * 2 * 2 * 0.2 / 3600:.3g} GPU-hours more" in text
