"""The metric journal: one JSON line per optimizer step, durable before the next step starts. No torch.

MLflow gets a copy of the journal. A line is ``{"step", "timestamp_ms", "metrics"}``. The timestamp is fixed when the
step is recorded, so publishing a line twice gives the same point. Non-finite values are written as NaN, Infinity and
-Infinity, which Python's json reads.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import StorageError
from rlcore.files import write_json_atomically

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The metrics of one optimizer step."""

    step: int
    timestamp_ms: int  # since the epoch
    metrics: Mapping[str, float]

    def line(self) -> str:
        record = {"step": self.step, "timestamp_ms": self.timestamp_ms, "metrics": dict(self.metrics)}
        return json.dumps(record, separators=(",", ":")) + "\n"


@dataclass(slots=True)
class CheckpointSeconds:
    """Time that checkpoints took since the last ``take``."""

    blocked: float = 0.0  # training waited
    written: float = 0.0  # in the background, from the copy to the segment's manifest

    def take(self) -> dict[str, float]:
        seconds = {"time/checkpoint_blocked": self.blocked, "time/checkpoint_written": self.written}
        self.blocked = self.written = 0.0
        return seconds


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class MetricJournal:
    """Writes a journal (a ``MetricSink``). Only the holder of the lease may write."""

    def __init__(self, path: Path, *, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        self._path = path
        self._now_ms = now_ms
        records, self._torn = _parse(path)
        self.last_step = records[-1].step if records else None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of ``step``. They are on disk when this returns.

        Raises:
            StorageError: ``step`` is not above the last step, or the last line is half-written and needs ``cut``.
        """
        if self._torn:
            raise StorageError(f"{self._path} ends in a half-written line. Call cut(step) before recording again.")
        if self.last_step is not None and step <= self.last_step:
            raise StorageError(
                f"{self._path} already holds step {self.last_step}, so step {step} cannot be recorded. "
                "Steps must increase; after a resume call cut(step of the checkpoint) first."
            )
        record = StepRecord(step, self._now_ms(), {name: float(value) for name, value in metrics.items()})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(record.line())
            file.flush()
            os.fsync(file.fileno())
        self.last_step = step

    def cut(self, step: int) -> int:
        """Keep records up to and including ``step``. Move the rest, torn line included, to ``journal.cut-<n>.jsonl``,
        which is on disk before the journal shrinks. Returns the number of whole records moved.
        """
        records, torn = _parse(self._path)
        kept = [record for record in records if record.step <= step]
        moved = records[len(kept) :]
        if moved or torn:
            aside = _next_cut(self._path)
            write_json_atomically(aside, "".join(record.line() for record in moved) + torn)
            write_json_atomically(self._path, "".join(record.line() for record in kept))
            logger.warning("%s: cut to step %d, %d records moved to %s", self._path, step, len(moved), aside.name)
        self._torn = ""
        self.last_step = kept[-1].step if kept else None
        if step > 0 and self.last_step != step:
            logger.warning("%s ends at step %s, the checkpoint is at step %d", self._path, self.last_step, step)
        return len(moved)


class JournalTail:
    """Reads a journal that another process writes. Each call parses only the lines added since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._forget()

    def read(self) -> list[StepRecord]:
        """All records, in order; empty if there is no file yet.

        Raises:
            StorageError: a line is damaged. An unfinished last line is left out instead: its writer may be at work.
        """
        with self._lock:
            try:
                appended = self._appended()
            except FileNotFoundError:
                self._forget()
                return []
            *lines, _torn = appended.split(b"\n")
            self._records += _parse_lines(self._path, lines, self._records)
            if lines:
                self._end += len(appended) - len(_torn)
                self._last = lines[-1] + b"\n"
            return list(self._records)

    def _appended(self) -> bytes:
        with self._path.open("rb") as file:
            file.seek(self._end - len(self._last))
            # After a resume has cut the journal, the steps have new timestamps, so this last line differs.
            if file.read(len(self._last)) != self._last:
                self._forget()
                file.seek(0)
            return file.read()

    def _forget(self) -> None:
        self._records: list[StepRecord] = []
        self._end = 0  # bytes parsed
        self._last = b""  # the line that ends there


def read_journal(path: Path) -> list[StepRecord]:
    """All records of a journal."""
    return JournalTail(path).read()


def _parse(path: Path) -> tuple[list[StepRecord], str]:
    """Whole records, and the text of an unfinished last line."""
    if not path.exists():
        return [], ""
    *lines, torn = path.read_bytes().split(b"\n")
    return _parse_lines(path, lines, []), torn.decode(errors="backslashreplace")


def _parse_lines(path: Path, lines: Sequence[bytes], before: Sequence[StepRecord]) -> list[StepRecord]:
    """Parse ``lines``, which follow the records ``before``."""
    records: list[StepRecord] = []
    last = before[-1].step if before else None
    for number, raw in enumerate(lines, start=len(before) + 1):
        line = raw.decode(errors="backslashreplace")  # a damaged line may hold any bytes
        try:
            record = parse_record(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(
                f"{path} line {number} is damaged ({type(error).__name__}: {error}): found "
                f"{line[:80]!r}, expected a step record. Restore the file, or cut it before that "
                "line and resume from an older checkpoint."
            ) from None
        if last is not None and record.step <= last:
            raise StorageError(
                f"{path} line {number} holds step {record.step} after step {last}; steps must "
                "increase. Two trainers may have written: restore the file, or cut it before that line."
            )
        records.append(record)
        last = record.step
    return records


def parse_record(line: str) -> StepRecord:
    """One line of a journal.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is damaged.
    """
    tree = json.loads(line)
    metrics = {str(name): float(value) for name, value in tree["metrics"].items()}
    return StepRecord(int(tree["step"]), int(tree["timestamp_ms"]), metrics)


def _next_cut(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}.cut-{number}.jsonl")).exists():
        number += 1
    return aside
