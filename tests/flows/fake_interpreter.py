"""Stands in for the trainer's interpreter: ``fake_interpreter.py -m <module> ...`` answers like the module.

The jobs write small made-up results; the trainer takes steps of ``FAKE_STEP_SECONDS`` with the real journal,
lease, control and checkpoint store, and has a child in a session of its own, as Ray does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pydantic import BaseModel

from rlcore.artifacts import (
    CheckpointRef,
    CheckRow,
    DatasetRef,
    DuplicatesRef,
    EvalReport,
    EvalReports,
    ModelCheck,
    ModelRef,
)
from rlcore.config import ExperimentConfig
from rlcore.errors import HealthError, RollbackError
from rlcore.evaluation.records import (
    TABLE,
    ValidationRecord,
    cut_records,
    has_plateaued,
    read_records,
    record_folder,
    suite_digest,
    write_record,
)
from rlcore.failures import EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EXIT_PREEMPTED, EXIT_STORAGE, exit_code
from rlcore.files import write_json_atomically
from rlcore.jobs import job_main
from rlcore.jobs.segment import StopRequest
from rlcore.process import dump_on_signal
from rlcore.segment.health import HealthWatch
from rlcore.segment.journal import MetricJournal, read_journal
from rlcore.segment.lease import Control, Lease
from rlcore.segment.resume import find_resume_point, segment_manifest
from rlcore.segment.spec import SegmentEnd, SegmentSpec, segment_path
from rlcore.segment.store import LocalCheckpointStore, read_manifest
from rlcore.specs import (
    BootstrapSpec,
    CheckModelSpec,
    DuplicatesSpec,
    EvaluateSpec,
    JobError,
    MergeSpec,
    PrepareSpec,
    ResizeSpec,
)

STEP_SECONDS = float(os.environ.get("FAKE_STEP_SECONDS", "0.02"))
HURRY = "hurry"  # a file in the run's folder; while it exists, steps take no time


def note(spec_dir: Path, line: str) -> None:
    """The order in which modules were run, for the test to read."""
    with (spec_dir / "calls.txt").open("a") as file:
        file.write(line + "\n")


def prepare(spec: PrepareSpec) -> BaseModel:
    note(spec.datasets_dir.parent, f"prepare {spec.split}")
    return _dataset(spec.datasets_dir / f"raw-{spec.split}", spec.source)


def resize(spec: ResizeSpec) -> BaseModel:
    note(spec.datasets_dir.parent, f"resize {Path(spec.dataset.path).name}")
    return _dataset(spec.datasets_dir / f"resized-{Path(spec.dataset.path).name}", spec.dataset.source)


def _dataset(folder: Path, source: str) -> DatasetRef:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text("{}")
    if "FAKE_DUPLICATES" in os.environ:
        _write_problems(folder)
    return DatasetRef(
        path=str(folder),
        digest=folder.name,
        source=source,
        num_problems=8,
        num_rejected=1,
        num_images=8,
        max_prompt_tokens=100,
    )


def _write_problems(folder: Path) -> None:
    from rlcore.data.table import PreparedRow, write_rows
    from rlcore.types import Problem

    write_rows(folder, [PreparedRow(Problem(f"p{i}", f"What is {i}?", (), str(i), "fake"), i, 5, 0) for i in range(8)])


def duplicates(spec: DuplicatesSpec) -> BaseModel:
    """``FAKE_DUPLICATES`` (JSON) are the problems that training has too; else there are none. Not in the calls, because
    it runs beside other jobs."""
    names = json.loads(os.environ.get("FAKE_DUPLICATES", "[]"))
    spec.out_dir.mkdir(parents=True, exist_ok=True)  # it may come from the store
    path = spec.out_dir / "duplicates.jsonl"
    pair = {"kind": "exact", "similarity": 1.0, "bits": 0}
    path.write_text("".join(json.dumps({"evaluation_id": i, "training_id": i, **pair}) + "\n" for i in names))
    return DuplicatesRef(
        path=str(path), digest="pairs", train_digest=spec.train.digest, evaluation_digest=spec.evaluation.digest,
        problems=8, exact=len(names), near=0, same_images=0, exact_only=False,
    )  # fmt: skip


def bootstrap(spec: BootstrapSpec) -> BaseModel:
    note(spec.models_dir.parent, "bootstrap")
    return _model(spec.models_dir / "start", "tiny")


def check_model(spec: CheckModelSpec) -> BaseModel:
    note(Path(spec.model.path).parent.parent, "check")
    row = CheckRow(
        name="trainer", largest=1e-6, spread=1e-7, allowed_largest=1e-3, allowed_spread=1e-3, unit="nats",
        place="text", passed=True,
    )  # fmt: skip
    return ModelCheck(
        path=spec.model.path, digest=spec.model.digest, layers="3 layers", dtype="float32", device="cpu",
        versions={"torch": "2"}, rows=(row,), seconds=0.1,
    )  # fmt: skip


def merge(spec: MergeSpec) -> BaseModel:
    note(spec.models_dir.parent, f"merge {spec.checkpoint.step}")
    return _model(spec.models_dir / f"merged-{spec.checkpoint.step}", "tiny")


def _model(folder: Path, source: str) -> ModelRef:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return ModelRef(path=str(folder), digest=folder.name, source=source, num_parameters=1000)


def evaluate(spec: EvaluateSpec) -> BaseModel:
    step = spec.policy.step if isinstance(spec.policy, CheckpointRef) else 0
    note(spec.parts[0].out_dir.parent.parent, f"evaluate {step}")
    reports = []
    for part in spec.parts:
        table = part.out_dir / "table.parquet"
        reports.append(_report(part.experiment, step, part.dataset, spec.policy.path, table))
        (part.out_dir / "report.json").write_text(reports[-1].model_dump_json())
    return EvalReports(reports=tuple(reports))


def _report(experiment: ExperimentConfig, step: int, dataset: DatasetRef, policy: str, table: Path) -> EvalReport:
    """Of 8 problems ``FAKE_RIGHT`` (JSON, by step, or by step and learning rate: "4 0.001") says how many are right;
    else 2 at step 0, 6 later. ``FAKE_REPEATED``: how often there are these 8."""
    from rlcore.evaluation.rows import EvalRow, write_rows

    told, rate = json.loads(os.environ.get("FAKE_RIGHT", "{}")), experiment.training.learning_rate
    right = told.get(f"{step} {rate:g}", told.get(str(step), 2 if step == 0 else 6))
    repeated = int(os.environ.get("FAKE_REPEATED", "1"))
    rows = [
        EvalRow(name, 0, "q", "a", "c", float(index < right), float(index < right), None, True, "stop", 3)
        for index in range(8)
        for name in [f"p{index}", *(f"p{index}-{copy}" for copy in range(1, repeated))]
    ]
    write_rows(rows, table)
    accuracy = right / 8
    return EvalReport(
        policy=policy,
        step=step,
        dataset_digest=dataset.digest,
        num_problems=len(rows),
        samples_per_problem=1,
        accuracy=accuracy,
        accuracy_low=accuracy - 0.1,
        accuracy_high=accuracy + 0.1,
        reward=accuracy,
        reward_low=accuracy - 0.1,
        reward_high=accuracy + 0.1,
        truncated=0.0,
        ungraded=0.0,
        table=str(table),
        seconds=0.1,
        at=time.time(),
    )


def _validate(spec: SegmentSpec, step: int) -> None:
    known = [record.report.step for record in read_records(spec.run_dir)]
    if spec.validation is None or spec.experiment.evaluation.every_steps is None or step in known:
        return
    note(spec.run_dir.parent.parent, f"validate {step}")
    table = record_folder(spec.run_dir, step) / TABLE
    report = _report(spec.experiment, step, spec.validation, str(spec.run_dir), table)
    suite = suite_digest(spec.experiment, spec.validation, spec.model)
    write_record(spec.run_dir, ValidationRecord(suite=suite, report=report))


def train(spec_path: Path) -> int:
    """As ``rlcore.jobs.segment.main``; ``tests/long/test_trainer_contract.py`` runs both."""
    spec = SegmentSpec.model_validate_json(spec_path.read_text())
    lease = Lease(spec.run_dir / "lease.json")
    lease.acquire(f"fake-{os.getpid()}")
    try:
        return _train(spec, lease)
    except (_Reported, HealthError, RollbackError) as error:
        report, code = (
            (error.report, error.code)
            if isinstance(error, _Reported)
            else (JobError(kind=type(error).__name__, message=str(error), traceback="t"), exit_code(error))
        )
        write_json_atomically(spec.run_dir / "trainer_error.json", report.model_dump_json())
        return code
    finally:
        lease.release()


def _train(spec: SegmentSpec, lease: Lease) -> int:
    store = LocalCheckpointStore(spec.run_dir, spec.run_id)
    start = find_resume_point(spec.run_dir, store)
    note(spec.run_dir.parent.parent, f"train from segment {start.segment}")
    note(spec.run_dir, spec.adjustments.model_dump_json())
    dump_on_signal(spec.run_dir / "stacks" / "live", "trainer", os.getpid())
    stop = StopRequest(lease, Control(spec.run_dir / "control.json"), spec.driver_deadline_seconds)
    # Like Ray's daemons: another session, deaf to SIGTERM.
    subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(120)"],
        start_new_session=True,
    )
    step, segment, first_step = start.step, start.segment, start.first_step
    journal = MetricJournal(spec.run_dir / "journal.jsonl")
    journal.cut(step)
    cut_records(spec.run_dir, step)
    config = spec.experiment
    health = HealthWatch(config.health, read_journal(spec.run_dir / "journal.jsonl"), spec.adjustments)

    def plateaued() -> bool:
        return has_plateaued(read_records(spec.run_dir), config.evaluation.patience)

    if step == 0:
        _validate(spec, 0)
    while step < config.training.steps and not (step == first_step and plateaued()):
        if not stop.wants(segment):
            return EXIT_PREEMPTED
        stop.begin_segment(config.segment.max_minutes)
        until = min(first_step + config.segment.steps, config.training.steps)
        pause = None
        while step < until and not pause and not stop():
            time.sleep(0 if (spec.run_dir / HURRY).exists() else STEP_SECONDS)
            step += 1
            _fail_once(spec, step)
            rate = config.training.learning_rate * spec.adjustments.learning_rate_factor(step)
            metrics = {
                "reward/mean": step / 10, "reward/accuracy": step / 10, "time/generate": 0.1, "time/step": 0.2,
                "optim/learning_rate": rate,
            }  # fmt: skip
            journal.step(step, metrics)
            health.step(step, metrics)
            pause = health.pause_or_raise() if step < config.training.steps else None
        complete = pause is None and (step == until or not stop.preempted())
        if complete and config.evaluation.is_due_at_segment_end(last=step == config.training.steps):
            _validate(spec, step)
        _commit(spec, store, step, SegmentEnd(segment, first_step, complete))
        if pause:
            raise HealthError(pause)
        if not complete:
            return EXIT_PREEMPTED
        segment, first_step = segment + 1, step
    return 0


def _fail_once(spec: SegmentSpec, step: int) -> None:
    """``FAKE_FAILURE`` at step 3: each kind once, but for those that never end; with ``FAKE_FAILURE_RATE`` only at this
    learning rate."""
    kind = os.environ.get("FAKE_FAILURE", "")
    if os.environ.get("FAKE_FAILURE_RATE", "") not in ("", f"{spec.experiment.training.learning_rate:g}"):
        return
    marker = spec.run_dir / "failed-once"
    if step != 3 or not kind or (kind in {"crash", "memory", "hang", "disk"} and marker.exists()):
        return
    marker.touch()
    if kind == "crash":
        sys.stderr.write("about to be killed\n")
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(600)
    if kind == "memory":
        sys.exit(EXIT_OUT_OF_MEMORY)
    if kind == "disk":
        raise _Reported(JobError(kind="StorageError", message="no space, 0 MiB free", traceback="t"), EXIT_STORAGE)
    raise _Reported(
        JobError(kind="DivergedError", message="gradients are nan", traceback="Traceback\nloop.py line 7"),
        EXIT_DIVERGED,
    )


class _Reported(Exception):
    """What the trainer leaves behind."""

    def __init__(self, report: JobError, code: int) -> None:
        self.report, self.code = report, code


def _commit(spec: SegmentSpec, store: LocalCheckpointStore, step: int, end: SegmentEnd) -> None:
    staging = store.stage(step)
    (staging / "weights").write_text(str(step))
    checkpoint = store.commit(
        staging,
        step=step,
        end=end,
        experiment_digest=spec.experiment.results_digest(),
        dataset_digest=spec.dataset.digest,
        model_digest=spec.model.digest,
        trainer_state={"step": step},
    )
    # a step that was committed by a pause can end its segment later, and its checkpoint is not written again
    ended = {"segment": end.segment, "first_step": end.first_step, "complete": end.complete}
    manifest = segment_manifest(checkpoint, read_manifest(checkpoint)).model_copy(update=ended)
    write_json_atomically(segment_path(spec.run_dir, end.segment), manifest.model_dump_json())


def main() -> None:
    module, *rest = sys.argv[2:]
    if module == "rlcore.jobs.segment":
        sys.exit(train(Path(rest[0])))
    run, spec_type = {
        "rlcore.jobs.prepare": (prepare, PrepareSpec),
        "rlcore.jobs.resize": (resize, ResizeSpec),
        "rlcore.jobs.duplicates": (duplicates, DuplicatesSpec),
        "rlcore.jobs.bootstrap": (bootstrap, BootstrapSpec),
        "rlcore.jobs.check_model": (check_model, CheckModelSpec),
        "rlcore.jobs.evaluate": (evaluate, EvaluateSpec),
        "rlcore.jobs.merge": (merge, MergeSpec),
    }[module]
    sys.argv = [module, *rest]
    job_main(run, spec_type)


if __name__ == "__main__":
    main()
