"""What cutting a run into segments costs the real trainer, on the demo's policy and batch.

``python -m tests.bench.checkpoints [--workers 2] [--segment-steps 20] [--turns 3] [--tiny]``; one JSON line: a run in
three segments and one in a single segment by turns, in seconds from the first step to the last; seconds that training
was blocked by a checkpoint, and seconds that one was written while training went on. A save that training waits for
would block for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.config import TinyModelConfig, build_experiment
from rlcore.models.tiny import create_tiny_policy
from rlcore.segment.journal import read_journal
from rlcore.segment.lease import Control
from rlcore.segment.spec import SegmentSpec
from rlcore.segment.store import LocalCheckpointStore, read_manifest
from tests.integration.tiny_run import prepared

SEGMENTS = 3
REWARD = """def reward(text, problem, num_tokens, finish_reason):
    return sum(map(str.isalpha, text)) / max(1, len(text))
"""


def main(folder: Path, workers: int, segment_steps: int, turns: int, problems: int) -> dict[str, object]:
    steps = SEGMENTS * segment_steps
    found: dict[str, list[dict[str, object]]] = {"cut": [], "whole": []}
    for turn in range(turns):
        found["cut"].append(trained(folder / f"cut-{turn}", workers, steps, segment_steps, problems))
        found["whole"].append(trained(folder / f"whole-{turn}", workers, steps, steps, problems))
    seconds = {name: [run["seconds"] for run in runs] for name, runs in found.items()}
    ratio = statistics.median(seconds["cut"]) / statistics.median(seconds["whole"])
    return {"ratio": round(ratio, 4), "seconds": seconds, "cut": found["cut"][-1]}


def trained(folder: Path, workers: int, steps: int, segment_steps: int, problems: int) -> dict[str, object]:
    folder.mkdir()
    (folder / "letters.py").write_text(REWARD)
    config = build_experiment(
        {
            "name": "tiny",
            "model": {"gradient_checkpointing": "none"},
            "data": {"max_prompt_tokens": 200, "template": "tiny", "synthetic_problems": 64},
            "rollout": {"group_size": 8, "max_completion_tokens": 32},
            "reward": {"name": "user", "file": str(folder / "letters.py")},
            "training": {
                "problems_per_batch": problems,
                "steps": steps,
                "learning_rate": 3e-4,
                "tokens_per_microbatch": 8192,
            },
            "segment": {"steps": segment_steps},
            "resources": {"workers": workers, "device": "cpu"},
        }
    )
    create_tiny_policy(folder / "model", TinyModelConfig(warm_start_steps=0))
    dataset = prepared(folder, config, None)
    spec = SegmentSpec(
        run_id="run",
        run_dir=folder / "run",
        experiment=config,
        dataset=DatasetRef(
            path=str(dataset),
            digest="d",
            source="s",
            num_problems=64,
            num_rejected=0,
            num_images=64,
            max_prompt_tokens=60,
        ),
        model=ModelRef(path=str(folder / "model"), digest="m", source="tiny", num_parameters=1),
    )
    spec.run_dir.mkdir()
    (spec.run_dir / "spec.json").write_text(spec.model_dump_json())
    control = Control(spec.run_dir / "control.json")
    control.beat(SEGMENTS)
    trainer = subprocess.Popen([sys.executable, "-m", "rlcore.jobs.segment", str(spec.run_dir / "spec.json")])
    while trainer.poll() is None:
        control.beat(SEGMENTS)
        time.sleep(1)
    if trainer.returncode:
        sys.exit(trainer.returncode)
    records = read_journal(spec.run_dir / "journal.jsonl")
    checkpoint = LocalCheckpointStore(spec.run_dir, "run").newest_first()[0]
    blocked, written = (
        [round(r.metrics[f"time/{name}"], 3) for r in records if r.metrics[f"time/{name}"]]
        for name in ("checkpoint_blocked", "checkpoint_written")
    )
    return {
        "blocked": blocked,
        "written": written,
        "seconds": round((records[-1].timestamp_ms - records[0].timestamp_ms) / 1000, 2),
        "step_median": round(statistics.median(record.metrics["time/step"] for record in records), 3),
        "mib": round(sum(entry.size for entry in read_manifest(checkpoint).files.values()) / 2**20, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--segment-steps", type=int, default=20, help="optimizer steps of a segment")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="one worker, one step of a small batch a segment, one turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        counts = (1, 1, 1, 4) if arguments.tiny else (arguments.workers, arguments.segment_steps, arguments.turns, 32)
        sys.stdout.write(json.dumps(main(Path(scratch), *counts)) + "\n")
