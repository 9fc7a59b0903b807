"""The model that a user names for ``rlflow serve`` and ``rlflow push``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from infra.errors import RegistryError
from infra.settings import Settings
from infra.tracking.models import Pyfunc
from rlcore.artifacts import CheckpointRef
from rlcore.errors import ConfigError
from tasks.experiments import load_experiment
from tasks.named import find_named, require_free
from tasks.run import Run, existing_run, open_run, tracker_of
from tasks.serve import serve_spec

EXPERIMENT = load_experiment("grpo-geo3k-tiny", ["data.template=math"])


@pytest.fixture
def settings(empty_mlflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (tmp_path / "data" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_mlflow, tmp_path / "data" / "mlflow" / "mlflow.db")
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))
    return Settings()


@pytest.fixture
def run(settings: Settings) -> Run:
    open_run(EXPERIMENT, "whole", settings)
    return existing_run("whole", settings)


def merged(settings: Settings, step: int) -> Path:
    folder = settings.models_dir / f"merged-whole-step-{step}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    checkpoint = CheckpointRef(
        path="/gone", step=step, policy_version=step, manifest_sha256="m", run_id="whole", segment=0
    )
    (folder / "verified.json").write_text(json.dumps({"checkpoint": checkpoint.model_dump()}))
    return folder


def test_a_run_is_its_newest_merged_model_or_that_of_a_step(settings: Settings, run: Run) -> None:
    with pytest.raises(
        ConfigError, match=r"no merged model of step 0; steps that are here: none\. Merge it: rlflow merge"
    ):
        find_named("whole", settings)
    folders = {step: merged(settings, step) for step in (4, 20)}
    newest = find_named("whole", settings)
    assert (newest.folder, newest.step, newest.name, newest.adapters) == (folders[20], 20, "whole", None)
    assert find_named("whole:4", settings).folder == folders[4]
    assert newest.experiment == run.experiment
    with pytest.raises(ConfigError, match=r"no merged model of step 8; steps that are here: 4, 20"):
        find_named("whole:8", settings)


def test_a_folder_has_the_settings_of_the_run_that_it_names(settings: Settings, run: Run) -> None:
    folder = merged(settings, 4)
    found = find_named(str(folder), settings)
    assert (found.run_id, found.step, found.experiment) == ("whole", 4, run.experiment)
    shutil.rmtree(run.run_dir)
    with pytest.raises(ConfigError, match=r"was merged from run whole, which is not on this machine"):
        find_named(str(folder), settings)
    (folder / "verified.json").unlink()
    with pytest.raises(ConfigError, match=r"has no verified\.json, so rlflow did not merge it"):
        find_named(str(folder), settings)


def test_a_registered_model_is_found_where_the_data_folder_is_now_and_without_its_run(
    settings: Settings, run: Run, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "old" / "merged-whole-step-4"
    elsewhere.mkdir(parents=True)
    (elsewhere / "config.json").write_text("{}")
    (tmp_path / "files").mkdir()
    tracker = tracker_of(run, settings)
    tracker.log_text(run.experiment.model_dump_json(), "experiment.json")
    tracker.register_model(
        name="geo", path=elsewhere, tags={"rlflow.run_id": "whole", "rlflow.step": "4"},
        alias="champion", description="",
        pyfunc=Pyfunc("tests.echo_model", tmp_path / "files", {}, {"question": "?"}, {"seed": 0}, ["mlflow"]),
    )  # fmt: skip
    assert find_named("geo@champion", settings).folder == elsewhere
    shutil.rmtree(elsewhere)
    with pytest.raises(
        ConfigError, match=r"not in .*/old/merged-whole-step-4 and not in .*set RLFLOW_STORE.*merge whole"
    ):
        find_named("geo@champion", settings)
    here = merged(settings, 4)
    shutil.rmtree(run.run_dir)
    found = find_named("geo/1", settings)
    assert (found.folder, found.experiment, found.version, found.name) == (here, run.experiment, "geo/1", "geo")
    with pytest.raises(RegistryError, match="no registered model 'other'"):
        find_named("other", settings)
    with pytest.raises(ConfigError, match="no model 'a/b/c'. Allowed: a registered model"):
        find_named("a/b/c", settings)


@pytest.mark.usefixtures("run")
def test_the_server_gets_the_key_by_a_variable_that_is_set(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = merged(settings, 4)
    monkeypatch.delenv("SERVE_KEY", raising=False)
    with pytest.raises(ConfigError, match="SERVE_KEY is not set or empty"):
        serve_spec("whole", settings, key_variable="SERVE_KEY")
    monkeypatch.setenv("SERVE_KEY", "sesame")
    spec = serve_spec("whole", settings, key_variable="SERVE_KEY", further=["--max-num-seqs", "4"])
    assert (spec.model, spec.name, spec.host, spec.words) == (
        str(folder),
        "whole",
        "127.0.0.1",
        ("--max-num-seqs", "4"),
    )
    assert "sesame" not in spec.model_dump_json()


def test_only_a_new_or_empty_folder_is_written(tmp_path: Path) -> None:
    require_free(tmp_path / "new")
    require_free(tmp_path)
    (tmp_path / "file").write_text("")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConfigError, match="exists and is not empty"):
            require_free(taken)
