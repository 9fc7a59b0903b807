"""Kill everything, at random, and show that nothing is lost: ``python -m tests.chaos`` (make chaos).

One undisturbed run of the text demo, and the same run with its processes killed by SIGKILL, a full and a read-only
checkpoint disk, and checkpoints damaged in five ways. Recovery is what a user has: Prefect's retries, and the command
again with --run-id where the command itself was killed. Prints a table, and last one line of JSON; ends with 1 if the
weights differ, MLflow lacks or repeats a step, or anything is left behind.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from pathlib import Path

from tests.chaos.faults import DAMAGES
from tests.chaos.harness import TRAINING, WHOLE, Chaos, losses, markdown, undisturbed

_STEPS_PER_DISTURBANCE = 10  # each after a commit; without its head Ray lets a run go on for some seconds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--no-faults", action="store_true", help="kills alone: no full disk, no damage")
    parser.add_argument("--training-only", action="store_true", help="neither evaluate nor merge")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("data/chaos"))
    parser.add_argument("--docs", type=Path, help="page to write the table of what is lost into")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is taken down
    started = time.monotonic()
    out = options.out.absolute()
    steps = _STEPS_PER_DISTURBANCE * (options.kills + (0 if options.no_faults else 2 + len(DAMAGES)) + 1)
    settings = [f"resources.workers={options.workers}", f"training.steps={steps}"]

    expected = undisturbed(out / "undisturbed", [*settings, f"segment.steps={steps}"])
    module = TRAINING if options.training_only else WHOLE
    chaos = Chaos(out / "killed", settings, random.Random(options.seed), out / "undisturbed" / "models", module)
    with chaos:
        chaos.kill_all(options.kills)
        if not options.no_faults:
            chaos.fill_and_damage()
        chaos.finish()
    found = chaos.weights()
    report = {
        "kills": sum(row.kill for row in chaos.rows),
        "recovered": sum(row.recovered for row in chaos.rows),
        "weights_equal": found == expected,
        "missing_steps": len(chaos.missing_steps()),
        "duplicate_steps": len(chaos.duplicate_steps()),
        "orphans": len(chaos.orphans()) + len(chaos.stray_files()),
        "wall_seconds": round(time.monotonic() - started),
    }
    if options.docs is not None:
        write_between_marks(options.docs, losses(chaos.rows) + f"\n`{json.dumps(report)}`\n")
    text = markdown(chaos.rows)
    (out / "table.md").write_text(text)
    sys.stdout.write(f"{text}\n")
    for name, left in (("orphans", chaos.orphans()), ("stray files", chaos.stray_files())):
        if left:
            sys.stdout.write(f"{name}: {left}\n")
    sys.stdout.write(json.dumps(report) + "\n")
    unharmed = report["weights_equal"] and not any(
        report[key] for key in ("missing_steps", "duplicate_steps", "orphans")
    )
    return int(not unharmed or report["recovered"] < len(chaos.rows))


def write_between_marks(page: Path, text: str) -> None:
    before, rest = page.read_text().split("<!-- chaos -->\n")
    _, after = rest.split("<!-- /chaos -->")
    page.write_text(f"{before}<!-- chaos -->\n{text}<!-- /chaos -->{after}")


if __name__ == "__main__":
    sys.exit(main())
