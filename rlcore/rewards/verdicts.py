"""The verdict journal: what a judge said, durable before it is used, and replayed on resume.

A judge may answer the same question differently the second time. So each verdict is on disk before it becomes a reward,
and a completion that the run has seen before keeps its verdict. The journal is a folder of numbered files with one JSON
line per verdict. Each process that adds verdicts begins a new file, so nothing is appended to a line that a killed
process left unfinished. Only the holder of the run's lease may add verdicts.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from rlcore.errors import StorageError
from rlcore.files import fsync

logger = logging.getLogger(__name__)

FILE_BYTES = 4 << 20  # a mirror sends whole files again, so they stay small


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one completion, and what it cost."""

    key: str  # hash of everything that the judge was asked; empty: calls that led to no verdict
    score: float | None  # in [0, 1]; None: the judge gave none, and the completion is ungraded
    reason: str
    problem_id: str
    calls: int  # that the judge answered, repeated ones included
    tokens: int  # of these calls, as the judge reports them
    timestamp_ms: int  # since the epoch

    def line(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"


class VerdictJournal:
    """Reads the verdicts of a folder, and adds more."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            StorageError: a line is damaged.
        """
        self._folder = folder
        self._file: BinaryIO | None = None
        self._bytes = 0  # in the file
        self.known: dict[str, Verdict] = {}
        self.calls = self.tokens = 0  # of all verdicts
        for path in sorted(folder.glob("*.jsonl")):
            for verdict in _read(path):
                self._add(verdict)

    def append(self, verdicts: Sequence[Verdict]) -> None:
        """Add verdicts. They are on disk when this returns, and only then are they ``known``.

        Raises:
            OSError: they could not be written.
        """
        try:
            file = self._open()
            self._bytes += file.write(b"".join(verdict.line() for verdict in verdicts))
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            self.close()  # its last line may be unfinished
            raise
        if self._bytes >= FILE_BYTES:
            self.close()
        for verdict in verdicts:
            self._add(verdict)

    def close(self) -> None:
        """The next verdict begins a new file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            number = 1 + max((int(path.stem) for path in self._folder.glob("*.jsonl")), default=0)
            self._file, self._bytes = (self._folder / f"{number:06d}.jsonl").open("xb"), 0
            fsync(self._folder)
        return self._file

    def _add(self, verdict: Verdict) -> None:
        self.calls += verdict.calls
        self.tokens += verdict.tokens
        if verdict.key:
            # The last one counts: an earlier one with the same key can only come from a trainer that had lost the run.
            self.known[verdict.key] = verdict


def _read(path: Path) -> list[Verdict]:
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        logger.warning("%s ends in an unfinished line, whose verdict was never used", path)
    verdicts = []
    for number, line in enumerate(lines, start=1):
        try:
            verdicts.append(Verdict(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"{path} line {number} is damaged ({type(error).__name__}: {error}): found {line[:80]!r}, expected a "
                "verdict. Restore the file. Without that line the judge is asked again, and may answer differently."
            ) from None
    return verdicts
