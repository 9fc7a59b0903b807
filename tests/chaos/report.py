"""What became of each disturbance, and whether the whole may be called unharmed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

COMMAND = "flow run"


@dataclass(frozen=True, slots=True)
class Row:
    """One disturbance."""

    leg: str
    victim: str
    moment: str
    kill: bool  # by SIGKILL; else a fault of the disk
    recovered: bool
    seconds: float  # to the next new step, the next process of its kind, or the end of the run
    replayed: int  # steps taken again

    def __str__(self) -> str:
        end = f"{self.seconds:.1f}" if self.recovered else "never"
        return f"| {self.leg} | {self.victim} | {self.moment} | {end} | {self.replayed} |"


@dataclass(frozen=True, slots=True)
class DroppedFault:
    fault: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """The last line's JSON."""

    seed: int
    legs: list[str]
    kills: int
    by_victim: dict[str, int]  # "victim: moment" -> times that it was hit at that moment
    missed: list[str]  # planned and never hit, with the leg
    recovered: int  # of all disturbances
    disturbances: int
    retyped: int  # times that the command was typed again
    weights_equal: bool
    metrics_equal: bool  # all but times and rates, in the journal and at MLflow
    missing_steps: int
    duplicate_steps: int
    orphans: int  # processes and files that were left
    dropped_faults: list[DroppedFault]
    wall_seconds: int

    def json(self) -> dict[str, object]:
        return asdict(self)


def hits(rows: Iterable[Row]) -> dict[str, int]:
    return dict(Counter(f"{row.victim}: {row.moment}" for row in rows))


def faults_of(report: Report) -> list[str]:
    """Why the run was harmed, or proves nothing; empty if all is well."""
    typed = sum(times for victim, times in report.by_victim.items() if victim.startswith(f"{COMMAND}: "))
    checks = (
        (bool(report.missed), f"never hit: {', '.join(report.missed)}"),
        (
            report.recovered < report.disturbances,
            f"{report.disturbances - report.recovered} of {report.disturbances} disturbances were not recovered from",
        ),
        (
            report.retyped != typed,
            f"the command was typed again {report.retyped} times and killed {typed} times: Prefect's retries should do",
        ),
        (not report.weights_equal, "the weights are not those of the undisturbed run"),
        (not report.metrics_equal, "the metrics are not those of the undisturbed run"),
        (report.missing_steps > 0, f"{report.missing_steps} steps are missing in the journal or at MLflow"),
        (report.duplicate_steps > 0, f"{report.duplicate_steps} steps are there more than once"),
        (report.orphans > 0, f"{report.orphans} processes or files were left behind"),
    )
    return [text for failed, text in checks if failed]


def markdown(rows: Iterable[Row]) -> str:
    head = "| leg | victim | moment | seconds until it came back | steps replayed |\n| --- | --- | --- | --- | --- |"
    return "\n".join([head, *map(str, rows)]) + "\n"


def losses(rows: list[Row]) -> str:
    """What was lost with each victim: the rows of one victim and moment in one line."""
    lines = [
        "| what dies | when | times | came back | seconds until then: median (most) | steps repeated: most |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for victim, moment in dict.fromkeys((row.victim, row.moment) for row in rows):
        same = [row for row in rows if (row.victim, row.moment) == (victim, moment)]
        seconds = [row.seconds for row in same]
        lines.append(
            f"| {victim} | {moment} | {len(same)} | {sum(row.recovered for row in same)} | "
            f"{statistics.median(seconds):.0f} ({max(seconds):.0f}) | {max(row.replayed for row in same)} |"
        )
    return "\n".join(lines) + "\n"
