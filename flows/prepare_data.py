"""prepare-data: both datasets of an experiment, images resized; a training run then finds them done."""

from __future__ import annotations

from prefect import flow
from pydantic import BaseModel, ConfigDict

from rlcore.artifacts import DatasetRef
from rlcore.config import ExperimentConfig, build_experiment
from tasks import foreground
from tasks.data import prepare_and_resize


class Datasets(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    train: DatasetRef
    validation: DatasetRef


@flow(name="prepare-data")
def prepare_data(experiment: ExperimentConfig, overrides: list[str] | None = None) -> Datasets:
    experiment = build_experiment(experiment.model_dump(mode="json"), overrides or [])
    return Datasets(
        train=prepare_and_resize(experiment, "train"),
        validation=prepare_and_resize(experiment, "validation"),
    )


if __name__ == "__main__":
    foreground.main(lambda experiment, run_id: prepare_data(experiment), command="flows.prepare_data")
