"""``python -m infra.tracking.sinks BATCH.json``: one batch of committed steps into one tracker.

Runs in the interpreter ``RLFLOW_TRACKER_PYTHON``, which needs only this file, ``infra/files.py`` and the tracker's
package. Each step shows once, even if a batch is sent twice or its process is killed: the state file and the means of
each tracker (see the sinks) take care of that.
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from infra.files import locked, write_atomically

_MILLI = 1000.0
_SWANLAB_ID_CHARACTERS = 20


@dataclass(frozen=True, slots=True)
class Batch:
    """What ``BATCH.json`` holds."""

    tracker: str
    project: str
    run_id: str
    config: dict[str, str | int | float | bool | None]  # dotted keys of the experiment
    folder: str  # for the tracker's own files
    state: str  # file with the last accepted step; only the tracker's process writes it
    seconds: int
    records: list[tuple[int, int, dict[str, float]]]  # step, milliseconds since the epoch, metrics


class Sink(Protocol):
    """A ``MetricSink`` that also takes timestamps. Steps are only certain to be stored after ``close``."""

    def step(self, step: int, metrics: Mapping[str, float], timestamp_ms: int | None = None) -> None: ...
    def close(self) -> None: ...


class TensorBoardSink:
    """One event file per batch. It first discards what a killed process may have written from ``first_step`` on
    (TensorBoard's purge_step)."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))
        log = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=log))

    def step(self, step: int, metrics: Mapping[str, float], timestamp_ms: int | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        at = time.time() if timestamp_ms is None else timestamp_ms / _MILLI
        self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One W&B run with the id of the rlflow run, resumed by every batch. Skips the steps that W&B reports as stored."""

    def __init__(self, batch: Batch) -> None:
        import wandb

        # A git remote may hold a password. Machine and code are in MLflow, and this process does not train.
        quiet: dict[str, Any] = {
            "silent": True, "console": "off", "x_disable_meta": True, "x_disable_stats": True,
            "save_code": False, "disable_git": True,
        }  # fmt: skip
        self._run = wandb.init(
            project=batch.project, id=batch.run_id, name=batch.run_id, resume="allow", dir=batch.folder,
            config=batch.config, settings=wandb.Settings(**quiet),
        )  # fmt: skip

    def step(self, step: int, metrics: Mapping[str, float], timestamp_ms: int | None = None) -> None:
        if step < self._run.starting_step:
            return
        at = {} if timestamp_ms is None else {"_timestamp": timestamp_ms / _MILLI}
        self._run.log({**metrics, **at}, step=step)

    def close(self) -> None:
        self._run.finish()  # returns when W&B, or its offline file, has everything


class SwanLabSink:
    """One experiment with an id derived from the run's id, resumed by every batch. SwanLab ignores steps it has."""

    def __init__(self, batch: Batch) -> None:
        import swanlab

        self._swanlab = swanlab
        name = hashlib.sha256(batch.run_id.encode()).hexdigest()[:_SWANLAB_ID_CHARACTERS]
        off = dict.fromkeys(("hardware", "runtime", "requirements", "git", "monitor"), False)  # as above
        swanlab.init(
            project=batch.project, name=batch.run_id, id=name, resume="allow", log_dir=batch.folder,
            config=batch.config, settings=swanlab.Settings(probe=off, console={"proxy_type": "none"}),
        )  # fmt: skip

    def step(self, step: int, metrics: Mapping[str, float], timestamp_ms: int | None = None) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


def open_sink(batch: Batch, first_step: int) -> Sink:
    """
    Raises:
        ImportError: the tracker's package is not installed here.
        ValueError: no such tracker.
    """
    match batch.tracker:
        case "tensorboard":
            return TensorBoardSink(Path(batch.folder), first_step)
        case "wandb":
            return WandbSink(batch)
        case "swanlab":
            return SwanLabSink(batch)
    raise ValueError(f"tracker {batch.tracker!r}: allowed are tensorboard, wandb, swanlab.")


def read_published(state: Path) -> int:
    """The last step that a tracker has accepted; 0: none, not even an evaluation before step 1.

    A damaged file counts as 0, because resent steps show once.
    """
    try:
        return int(json.loads(state.read_bytes())["published_step"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        logging.getLogger(__name__).warning("%s is damaged (%r): every step is sent to the tracker again", state, error)
        return 0


def send(path: Path) -> int:
    """Send the batch in ``path`` and store its last step. Processes for the same tracker take turns.

    Returns:
        the number of steps sent.
    """
    batch = Batch(**json.loads(path.read_text()))
    state = Path(batch.state)
    signal.alarm(batch.seconds)  # ends this process even if the tracker's client hangs
    with locked(state.with_suffix(".lock")):
        published = read_published(state)
        fresh = [record for record in batch.records if record[0] > published or not published]
        if not fresh:
            return 0
        sink = open_sink(batch, fresh[0][0])
        for step, timestamp_ms, metrics in fresh:
            sink.step(step, metrics, timestamp_ms)
        sink.close()
        write_atomically(state, json.dumps({"published_step": fresh[-1][0]}))
    return len(fresh)


def _check(name: str, lowest: str) -> int:
    """Print the installed version. Returns 1 if there is none or it is below ``lowest``."""
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        sys.stdout.write(f"no {name}\n")
        return 1
    sys.stdout.write(f"{name} {found}\n")
    numbers = [[int(part) for part in text.split(".")[:2]] for text in (found, lowest)]
    return int(numbers[0] < numbers[1])


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        sys.exit(_check(*sys.argv[2:]))
    send(Path(sys.argv[1]))
