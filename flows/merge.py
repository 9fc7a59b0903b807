"""merge: the newest whole checkpoint of a run, as a verified and registered Hugging Face folder."""

from __future__ import annotations

from prefect import flow

from rlcore.artifacts import ModelRef
from tasks import parameters as form
from tasks.data import prepare_and_resize
from tasks.merge import merged, register
from tasks.models import bootstrapped
from tasks.open import find_checkpoint, find_run


@flow(name="merge", flow_run_name="merge-{run_id}")
def merge_run(run_id: form.ExistingRun) -> ModelRef:
    """Merge, verify and register, by the run's own experiment."""
    run = find_run(run_id)
    checkpoint = find_checkpoint(run)
    train = prepare_and_resize(run.experiment, "train")
    model = merged(run.experiment, checkpoint, bootstrapped(run.experiment.model), train)
    return register(run, model, checkpoint, None)
