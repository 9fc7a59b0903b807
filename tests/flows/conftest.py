"""One Prefect server for the flow tests, and an interpreter that answers like rlcore's modules."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient
from prefect.testing.utilities import prefect_test_harness

FAKE = Path(__file__).with_name("fake_interpreter.py")


@pytest.fixture(scope="session")
def _prefect() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=300):
        yield


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs: making its tables takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def data_dir(_prefect: None, empty_mlflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh data folder, with the fake interpreter as the trainer's."""
    (tmp_path / "data" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_mlflow, tmp_path / "data" / "mlflow" / "mlflow.db")
    interpreter = fake_interpreter(tmp_path)
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RLFLOW_TRAINER_PYTHON", str(interpreter))
    monkeypatch.setenv("RLFLOW_RETRY_DELAY_SCALE", "0")
    return tmp_path / "data"


def fake_interpreter(folder: Path) -> Path:
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    script.chmod(0o755)
    return script
