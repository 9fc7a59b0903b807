"""train-grpo: from raw data to a merged, verified, registered model. The order of steps; each is a task."""

from __future__ import annotations

import time

from prefect import flow

from tasks import experiments as form
from tasks.data import find_duplicates, prepare_and_resize
from tasks.driver.jobs import end_what_is_left
from tasks.evaluate import evaluate_and_log, log_validation
from tasks.models import bootstrap_policy, bootstrap_teacher, check_model, merge_checkpoint, register_model
from tasks.open import choose_experiment, describe_run, note_if_unopened, open_run, track_run
from tasks.preflight import preflight
from tasks.report.page import RunSummary, report
from tasks.run import flow_run_name
from tasks.train import checkpoint_to_merge, is_trained, link_trainer, train_segment


@flow(name="train-grpo", flow_run_name=flow_run_name, on_cancellation=[end_what_is_left])
def train_grpo(
    experiment: form.Experiment,
    steps: form.Steps = None,
    seed: form.Seed = None,
    learning_rate: form.LearningRate = None,
    workers: form.Workers = None,
    model: form.Model = None,
    train_data: form.TrainData = None,
    validation_data: form.ValidationData = None,
    overrides: form.Overrides = None,
    run_id: form.NewRun = None,
    allow_changes: form.AllowChanges = False,
) -> RunSummary:
    """Train a new run, or continue the run called ``run_id`` with its own values and what is given here."""
    started = time.monotonic()
    with note_if_unopened(run_id):
        config = choose_experiment(
            run_id, experiment=experiment, overrides=overrides, steps=steps, seed=seed, learning_rate=learning_rate,
            workers=workers, model=model, train_data=train_data, validation_data=validation_data)  # fmt: skip
        preflight(config)
        run = open_run(config, run_id, allow_changes=allow_changes)
    starting = bootstrap_policy.submit(config.model)  # while the data is prepared
    checking = check_model.submit(config, starting)  # type: ignore[call-overload]  # Prefect passes the result
    with track_run(run):
        train, validation = prepare_and_resize(config, "train"), prepare_and_resize(config, "validation")
        start = starting.result()
        teacher = bootstrap_teacher(config, start) if config.algorithm.teacher else None
        checking.result()
        describe_run(run, train, validation, start, teacher)
        if config.evaluation.every_steps is None:  # else the trainer does
            evaluate_and_log(run, config, start, start, validation)
        duplicates = find_duplicates.submit(run, train, validation)  # while training runs
        with link_trainer(run) as segments:
            while not is_trained(run, segments):
                segments.append(train_segment(run, train, start, len(segments), validation, teacher))
        duplicates.result()
        log_validation(run, segments)
        chosen = checkpoint_to_merge(run, segments)
        before = evaluate_and_log(run, config, start, start, validation)
        after = evaluate_and_log(run, config, chosen, start, validation)
        merged = merge_checkpoint(config, chosen, start, train)
        registered = register_model(run, merged, chosen, after)
        return report(run, validation, before, after, segments, registered, chosen, time.monotonic() - started)
