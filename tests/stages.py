"""What a flow did, second by second: its tasks, its trainers' phases, and the memory that each of them took."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import psutil

from rlcore.segment.journal import StepRecord, read_journal
from tests.bench.tables import markdown

_SAMPLE_SECONDS = 1.0
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Stage:
    """Began and ended in seconds since the epoch."""

    name: str
    began: float
    ended: float
    within: bool = False  # a part of the task above it

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """A stage with its peaks of memory. None: it was too short for a sample, or there is no GPU."""

    name: str
    within: bool
    began: float  # seconds since the first stage
    seconds: float
    processes_gib: float | None
    machine_gib: float | None
    gpu_gib: float | None


@dataclass(frozen=True, slots=True)
class MemorySample:
    """GiB at one moment."""

    at: float  # seconds since the epoch
    processes: float  # resident memory of this process's descendants; a shared page counts once for each of them
    machine: float  # used, without the page cache
    gpu: float | None  # of all visible GPUs; None: no GPU


@dataclass(slots=True)
class MemoryWatch:
    samples: list[MemorySample] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[MemoryWatch]:
        """Take a sample every second until the end of the block."""
        ended = threading.Event()

        def watch() -> None:
            while True:
                self.samples.append(_sample())
                if ended.wait(_SAMPLE_SECONDS):
                    return

        thread = threading.Thread(target=watch, name="memory", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()

    def measured(self, stages: Sequence[Stage]) -> list[MeasuredStage]:
        since = min(stage.began for stage in stages)
        return [
            MeasuredStage(
                name=stage.name,
                within=stage.within,
                began=round(stage.began - since, 2),
                seconds=round(stage.seconds, 2),
                processes_gib=self._peak(stage, lambda sample: sample.processes),
                machine_gib=self._peak(stage, lambda sample: sample.machine),
                gpu_gib=self._peak(stage, lambda sample: sample.gpu),
            )
            for stage in stages
        ]

    def _peak(self, stage: Stage, of: Callable[[MemorySample], float | None]) -> float | None:
        values = [of(sample) for sample in self.samples if stage.began <= sample.at <= stage.ended]
        return round(max(known), 2) if (known := [value for value in values if value is not None]) else None


def _sample() -> MemorySample:
    resident = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            resident += process.memory_info().rss
    return MemorySample(time.time(), resident / _GIB, psutil.virtual_memory().used / _GIB, _gpu_memory())


def _gpu_memory() -> float | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # nvidia-smi itself shows all
    query = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", *(["-i", visible] if visible else [])]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return None
    values = [float(word) for word in answer.stdout.split() if word.isdigit()]
    return sum(values) / 1024 if values else None


# ---- tasks and trainers --------------------------------------------------------------------------------------------


def task_stages(data_dir: Path) -> list[Stage]:
    """One stage for each task that has ended, from Prefect's own record."""
    query = "select name, state_name, start_time, end_time from task_run where end_time is not null order by start_time"
    stages = []
    for database in data_dir.rglob("prefect*.db"):
        with contextlib.closing(sqlite3.connect(database)) as connection:
            for name, state, began, ended in connection.execute(query):
                name = _RUN_NUMBER.sub("", name)
                label = name if state in ("Completed", "Cached") else f"{name} ({state})"
                stages.append(Stage(label, _utc(began), _utc(ended)))
    return stages


_RUN_NUMBER = re.compile(r"-[0-9a-f]{3}$")  # Prefect's, for tasks without a run name of their own


def _utc(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) INFO rlcore\.\S+: (.*)")
_HEADING = "=== trainer started "
_IMPORTED = re.compile(r"run \S+ from step \d+, code ")
_RAY = re.compile(r"Ray is ready$")
_WORKERS = re.compile(r"the workers are ready, (\d+\.\d) s after the last engine$")
_PARTS = re.compile(r"the slowest worker's start: (.*)$")
_PART = re.compile(r"([^,]+?) (\d+\.\d) s(?:, |$)")
_LOADED = re.compile(r"the workers have loaded the checkpoint of step (\d+)$")
_SYNCED = re.compile(r"the sampler has the weights of step (\d+)$")
_COMMITTED = re.compile(r"step (\d+) is committed, (\d+\.\d) s after its copy$")


@dataclass(frozen=True, slots=True)
class Trainer:
    """One trainer process of a run: when it was started, and what it logged."""

    started: float
    lines: Sequence[tuple[float, str]]

    def first(self, pattern: re.Pattern[str]) -> tuple[float, re.Match[str]] | None:
        matches = ((at, pattern.match(text)) for at, text in self.lines)
        return next(((at, match) for at, match in matches if match), None)

    def phases(self) -> list[Stage]:
        """From the start to the engine's first weights, without the phases that were not reached."""
        marks = [("", self.started)]
        if imported := self.first(_IMPORTED):
            marks.append(("imports", imported[0]))
        if ray := self.first(_RAY):
            marks.append(("Ray starts", ray[0]))
        if workers := self.first(_WORKERS):
            at, match = workers
            marks += [("worker and engine start", at - float(match[1])), ("policy is loaded", at)]
        if loaded := self.first(_LOADED):
            marks.append((f"checkpoint of step {loaded[1][1]} is loaded", loaded[0]))
        if synced := self.first(_SYNCED):
            marks.append(("first weights to the engine", synced[0]))
        return [Stage(name, began, ended, within=True) for (_, began), (name, ended) in pairwise(marks)]

    def parts(self) -> dict[str, float]:
        """Seconds of each part of the slowest worker's start."""
        found = self.first(_PARTS)
        return {} if found is None else {name: float(seconds) for name, seconds in _PART.findall(found[1][1])}

    def commits(self) -> list[Stage]:
        """Checkpoints, from the copy to the segment's manifest. Training goes on meanwhile."""
        found = [(at, match) for at, text in self.lines if (match := _COMMITTED.match(text))]
        return [
            Stage(f"checkpoint of step {match[1]} is written", at - float(match[2]), at, within=True)
            for at, match in found
        ]


def trainers(run_dir: Path, started: Sequence[float]) -> list[Trainer]:
    """The trainers of a run, from its log.

    Args:
        started: when each was started, in seconds since the epoch; the log tells whole seconds only.
    """
    logs = (run_dir / "trainer.log").read_text(errors="replace").split(_HEADING)[1:]
    found = []
    for log, begin in zip(logs, started, strict=True):
        matches = filter(None, map(_LINE.match, log.splitlines()))
        lines = [(_local(match[1]) + int(match[2]) / 1000, match[3]) for match in matches]
        found.append(Trainer(begin, lines))
    return found


def _local(text: str) -> float:
    return datetime.strptime(text, "%Y-%m-%d %H:%M:%S").timestamp()


def step_stages(records: Sequence[StepRecord], label: str = "") -> list[Stage]:
    return [
        Stage(f"step {r.step}{label}", r.timestamp_ms / 1000 - r.metrics["time/step"], r.timestamp_ms / 1000, True)
        for r in records
    ]


@dataclass(frozen=True, slots=True)
class Course:
    """How a run with one kill went."""

    stages: list[Stage]  # by their beginning
    seconds: dict[str, float]  # the main figures
    records: list[StepRecord]  # of the whole journal


def course_of(
    data_dir: Path, run_dir: Path, outside: Sequence[Stage], started: Sequence[float], killed: float
) -> Course:
    """
    Args:
        outside: stages before and after the flow's tasks.
        started: when each trainer was started.
        killed: when the first one was killed.
    """
    first, second = trainers(run_dir, started)
    records = read_journal(run_dir / "journal.jsonl")
    lost = [record for cut in run_dir.glob("journal.cut-*.jsonl") for record in read_journal(cut)]
    resumed = next(record for record in records if record.timestamp_ms / 1000 > killed)
    commits = [*first.commits(), *second.commits()]
    stages = [
        *outside,
        *task_stages(data_dir),
        *first.phases(),
        *second.phases(),
        *commits,
        *step_stages(records),
        *step_stages(lost, ", lost by the kill"),
        Stage("from the kill to the next trainer", killed, second.started, within=True),
    ]
    synced = first.first(_SYNCED)
    assert synced is not None, "the first trainer never synced its weights"
    ends = {stage.name: stage.ended - first.started for stage in first.phases()}
    seconds = {
        "start to engine ready": ends["worker and engine start"],
        "start to policy loaded": ends["policy is loaded"],
        "start to first weights in the engine": ends["first weights to the engine"],
        "start to first step done": records[0].timestamp_ms / 1000 - first.started,
        "step, median": statistics.median(record.metrics["time/step"] for record in records),
        "checkpoint commit, median": statistics.median(stage.seconds for stage in commits),
        f"kill to step {resumed.step} done again": resumed.timestamp_ms / 1000 - killed,
        f"the next trainer's start to step {resumed.step} done": resumed.timestamp_ms / 1000 - second.started,
        **{f"first start: {name}": value for name, value in first.parts().items()},
        **{f"next start: {name}": value for name, value in second.parts().items()},
    }
    return Course(sorted(stages, key=lambda stage: (stage.began, stage.within)), seconds, records)


def table(stages: Sequence[MeasuredStage]) -> str:
    """Markdown: a line for each stage, with the peaks of memory while it went on."""
    rows = [
        (
            f"&nbsp; {stage.name}" if stage.within else stage.name,
            f"{stage.seconds:.1f}",
            *(
                "" if peak is None else f"{peak:.1f}"
                for peak in (stage.processes_gib, stage.machine_gib, stage.gpu_gib)
            ),
        )
        for stage in stages
    ]
    return markdown(("stage", "seconds", "processes, GiB", "machine, GiB", "GPU, GiB"), rows)
