"""Only the training of an experiment, by the tasks that the flows have: ``python -m tests.long.train_only NAME
--run-id RUN --set ...``, as ``rlflow train`` is called."""

from __future__ import annotations

from typing import Annotated

import typer
from prefect import flow

from rlcore.segment.spec import SegmentManifest
from tasks import experiments as form
from tasks.cli import foreground
from tasks.data import prepare_and_resize
from tasks.models import bootstrap_policy
from tasks.open import open_run, track_run
from tasks.preflight import preflight
from tasks.train import train_all_segments


@flow(name="train-only")
def train_only(experiment: form.Experiment, overrides: form.Overrides, run_id: form.NewRun) -> SegmentManifest:
    config = form.configure(experiment, overrides)
    preflight(config)
    run = open_run(config, run_id)
    train, validation = prepare_and_resize(config, "train"), prepare_and_resize(config, "validation")
    start = bootstrap_policy(config.model)
    with track_run(run):
        return train_all_segments(run, train, start, validation)[-1]


def main(
    experiment: str,
    overrides: Annotated[list[str], typer.Option("--set")],
    run_id: Annotated[str, typer.Option("--run-id")],
) -> None:
    foreground.run_once(lambda: train_only(experiment, overrides, run_id))


if __name__ == "__main__":
    typer.run(main)
