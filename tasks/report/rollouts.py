"""Functions for the notebooks: start a deployment, wait for it with a progress bar, and show rollouts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from prefect import get_client
from prefect.client.schemas.filters import ArtifactCollectionFilter, ArtifactCollectionFilterKey
from prefect.client.schemas.objects import FlowRun
from tqdm import tqdm

from rlcore.errors import ConfigError, TrainerFailedError
from tasks.report.page import TEMPLATES, Sample, data_uri, image_folder, read_step, sample_files
from tasks.run import Run

_POLL_SECONDS = 1.0
_BAR = "{desc}{percentage:3.0f}%|{bar}| {elapsed}"  # tqdm ends a description with a colon of its own


def start(deployment: str, **parameters: Any) -> FlowRun:
    """Start a flow run of ``flow/deployment`` and return at once."""
    # Prefect's own helpers return coroutines where an event loop runs, as in every notebook.
    with get_client(sync_client=True) as client:
        deployment_id = client.read_deployment_by_name(deployment).id
        return client.create_flow_run_from_deployment(deployment_id, parameters=parameters)


def wait(flow_run: FlowRun) -> str:
    """Wait for the end of a flow run with a bar of its progress artifact. Returns the name of the ablation or run.

    Raises:
        TrainerFailedError: it did not complete.
    """
    with get_client(sync_client=True) as client, tqdm(total=100, unit="%", bar_format=_BAR) as bar:
        while True:
            flow_run = client.read_flow_run(flow_run.id)
            bar.set_description(f"{flow_run.name}: {flow_run.state_name}")
            key = ArtifactCollectionFilterKey(any_=[f"{flow_run.name}-progress"])
            for shown in client.read_latest_artifacts(artifact_filter=ArtifactCollectionFilter(key=key), limit=1):
                bar.update(round(float(str(shown.data)), 1) - bar.n)
            if flow_run.state is not None and flow_run.state.is_final():
                break
            time.sleep(_POLL_SECONDS)
    if not flow_run.state.is_completed():
        raise TrainerFailedError(f"{flow_run.name} ended as {flow_run.state_name}: {flow_run.state.message}")
    return str(flow_run.name)


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """A problem with its images and all completions that were sampled for it in one step."""

    pictures: tuple[Path, ...]
    completions: tuple[Sample, ...]


def sampled_steps(run: Run) -> list[int]:
    """Steps whose completions were saved."""
    return list(sample_files(run))


def read_groups(run: Run, step: int) -> list[ShownGroup]:
    """The problems of a step that the trainer saved, the first of its batch.

    Raises:
        ConfigError: no completions of this step were saved.
    """
    if step not in sample_files(run):
        known = ", ".join(map(str, sampled_steps(run))) or "none"
        raise ConfigError(f"run {run.run_id} saved no completions of step {step}. Steps that have some: {known}.")
    folder = image_folder(run)
    groups = [tuple(group) for _, group in groupby(read_step(run, step), key=lambda sample: sample.problem_id)]
    return [ShownGroup(tuple(folder / f"{name}.png" for name in group[0].images), group) for group in groups]


def as_html(group: ShownGroup) -> str:
    """HTML with image and prompt on top and the completions side by side, the best reward first."""
    return TEMPLATES.get_template("group.html.jinja").render(
        group=group.completions[0],
        pictures=[data_uri(path) for path in group.pictures],
        best_first=sorted(group.completions, key=lambda item: -item.reward),
    )
