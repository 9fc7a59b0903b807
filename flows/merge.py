"""merge: the newest whole checkpoint of a run, as a verified and registered Hugging Face folder."""

from __future__ import annotations

from prefect import flow

from rlcore.artifacts import ModelRef
from tasks import experiments as form
from tasks.data import prepare_and_resize
from tasks.models import bootstrap_policy, merge_checkpoint, register_model
from tasks.open import find_checkpoint, find_run


@flow(name="merge", flow_run_name="merge-{run_id}")
def merge_run(run_id: form.ExistingRun) -> ModelRef:
    """Merge, verify and register, with the run's own settings."""
    run = find_run(run_id)
    checkpoint = find_checkpoint(run)
    train = prepare_and_resize(run.experiment, "train")
    model = merge_checkpoint(run.experiment, checkpoint, bootstrap_policy(run.experiment.model), train)
    return register_model(run, model, checkpoint, None)
