"""``python -m rlcore.segment run spec.json``: the trainer's process."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "run":
        sys.exit("usage: python -m rlcore.segment run SPEC.json")
    from rlcore.segment.run import main

    sys.exit(main(Path(sys.argv[2])))
