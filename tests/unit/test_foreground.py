"""Commands that run a flow: what they call it with, and what ends them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import build_experiment
from tasks.ablation import study as ablation
from tasks.cli import app, foreground
from tasks.cli.foreground import EXIT_INTERRUPTED, overrides_of
from tasks.experiments import load_experiment

ORPHAN = """
import subprocess, sys
from tasks.cli import foreground

foreground._PATIENCE_SECONDS = 0.5
ended = subprocess.Popen(["true"])  # nobody waits for it, so that it stays in the list of children
at_work = subprocess.Popen(["sh", "-c", f"sleep 2; touch {sys.argv[1]}"])
foreground._end_without_server(sys.argv[2], parent=0)
"""


def test_it_ends_once_what_it_has_started_has_ended(tmp_path: Path, refusing_port: int) -> None:
    committed = tmp_path / "committed"
    command = [sys.executable, "-c", ORPHAN, str(committed), f"http://127.0.0.1:{refusing_port}/api"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == EXIT_INTERRUPTED, answer.stderr
    assert "no Prefect server is left at" in answer.stderr
    assert committed.exists()


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a command's words up to where a server would start; returns whether they got there."""
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))

    def run(*words: str) -> bool:
        started: list[object] = []
        monkeypatch.setattr(foreground, "run_once", lambda *_, **__: started.append(_))
        with contextlib.suppress(SystemExit):
            app(list(words), standalone_mode=False)
        return bool(started)

    return run


def test_a_run_and_an_ablation_go_on_after_prefect_yaml_has_lost_their_experiment(
    typed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = load_experiment("grpo-geo3k-tiny").model_copy(update={"name": "grpo-gone"})
    (tmp_path / "runs" / "old").mkdir(parents=True)
    (tmp_path / "runs" / "old" / "experiment.json").write_text(gone.model_dump_json())
    assert typed("train", "grpo-gone", "--run-id", "old", "--set", "training.steps=240")
    assert not typed("train", "grpo-gone", "--run-id", "new")
    assert not typed("train", "grpo-gone", "--run-id", "old", "--set", "training.step=240")

    asked = ("ablate", "grpo-gone", "--point", "training.learning_rate=1e-4", "--run-id")
    values = gone.model_dump(mode="json")
    with monkeypatch.context() as patch:
        patch.setattr(ablation, "load_experiment", lambda _, given=(): build_experiment(values, given))
        ablation.open_ablation.fn("grpo-gone", None, "old-ablation", points=[["training.learning_rate=1e-4"]])
    assert typed(*asked, "old-ablation")
    assert not typed(*asked, "new-ablation")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("s3://lab/geo3k", "s3://lab/geo3k"), ("sums", f"{Path.cwd() / 'sums'}"), ("~/sums", f"{Path.home() / 'sums'}")],
)
def test_data_may_be_a_folder_in_a_bucket(given: str, meant: str) -> None:
    assert overrides_of(["seed=1"], given) == [f"data.train={meant}", f"data.validation={meant}", "seed=1"]
