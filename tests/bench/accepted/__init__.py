"""The figures that docs/performance.md shows and that ``make bench`` compares with: one JSON file for each record."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@cache
def record(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())
