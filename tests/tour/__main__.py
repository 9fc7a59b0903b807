"""``make tour``: the whole platform, as its users meet it, from nothing to torn down; pictures of its pages.

Brings up the local stack in a folder of its own, runs grpo-geo3k-tiny by its deployment's bare name, then the scheduled
evaluation, then an ablation of four points with two seeds each; opens Prefect's and MLflow's pages in a headless
browser and saves what it sees under ``--pictures``; takes the stack down and looks whether anything is left.

Prints one JSON object, and exits with 1 where a step failed. Everything is real; only the runs are short.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from infra import processes
from infra.provenance import ROOT
from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.supervisor import mark_of
from infra.tracking.results import Results
from tests.ports import reserved_port
from tests.shell import new_shell
from tests.tour.pages import find_browser, take_pictures

SERVICES = ("supervisor", "gpu", "cpu", "mlflow", "prefect")
RUN = ["data.synthetic_problems=512", "evaluation.problems=64", "segment.steps=12"]
POINTS = [*RUN, "training.steps=6", "segment.steps=6", "training.problems_per_batch=16"]
GRID = ["training.learning_rate=[3e-4, 1e-3]", 'algorithm.advantage.name=["grpo", "rloo"]']


@dataclass(slots=True)
class Tour:
    """Where it takes place, and how long each part took."""

    settings: Settings
    env: Mapping[str, str]
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        sys.stderr.write(f"tour: {name}\n")
        start = time.monotonic()
        yield
        self.seconds[name] = round(time.monotonic() - start, 1)

    def stack(self, command: str) -> None:
        subprocess.run([sys.executable, "-m", "tasks.cli", command], env=self.env, cwd=ROOT, check=True)

    def deployment(self, name: str, **parameters: object) -> None:
        """As a person types it in the repository's root.

        Raises:
            subprocess.CalledProcessError: the run did not complete.
        """
        words = [str(Path(sys.executable).with_name("prefect")), "deployment", "run", name, "--watch"]
        for key, value in parameters.items():
            words += ["-p", f"{key}={json.dumps(value)}"]
        subprocess.run(words, env=self.env, cwd=ROOT, check=True, stdout=sys.stderr)

    def left_over(self) -> list[str]:
        """Processes of the stack that have outlived it."""
        return [name for name in SERVICES if processes.marked(mark_of(self.settings, name))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "img")
    parser.add_argument("--steps", type=int, default=24, help="of the first run")
    arguments = parser.parse_args()
    try:
        find_browser()
    except FileNotFoundError as error:  # before a quarter of an hour of runs
        sys.exit(f"tour: {error}. Install one of them.")
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rlflow-tour-") as folder:
        result = run(open_tour(Path(folder)), arguments.pictures, arguments.steps)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if not result["left_over"] else 1


def open_tour(folder: Path) -> Tour:
    settings = Settings(data_dir=folder / "data", prefect_port=reserved_port(), mlflow_port=reserved_port())
    env = {
        **new_shell(),
        "RLFLOW_DATA_DIR": str(settings.data_dir),
        "RLFLOW_PREFECT_PORT": str(settings.prefect_port),
        "RLFLOW_MLFLOW_PORT": str(settings.mlflow_port),
    }
    return Tour(settings, env)


def run(tour: Tour, pictures: Path, steps: int) -> dict[str, object]:
    addresses = f"http://127.0.0.1:{tour.settings.prefect_port}", f"http://127.0.0.1:{tour.settings.mlflow_port}"
    try:
        with tour.part("make up"):
            tour.stack("up")
        with tour.part("prefect deployment run grpo-geo3k-tiny"):
            tour.deployment("grpo-geo3k-tiny", steps=steps, overrides=RUN)
        with tour.part("prefect deployment run evaluate-latest"):
            tour.deployment("evaluate-latest")
        with tour.part("prefect deployment run ablate"):
            tour.deployment("ablate", experiment="grpo-geo3k-tiny", grid=GRID, seeds=[0, 1], overrides=POINTS)
        login = login_of(tour.settings)
        os.environ.update(login.for_mlflow())
        runs = Results(addresses[1]).latest("grpo-geo3k-tiny", 100)
        with tour.part("pages"):
            taken = take_pictures(*addresses, login, runs, pictures)
    finally:
        with tour.part("make down"):
            tour.stack("down")
    return {
        "wall_seconds": round(sum(tour.seconds.values()), 1),
        "seconds": tour.seconds,
        "runs": len(runs),
        "pictures": taken,
        "left_over": tour.left_over(),
    }


if __name__ == "__main__":
    sys.exit(main())
