"""``python -m rlcore.jobs.segment spec.json``: the trainer's process."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m rlcore.jobs.segment SPEC.json")
    from rlcore.segment.run import main

    sys.exit(main(Path(sys.argv[1])))
