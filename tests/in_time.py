"""The files of tests/long that fit into a limited time.

``python -m tests.in_time --minutes 50 --jobs 3`` prints them, and says on stderr which files are left out. It expects
``build/test.xml``, the report of ``make test`` on this machine, which tells how fast the machine is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.durations import ROOT, recorded, seconds_by_file

_REPORT = ROOT / "build" / "test.xml"
_UNRECORDED = 5.0  # seconds: tests/durations.json leaves out what takes less
_IDLE = 1.15  # processes wait for the last file, and each starts Python


def slowness(measured: Mapping[str, float], record: Mapping[str, float]) -> float:
    """Seconds here divided by seconds on record, over the files in both. Raises ValueError where there are none."""
    both = measured.keys() & record.keys()
    if not both:
        message = "the report and tests/durations.json have no file in common: run make test first"
        raise ValueError(message)
    return sum(measured[name] for name in both) / sum(record[name] for name in both)


def fitting(files: Sequence[str], seconds: Mapping[str, float], available: float, first: int) -> list[str]:
    """Goes through ``files`` once, from number ``first`` on, and takes each file that still fits.

    ``seconds``: what a file takes. ``available``: seconds for all files, one after another.
    """
    taken = []
    start = first % len(files)
    for name in [*files[start:], *files[:start]]:
        if (needed := seconds.get(name, _UNRECORDED)) <= available:
            taken.append(name)
            available -= needed
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, required=True, help="how long the tests may take")
    parser.add_argument("--jobs", type=int, required=True, help="files that run at the same time")
    arguments = parser.parse_args()
    if not _REPORT.exists():
        sys.exit(f"found no {_REPORT.relative_to(ROOT)}, which tells how fast this machine is: run make test first")
    files, record = _files(), recorded()
    factor = slowness(seconds_by_file([_REPORT]), record)
    available = arguments.minutes * 60 * arguments.jobs / (factor * _IDLE)  # in seconds of the record
    # Commits begin at different files, so that no file is left out for long.
    first = int(_printed("git", "rev-parse", "HEAD"), base=16)
    taken = fitting(files, record, available, first)
    left_out = [name for name in files if name not in taken]
    sys.stderr.write(
        f"This machine takes {factor:.1f} times as long as tests/durations.json says. "
        f"In {arguments.minutes:.0f} minutes it can run {len(taken)} of the {len(files)} files of tests/long.\n"
    )
    sys.stderr.writelines(f"NOT RUN, no time left: {name}\n" for name in left_out)
    sys.stdout.write(" ".join(taken) + "\n")


def _files() -> list[str]:
    """Those with a test that ``make test-all`` runs."""
    listing = _printed(sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not clusters", "tests/long")
    return sorted({line.partition("::")[0] for line in listing.splitlines() if "::" in line})


def _printed(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
