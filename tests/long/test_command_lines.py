"""The commands of README.md that work on a run, typed in a shell of their own; with fake jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_API_URL

from flows.train_grpo import train_grpo
from tests.docs.pages import ROOT
from tests.flows.interpreter import fake_interpreter
from tests.shell import new_shell


def test_evaluate_merge_and_prepare_data_work_as_the_readme_types_them(data_dir: Path) -> None:
    train_grpo("grpo-geo3k-tiny", steps=2, overrides=["segment.steps=2"], run_id="run")
    variables = {"RLFLOW_DATA_DIR": str(data_dir), "RLFLOW_TRAINER_PYTHON": str(fake_interpreter(data_dir.parent))}

    def typed(*words: str, **more: str) -> tuple[dict[str, Any], str]:
        answer = subprocess.run(
            [sys.executable, "-m", "tasks.cli", *words],
            env=new_shell(variables, **more),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr[-3000:]
        return json.loads(answer.stdout.splitlines()[-1]), answer.stderr

    assert typed("evaluate", "run", "--on", "grpo-gsm8k-tiny")[0]["step"] == 2
    server = {"PREFECT_API_URL": str(PREFECT_API_URL.value())}  # each would start one of its own, as the first has
    assert typed("evaluate", "run", "--set", "evaluation.samples=1", **server)[0]["step"] == 2
    assert typed("merge", "run", **server)[0]["registered_name"] == "grpo-geo3k-tiny"
    rows = data_dir.parent / "rows"
    rows.mkdir()
    (rows / "all.jsonl").write_text("{}\n")
    prepared = typed("prepare", "grpo-geo3k-tiny", "--data", str(rows), **server)[0]
    assert prepared.keys() == {"train", "validation"}
