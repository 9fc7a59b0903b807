"""The flow tests' trainer (``tests/flows/fake_interpreter.py``) behaves as the real one: both are started the same way
with the same specs, and must leave the same exit codes, manifests, journal lines and files. The run is rolled back by a
health rule, continues with what that changed, and is told to stop."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlcore.adjustments import Adjustments, Intervention
from rlcore.failures import EXIT_DONE, EXIT_PREEMPTED, EXIT_ROLLBACK
from rlcore.segment.journal import StepRecord, read_journal
from rlcore.segment.lease import Control
from rlcore.segment.spec import SegmentSpec
from rlcore.segment.store import LocalCheckpointStore
from rlcore.specs import JobError
from tests.integration.tiny_run import experiment
from tests.integration.trainer_process import manifests, spec_of

FAKE = Path(__file__).parents[1] / "flows" / "fake_interpreter.py"
REAL_COMMAND, FAKE_COMMAND = [sys.executable], [sys.executable, str(FAKE)]
RATE = 1e-3
OF_ONE_ALONE = {"trainer.log", "spec.json", "control.json", "calls.txt", "stacks", "trained", "samples"}


@dataclass(frozen=True)
class Left:
    """What a trainer leaves for the driver to read."""

    code: int
    segments: list[tuple[str, int, int, int, bool, str, str, str]]
    steps: list[int]
    rates: list[float]
    error: str  # kind of the report; "" without one
    checkpoint: int  # step of the newest
    files: list[str]


def left(spec: SegmentSpec, code: int) -> Left:
    run_dir = spec.run_dir
    journal = read_journal(run_dir / "journal.jsonl")
    report = run_dir / "trainer_error.json"
    newest = LocalCheckpointStore(run_dir, spec.run_id).latest()
    return Left(
        code,
        [
            (
                m.run_id, m.segment, m.first_step, m.last_step, m.complete, m.experiment_digest, m.dataset_digest,
                Path(m.checkpoint.path).name,
            )
            for m in manifests(run_dir)
        ],
        [record.step for record in journal],
        [record.metrics["optim/learning_rate"] for record in journal],
        JobError.model_validate_json(report.read_text()).kind if report.exists() else "",
        0 if newest is None else newest.step,
        sorted({path.name for path in run_dir.iterdir()} - OF_ONE_ALONE),
    )  # fmt: skip


def trained(command: list[str], spec: SegmentSpec) -> Left:
    path = spec.run_dir / "spec.json"
    path.write_text(spec.model_dump_json())
    with (spec.run_dir / "trainer.log").open("ab") as log:
        code = subprocess.run(
            [*command, "-m", "rlcore.jobs.segment", str(path)], stdout=log, stderr=log, env=os.environ, timeout=500
        ).returncode
    return left(spec, code)


def life(command: list[str], run_dir: Path, model: Path, data: Path) -> tuple[list[Left], list[StepRecord]]:
    """Three starts of one run."""
    run_dir.mkdir(parents=True)
    rule = {"metric": "optim/learning_rate", "above": RATE * 0.9, "for_steps": 3, "action": "rollback"}
    config = experiment(
        **{
            "training.steps": 4,
            "training.learning_rate": RATE,
            "segment.steps": 2,
            "resources.workers": 1,
            "health": [rule],
        }
    )
    spec, control = spec_of(run_dir, model, data, config), Control(run_dir / "control.json")
    control.beat(9)
    rolled_back = trained(command, spec)

    change = Intervention(step=2, learning_rate_factor=0.5, seed=77, rule="r")
    changed = spec.model_copy(update={"adjustments": Adjustments(interventions=(change,), rollbacks=1, healthy_from=2)})
    control.beat(9)
    done = trained(command, changed)
    journal = read_journal(run_dir / "journal.jsonl")

    longer = config.model_copy(update={"training": config.training.model_copy(update={"steps": 8})})
    control.beat(9, stop=True)
    stopped = trained(command, changed.model_copy(update={"experiment": longer}))
    return [rolled_back, done, stopped], journal


def test_the_fake_trainer_of_the_flow_tests_leaves_what_the_real_one_leaves(
    tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    fake, fake_journal = life(FAKE_COMMAND, tmp_path / "fake" / "runs" / "run", tiny_model, dataset)
    real, real_journal = life(REAL_COMMAND, tmp_path / "real" / "runs" / "run", tiny_model, dataset)

    rolled_back, done, stopped = real  # first of all, the real one does what the driver counts on
    assert (rolled_back.code, rolled_back.error, rolled_back.steps) == (EXIT_ROLLBACK, "RollbackError", [1, 2, 3])
    assert [segment[1:5] for segment in rolled_back.segments] == [(0, 0, 2, True)]  # step 3 is not committed
    assert (done.code, done.steps, done.checkpoint) == (EXIT_DONE, [1, 2, 3, 4], 4)
    assert done.rates == pytest.approx([RATE, RATE, RATE / 2, RATE / 2])
    assert [segment[1:5] for segment in done.segments] == [(0, 0, 2, True), (1, 2, 4, True)]
    assert (stopped.code, stopped.segments) == (EXIT_PREEMPTED, done.segments)

    for which, (one, other) in enumerate(zip(fake, real, strict=True)):
        assert one == other, f"start {which + 1}"
    assert set(fake_journal[-1].metrics) <= {name for record in real_journal for name in record.metrics}
