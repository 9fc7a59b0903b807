"""prepare-data: prepare both datasets of an experiment, so that its training run finds them."""

from __future__ import annotations

from prefect import flow
from pydantic import BaseModel, ConfigDict

from rlcore.artifacts import DatasetRef
from tasks import experiments as form
from tasks.data import prepare_and_resize


class Datasets(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    train: DatasetRef
    validation: DatasetRef


@flow(name="prepare-data")
def prepare_data(
    experiment: form.Experiment,
    model: form.Model = None,
    train_data: form.TrainData = None,
    validation_data: form.ValidationData = None,
    overrides: form.Overrides = None,
) -> Datasets:
    """Prepare both datasets and resize their images; results are cached by content."""
    config = form.configure(experiment, overrides, model=model, train_data=train_data, validation_data=validation_data)
    return Datasets(
        train=prepare_and_resize(config, "train"),
        validation=prepare_and_resize(config, "validation"),
    )
