"""Metrics under the names of EasyR1 and verl: the mapping, its table on the page, and what trackers get."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mlflow import MlflowClient
from pydantic import ValidationError

from infra.settings import MetricNames, Settings
from infra.tracking.names import THEIRS, with_names
from rlcore.config import ExperimentConfig
from rlcore.segment.journal import MetricJournal, StepRecord
from tasks.driver.publish import Publishers
from tasks.run import Run
from tests.docs import code

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-easyr1-and-verl.md"


def expanded(cell: str) -> list[str]:
    """`a/b`, `/c` is a/b and a/c."""
    names: list[str] = []
    for word in re.findall(r"`([a-z_/0-9]+)`", cell):
        names.append(f"{names[-1].rpartition('/')[0]}{word}" if word.startswith("/") else word)
    return names


def of_page(trainer: str) -> dict[str, str]:
    """The table of the page: their name to ours, for one of them."""
    table = PAGE.read_text().partition("| EasyR1 and verl | ours |")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for row in table.splitlines()[2:]:
        theirs, ours, _ = (cell.strip() for cell in row.strip("|").split(" | "))
        if "not logged" in theirs:
            continue
        marks = re.findall(r"`([^`]+)`( \((EasyR1|verl)\))?", theirs)
        names, own = expanded(theirs), expanded(ours)
        owners = [mark[2].lower() for mark in marks]
        for name, target, owner in zip(names, own if len(own) > 1 else own * len(names), owners, strict=True):
            if owner in ("", trainer):
                found[name] = target
    return found


@pytest.mark.parametrize("trainer", ["easyr1", "verl"])
def test_the_page_has_the_mapping(trainer: MetricNames) -> None:
    assert of_page(trainer) == dict(THEIRS[trainer])


def test_every_name_of_ours_is_a_metric_and_none_of_theirs_is() -> None:
    own = {name for names in THEIRS.values() for name in names.values()}
    theirs = {name for names in THEIRS.values() for name in names}
    assert {name for name in own if not name.startswith("eval/")} <= code.metrics()
    assert not theirs & code.metrics()


def test_a_step_has_both_names_and_lacks_what_it_has_not_measured() -> None:
    record = StepRecord(3, 1000, {"reward/mean": 0.5, "loss/entropy": 0.25, "other": 1.0})
    (verl,) = with_names([record], ["verl"])
    assert (verl.step, verl.timestamp_ms) == (3, 1000)
    assert verl.metrics == {
        "reward/mean": 0.5, "loss/entropy": 0.25, "other": 1.0, "critic/score/mean": 0.5, "critic/rewards/mean": 0.5,
        "actor/entropy": 0.25,
    }  # fmt: skip
    (both,) = with_names([record], ["easyr1", "verl"])
    assert both.metrics == {**verl.metrics, "actor/entropy_loss": 0.25}
    (none,) = with_names([record], [])
    assert none.metrics == record.metrics


def test_names_are_a_list_and_an_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_METRIC_NAMES", "verl, easyr1")
    assert Settings().metric_names == ("verl", "easyr1")
    monkeypatch.setenv("RLFLOW_METRIC_NAMES", "trl")
    with pytest.raises(ValidationError, match="'easyr1' or 'verl'"):
        Settings()


def test_mlflow_has_each_step_once_under_both_names_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("RLFLOW_METRIC_NAMES", "verl")
    settings = Settings()
    settings.mlflow_dir.mkdir()
    run = Run(run_id="r", run_dir=settings.runs_dir / "r", experiment=ExperimentConfig(name="toy"))
    journal = MetricJournal(run.run_dir / "journal.jsonl")
    for step in (1, 2, 3):
        journal.step(step, {"reward/mean": step / 4})
    for through in (2, 2, 3):  # as three drivers of the same run
        publishers = Publishers(run, settings)
        publishers.publish_last(through)
        publishers.stop()
        (run.run_dir / "mlflow.json").unlink()  # and each has lost what it knew
    client = MlflowClient(settings.tracking_uri)
    (found,) = client.search_runs([client.get_experiment_by_name("toy").experiment_id])
    for name in ("reward/mean", "critic/score/mean"):
        points = client.get_metric_history(found.info.run_id, name)
        assert [(point.step, point.value) for point in points] == [(1, 0.25), (2, 0.5), (3, 0.75)]
