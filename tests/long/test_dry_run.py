"""``--dry-run`` as people type it: no GPU, no weights, no server, no run begun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench.update import build_model
from tests.shell import new_shell

ROOT = Path(__file__).resolve().parents[2]


def dry_run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = new_shell(RLFLOW_DATA_DIR=str(tmp_path / "data"), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    command = [sys.executable, "-m", "tasks.cli", "estimate", *words]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_folder_with_config_json_gives_the_estimate(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build_model("vl", False, torch.device("meta"), torch.float32).config.save_pretrained(folder)
    answer = dry_run(tmp_path, "grpo-geo3k-3b", "--device", "H200", "--set", f"model.path={folder}")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["device"] == "H200"
    assert found["parameters"] == pytest.approx(3.75e9, rel=0.01)
    assert found["fits"] is True
    assert found["training_gib"] < found["device_gib"]
    assert found["seconds_per_batch"] == pytest.approx(sum(found["seconds"].values()))
    assert "activations" in answer.stderr
    assert not (tmp_path / "data" / "runs").exists()


def test_without_config_json_it_says_what_it_needs(tmp_path: Path) -> None:
    answer = dry_run(tmp_path, "grpo-geo3k")
    assert answer.returncode == 1
    assert "put it into a folder and add --set model.path=FOLDER" in answer.stderr
    assert "Traceback" not in answer.stderr
