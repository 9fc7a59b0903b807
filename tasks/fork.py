"""A run that starts from a committed checkpoint of another run (its trunk), with the trunk's steps up to there.

The seeds of a step depend on the experiment's seed and the step alone. So a fork that changes nothing goes on as the
trunk did, bit for bit, and forks with different settings train on the same problems with the same random numbers.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from infra.settings import Settings
from rlcore.errors import CheckpointError, ConfigError
from rlcore.evaluation.records import read_records, record_folder
from rlcore.files import VERDICTS, write_json_atomically
from rlcore.segment.journal import read_journal
from rlcore.segment.resume import read_segments
from rlcore.segment.spec import segment_path
from rlcore.segment.store import MANIFEST, LocalCheckpointStore, checkpoint_name, checkpoint_ref, verify_checkpoint
from tasks.driver.failures import ADJUSTMENTS
from tasks.lineage import origins_dir
from tasks.run import FORK, Fork, Run, check_run_id, existing_run, read_fork
from tasks.store.restore import restore_run

_COPIED = ("origins.jsonl", "changes.jsonl", ADJUSTMENTS)
_OF_STEPS = ("trained", "samples")  # folders with one file per rollout batch: step-000020.json


def fork_run(trunk: Run, step: int | None, run_id: str, settings: Settings) -> Run:
    """Make the folder of a run that continues from the trunk's checkpoint of ``step``; None: from its newest one. If
    there is such a fork already, return it as it is.

    The trunk may be training meanwhile. The checkpoint's files are hard links, where the file system has them, so they
    take no space as long as the trunk keeps them. The folder appears whole or not at all.

    Raises:
        ConfigError: the run called ``run_id`` is not a fork of the trunk, or starts from another step.
        CheckpointError: the trunk has no whole checkpoint of this step on this machine; lists those that it has.
    """
    folder = settings.runs_dir / check_run_id(run_id)
    restore_run(run_id, settings)
    if folder.exists():
        return _existing(trunk, step, run_id)
    source = checkpoint_at(trunk, step)
    made = folder.with_name(f".fork-{run_id}")
    shutil.rmtree(made, ignore_errors=True)  # of a killed attempt
    fork = Run(run_id=run_id, run_dir=made, experiment=trunk.experiment)
    try:
        _copy_checkpoint(trunk, source, fork, folder)
        _copy_steps(trunk, fork, int(source.name.removeprefix("step-")))
        write_json_atomically(made / "experiment.json", trunk.experiment.model_dump_json(indent=1))
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return fork.model_copy(update={"run_dir": folder})


def _existing(trunk: Run, step: int | None, run_id: str) -> Run:
    run = existing_run(run_id, Settings())
    origin = read_fork(run)
    if origin is None or origin.run_id != trunk.run_id or step not in (None, origin.step):
        what = "it is no fork" if origin is None else f"it is forked from {origin}"
        raise ConfigError(f"there is a run {run_id!r} already, and {what}. Name the new run otherwise, with --run-id.")
    return run


def checkpoint_at(trunk: Run, step: int | None) -> Path:
    """The folder of the trunk's checkpoint of ``step``; None: of its newest one.

    Raises:
        CheckpointError: it is not on this machine; lists those that are.
    """
    there = {int(path.name.removeprefix("step-")): path
             for path in LocalCheckpointStore(trunk.run_dir, trunk.run_id).newest_first()}  # fmt: skip
    if not there or step not in (None, *there):
        wanted = "whole checkpoint" if step is None else f"checkpoint of step {step}"
        found = ", ".join(map(str, sorted(there))) or "none"
        raise CheckpointError(
            f"run {trunk.run_id} has no {wanted} on this machine. Found: {found}. Choose one of these. "
            "segment.keep_every and keep_best keep more of them."
        )
    return there[max(there) if step is None else step]


def _copy_checkpoint(trunk: Run, source: Path, fork: Run, folder: Path) -> None:
    """Link the checkpoint, whose manifest then names the fork, and write the manifests of its segments.

    Args:
        folder: the fork's final folder, which the segments' manifests name.
    """
    copy = fork.run_dir / "checkpoints" / source.name
    try:
        shutil.copytree(source, copy, copy_function=_link_or_copy)
    except (FileNotFoundError, shutil.Error) as error:
        raise CheckpointError(f"{source} was removed while it was copied. Fork from a later step.") from error
    written = verify_checkpoint(copy)
    LocalCheckpointStore(trunk.run_dir, trunk.run_id).require_run(source, written.run_id)
    named = written.model_copy(update={"run_id": fork.run_id})
    write_json_atomically(copy / MANIFEST, named.model_dump_json(indent=1))  # a new file: the trunk's stays as it is
    made = checkpoint_ref(copy, named).model_copy(update={"path": str(folder / "checkpoints" / copy.name)})
    for segment in read_segments(trunk.run_dir):
        if segment.last_step <= written.step:
            last = segment.last_step == written.step
            older = {"path": str(folder / "checkpoints" / checkpoint_name(segment.last_step)), "run_id": fork.run_id}
            checkpoint = made if last else segment.checkpoint.model_copy(update=older)
            mine = segment.model_copy(update={"run_id": fork.run_id, "checkpoint": checkpoint})
            write_json_atomically(segment_path(fork.run_dir, segment.segment), mine.model_dump_json(indent=1))
    tracked = trunk.run_dir / "mlflow.json"
    origin = Fork(
        run_id=trunk.run_id,
        step=written.step,
        manifest_sha256=checkpoint_ref(source, written).manifest_sha256,
        mlflow_run_id=json.loads(tracked.read_text())["mlflow_run_id"] if tracked.exists() else None,
    )
    write_json_atomically(fork.run_dir / FORK, origin.model_dump_json(indent=1))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _copy_steps(trunk: Run, fork: Run, step: int) -> None:
    """Copy what the trunk recorded of its steps up to ``step``."""
    for name in _COPIED:
        if (trunk.run_dir / name).exists():
            shutil.copy2(trunk.run_dir / name, fork.run_dir / name)
    if origins_dir(trunk.run_dir).exists():
        shutil.copytree(origins_dir(trunk.run_dir), origins_dir(fork.run_dir))
    if (trunk.run_dir / VERDICTS).exists():  # all of them: a judge may answer differently the second time
        shutil.copytree(trunk.run_dir / VERDICTS, fork.run_dir / VERDICTS)
    for folder in _OF_STEPS:
        (fork.run_dir / folder).mkdir()
        for path in (trunk.run_dir / folder).glob("step-*.json"):
            if int(path.stem.removeprefix("step-")) <= step:
                shutil.copy2(path, fork.run_dir / folder / path.name)
    for record in read_records(trunk.run_dir):
        if record.report.step <= step:
            evaluated = record_folder(trunk.run_dir, record.report.step)
            shutil.copytree(evaluated, record_folder(fork.run_dir, record.report.step))
    records = [record for record in read_journal(trunk.run_dir / "journal.jsonl") if record.step <= step]
    write_json_atomically(fork.run_dir / "journal.jsonl", "".join(record.line() for record in records))
