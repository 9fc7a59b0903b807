"""The report of ``clean``: a table by kind and reason, or JSON with every item."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path

from tasks.clean.decide import DAY_SECONDS, Kind, Verdict

_HEAD = ("kind", "number", "size", "oldest", "what", "why")


@dataclass(frozen=True, slots=True)
class CleanReport:
    data_dir: Path
    older_than_days: float
    verdicts: tuple[Verdict, ...]
    chosen: tuple[Verdict, ...]  # what goes, or has gone
    used_bytes: int  # by the data folder, before
    quota_bytes: int | None
    left_bytes: int | None = None  # afterwards; None: nothing was removed, this is what would be
    notes: tuple[str, ...] = ()

    @property
    def acted(self) -> bool:
        return self.left_bytes is not None

    def summary(self) -> str:
        """What was or would be removed, and where the data folder stands against its quota."""
        number, size = len(self.chosen), human(sum(item.item.bytes for item in self.chosen))
        if self.left_bytes is None:
            said, holds = f"{number} items of {size} would go", self.used_bytes
        else:
            said = f"{number} items went, {human(max(self.used_bytes - self.left_bytes, 0))} are free again"
            holds = self.left_bytes
        return f"{said}. {self.data_dir} holds {human(holds)}{self._against_quota(holds)}."

    def _against_quota(self, holds: int) -> str:
        if self.quota_bytes is None:
            return " and has no quota (RLFLOW_MAX_GIB)"
        above = holds - self.quota_bytes
        where = f"{human(abs(above))} {'above' if above > 0 else 'below'}"
        return f", {where} its quota of {human(self.quota_bytes)} (RLFLOW_MAX_GIB)"


@dataclass(frozen=True, slots=True)
class Row:
    """All items of one kind with the same fate for the same reason."""

    kind: Kind
    number: int
    bytes: int
    oldest_days: float
    fate: str
    reason: str

    def cells(self) -> dict[str, str]:
        values = (self.kind.value, str(self.number), human(self.bytes), f"{self.oldest_days:.1f} d", self.fate)
        return dict(zip(_HEAD, (*values, self.reason), strict=True))


def rows_of(report: CleanReport, now: float | None = None) -> list[Row]:
    """The rows of the table: kinds in their order, what goes first, then the largest."""
    known, at = {item.item for item in report.chosen}, time.time() if now is None else now
    groups: dict[tuple[Kind, str, str], list[Verdict]] = {}
    for verdict in report.verdicts:
        fate = _fate(report, verdict, verdict.item in known)
        groups.setdefault((verdict.item.kind, fate, verdict.reason), []).append(verdict)
    rows = [
        Row(
            kind, len(items), sum(item.item.bytes for item in items),
            max(0.0, at - min(item.item.used for item in items)) / DAY_SECONDS, fate, _reason(reason, items),
        )
        for (kind, fate, reason), items in groups.items()
    ]  # fmt: skip
    order = list(Kind)
    return sorted(rows, key=lambda row: (order.index(row.kind), row.fate.startswith("stays"), -row.bytes))


def text_of(report: CleanReport) -> str:
    """The table for a terminal, the notes and the summary."""
    cells = [_HEAD, *(tuple(row.cells().values()) for row in rows_of(report))]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD) - 1)]
    lines = [_line(row, widths) for row in cells] if report.verdicts else ["Nothing is there yet."]
    notes = [f"Note: {note}" for note in report.notes]
    hint = [] if report.acted or not report.chosen else ["Nothing was removed. Remove it with: rlflow clean --yes"]
    return "\n".join([*lines, "", *notes, report.summary(), *hint])


def json_of(report: CleanReport) -> str:
    """One JSON object with every item."""
    known, now = {item.item for item in report.chosen}, time.time()
    return dumps(
        {
            "data_dir": str(report.data_dir),
            "older_than_days": report.older_than_days,
            "acted": report.acted,
            "used_bytes": report.used_bytes,
            "left_bytes": report.left_bytes,
            "quota_bytes": report.quota_bytes,
            "notes": list(report.notes),
            "items": [
                {
                    "kind": verdict.item.kind.value,
                    "path": verdict.item.key,
                    "bytes": verdict.item.bytes,
                    "age_days": round((now - verdict.item.used) / DAY_SECONDS, 3),
                    "what": _fate(report, verdict, verdict.item in known),
                    "why": verdict.reason,
                    "by": verdict.by,
                }
                for verdict in report.verdicts
            ],
        }
    )


def human(size: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _fate(report: CleanReport, verdict: Verdict, chosen: bool) -> str:
    if chosen:
        return "removed" if report.acted else "goes"
    if verdict.removable:
        return "stays, could go"
    return "stays"


def _reason(reason: str, items: Sequence[Verdict]) -> str:
    """With the first few that it is about."""
    about = list(dict.fromkeys(item.by for item in items if item.by))
    more = f" and {len(about) - 2} more" if len(about) > 2 else ""
    return f"{reason} ({', '.join(about[:2])}{more})" if about else reason


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=True)), row[-1]])
