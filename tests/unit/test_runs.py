"""A run's folder as the driver sees it, and the MLflow run around a flow."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter, ValidationError

from infra.errors import ServerError, StorageError, StorageRefusedError
from infra.settings import Settings
from rlcore.config import ExperimentConfig
from rlcore.errors import ConfigError, DivergedError, RetriesUsedUpError
from rlcore.failures import Failure
from rlcore.segment.spec import segment_path
from tasks import experiments as form
from tasks import open as tracking
from tasks.ablation.study import existing_ablation, plan_ablation
from tasks.cli.deploy import cluster_files
from tasks.driver.failures import note_outages, read_outage
from tasks.experiments import load_experiment
from tasks.open import track_run
from tasks.run import Run, append_line, existing_run, note_driver, open_run
from tasks.store.restore import MirrorState, read_mirror, write_mirror


def test_a_damaged_segment_manifest_counts_as_none_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))
    run = open_run(load_experiment("grpo-geo3k-tiny"), "run", Settings())
    path = segment_path(run.run_dir, 0)
    path.parent.mkdir()
    assert run.manifest(0) is None
    path.write_text('{"run_id": ')
    assert run.manifest(0) is None
    assert f"{path} is damaged and does not count" in caplog.text


@pytest.mark.parametrize("run_id", ["../elsewhere", "/etc", "a/b", "..", ".hidden", "", "a\nb", "x" * 129])
def test_the_name_of_a_run_is_no_path(run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))
    with pytest.raises(ConfigError, match="cannot be the name of a run"):
        existing_run(run_id, Settings())
    if run_id:  # empty: make one up
        with pytest.raises(ConfigError, match="cannot be the name of a run"):
            open_run(load_experiment("grpo-geo3k-tiny"), run_id, Settings())
    assert not list(tmp_path.iterdir())


NO_ABLATIONS = ["../elsewhere", "/etc", "a/b", "..", ".hidden", "a\n", "A", "a_b", "x" * 81]


@pytest.mark.parametrize("name", NO_ABLATIONS)
def test_the_name_of_an_ablation_is_no_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan holds whole experiments, with the path of a reward's code: one from elsewhere must not be read."""
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))
    with pytest.raises(ConfigError, match="cannot be the name of an ablation"):
        existing_ablation(name)
    with pytest.raises(ConfigError, match="cannot be the name of an ablation"):
        plan_ablation("grpo-geo3k-tiny", (), name, grid=("seed=[1]",))


@pytest.mark.parametrize("schema", [form.NewAblation, form.ExistingAblation])
@pytest.mark.parametrize("name", [name for name in NO_ABLATIONS if name != "a\n"])  # JSON schema's $ allows it
def test_prefect_refuses_such_a_name_before_it_stores_it(schema: object, name: str) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(schema).validate_python(name)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(name, TypeAdapter(schema).json_schema())
    jsonschema.validate("grpo-geo3k-tiny-0123456789ab", TypeAdapter(schema).json_schema())


def test_a_file_for_a_cluster_names_no_run_that_would_be_refused_there() -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a run"):
        cluster_files("rayjob", "grpo-geo3k", (), "../x", None)


class Tracker:
    mlflow_run_id = "run-in-mlflow"

    def __init__(self, *, away: bool) -> None:
        self.away = away
        self.closed: list[str] = []

    def resume(self) -> None:
        return

    def finish(self, status: str) -> None:
        self.closed.append(status)
        if self.away:
            raise ServerError("MLflow is away")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(run_id="r", run_dir=tmp_path, experiment=ExperimentConfig(name="toy"))


@pytest.mark.parametrize(("error", "status"), [(DivergedError("nan"), "FAILED"), (KeyboardInterrupt(), "KILLED")])
def test_an_mlflow_that_is_away_does_not_hide_the_first_error(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: str
) -> None:
    tracker = Tracker(away=True)
    without_prefect(monkeypatch, tracker)
    with pytest.raises(type(error)), track_run(run):
        raise error
    assert tracker.closed == [status]
    note = json.loads((run.run_dir / "ended.json").read_bytes())
    assert (note["status"], note["error"]) == (status, f"{type(error).__name__}: {error}")
    assert time.time() - 60 < note["at"] <= time.time()


def test_a_run_whose_end_mlflow_does_not_take_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    without_prefect(monkeypatch, Tracker(away=True))
    with pytest.raises(ServerError), track_run(run):
        pass
    outage = read_outage(run)
    assert outage is not None
    assert outage.failure is Failure.TRACKING
    assert not run.finished_marker.exists()


def test_a_run_is_finished_once_the_store_has_all_of_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def mirror_run(*_: object) -> Iterator[None]:
        yield
        raise StorageError("the store is away")  # as its last send ends

    tracker = Tracker(away=False)
    without_prefect(monkeypatch, tracker)
    monkeypatch.setattr(tracking, "mirror_run", mirror_run)
    with pytest.raises(StorageError), track_run(run):
        pass
    assert tracker.closed == ["FAILED"]
    assert not run.finished_marker.exists()
    outage = read_outage(run)
    assert outage is not None
    assert outage.failure is Failure.STORAGE


def test_only_an_outage_is_noted(run: Run) -> None:
    with pytest.raises(DivergedError), note_outages(run):
        raise DivergedError("nan")
    assert read_outage(run) is None
    with pytest.raises(StorageRefusedError), note_outages(run):
        raise StorageRefusedError("quota exceeded")
    assert read_outage(run) is None
    used_up = RetriesUsedUpError("seven times")
    used_up.__cause__ = StorageError("the store is away")
    with pytest.raises(RetriesUsedUpError), note_outages(run):
        raise used_up
    assert read_outage(run) is not None
    note_driver(run)
    assert read_outage(run) is None, "of a start before this one"


def without_prefect(monkeypatch: pytest.MonkeyPatch, tracker: Tracker) -> None:
    """The steps as plain functions, with this tracker."""
    for module in ("tasks.open", "tasks.run"):
        monkeypatch.setattr(f"{module}.tracker_of", lambda *_: tracker)
    for name in ("open_tracking", "finish_run"):
        monkeypatch.setattr(tracking, name, getattr(tracking, name).fn)


def _append_often(path: Path, name: str, barrier: Any) -> None:
    barrier.wait()
    for number in range(30):
        append_line(path, f"{name} {number}")


def test_two_processes_that_append_at_once_lose_no_line(tmp_path: Path) -> None:
    """Two drivers of one run, on one volume."""
    context = multiprocessing.get_context("spawn")
    barrier, path = context.Barrier(2, timeout=60), tmp_path / "drivers.jsonl"
    writers = [context.Process(target=_append_often, args=(path, name, barrier)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    lines = path.read_text().splitlines()
    assert sorted(lines) == sorted(f"{name} {number}" for name in "ab" for number in range(30))
    assert [line for line in lines if line[0] == "a"] == [f"a {number}" for number in range(30)]


@pytest.mark.parametrize("damage", ["", '{"store": "s3', "[]"])
def test_a_damaged_mirror_json_costs_another_look_at_the_store(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(data_dir=tmp_path, store="s3://bucket/prefix")
    assert read_mirror(tmp_path, settings).step == 0
    known = MirrorState(store=settings.store, token="t", step=4)
    write_mirror(tmp_path, known)
    assert read_mirror(tmp_path, settings) == known
    assert read_mirror(tmp_path, Settings(data_dir=tmp_path, store="s3://other/prefix")).step == 0
    (tmp_path / "mirror.json").write_text(damage)
    anew = read_mirror(tmp_path, settings)
    assert (anew.step, anew.store, anew.taken_over) == (0, settings.store, False)
    assert anew.token != known.token
    assert "mirror.json is damaged" in caplog.text
