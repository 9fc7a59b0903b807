"""The trainer's own process on the tiny policy: how tests start it and read what it left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from infra import processes
from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.segment.spec import SegmentManifest, SegmentSpec


def start(spec: SegmentSpec, mark: str = "") -> subprocess.Popen[bytes]:
    """``mark``: of all that the trainer starts, as a flow would mark it."""
    path = spec.run_dir / "spec.json"
    path.write_text(spec.model_dump_json())
    log = (spec.run_dir / "trainer.log").open("ab")
    command = [sys.executable, "-m", "rlcore.jobs.segment", str(path)]
    if mark:
        return processes.start(command, env=os.environ, mark=mark, output=log, ends_with_parent=True)
    return subprocess.Popen(command, stdout=log, stderr=log)


def manifests(run_dir: Path) -> list[SegmentManifest]:
    files = sorted((run_dir / "segments").glob("*.json"))
    return [SegmentManifest.model_validate_json(file.read_text()) for file in files]


def spec_of(run_dir: Path, model: Path, dataset: Path, config: ExperimentConfig) -> SegmentSpec:
    return SegmentSpec(
        run_id="run",
        run_dir=run_dir,
        experiment=config,
        dataset=DatasetRef(
            path=str(dataset),
            digest="d",
            source="s",
            num_problems=24,
            num_rejected=0,
            num_images=24,
            max_prompt_tokens=60,
        ),
        model=ModelRef(path=str(model), digest="m", source="tiny", num_parameters=1),
    )


def log_of(run_dir: Path) -> str:
    return (run_dir / "trainer.log").read_text()
