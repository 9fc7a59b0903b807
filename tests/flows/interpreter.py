"""The trainer's interpreter of the flow tests: a script that answers like rlcore's modules."""

from __future__ import annotations

import sys
from pathlib import Path

FAKE = Path(__file__).with_name("fake_interpreter.py")


def fake_interpreter(folder: Path) -> Path:
    """Write the script to ``folder`` and return it."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "$@"\n')
    script.chmod(0o755)
    return script
