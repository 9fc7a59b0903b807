"""The seconds that each file of tests takes, so that the longest ones start first and no process waits at the end.

``python -m tests.durations`` records those of the last ``make test-all`` and ``make test-stacks``.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
_WORTH_RECORDING = 5.0  # seconds: where a shorter file comes makes no difference


def recorded() -> dict[str, float]:
    seconds: dict[str, float] = json.loads(RECORD.read_text())
    return seconds


def seconds_by_file(reports: Iterable[Path]) -> dict[str, float]:
    """Set-up, call and tear-down of a file's tests, from JUnit reports; the longest first. Of a file that is in several
    reports, its longest time."""
    longest: Counter[str] = Counter()
    for report in reports:
        seconds: Counter[str] = Counter()
        for case in ET.parse(report).iter("testcase"):
            name = f"{case.attrib['classname'].replace('.', '/')}.py"
            seconds[name] += float(case.get("time", 0))  # a test that was interrupted has no time
        longest |= seconds  # the larger one of each
    return {name: round(value) for name, value in longest.most_common() if value >= _WORTH_RECORDING}


def main() -> None:
    reports = sorted(set((ROOT / "build").glob("test*.xml")) - {ROOT / "build" / "test-clusters.xml"})
    if not reports:
        sys.exit("no report in build/: run make test-all first")
    RECORD.write_text(json.dumps(seconds_by_file(reports), indent=1) + "\n")


if __name__ == "__main__":
    main()
