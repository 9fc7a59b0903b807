"""Prepare a dataset and resize its images, each cached by content."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from prefect.context import TaskRunContext

from infra.hardware import usable_cores
from infra.logs import get_logger
from infra.settings import Settings
from infra.store.download import forget_unused, localize
from rlcore.artifacts import DatasetRef
from rlcore.config import ExperimentConfig
from rlcore.data.prepare.folder import dataset_key, prepared_folder, resized_folder, resized_key
from rlcore.data.prepare.sources import parse_source
from rlcore.errors import DataError
from rlcore.specs import PrepareSpec, ResizeSpec
from tasks.driver.jobs import new_result_path, run_job
from tasks.retries import step
from tasks.store.made import cache_key, kept, present

Split = Literal["train", "validation"]
_CODE = ("rlcore/data", "rlcore/families", "rlcore/config", "rlcore/specs.py")
_TIMEOUT_SECONDS = 6 * 3600


def prepare_spec(experiment: ExperimentConfig, split: Split, settings: Settings) -> PrepareSpec:
    source = experiment.data.train if split == "train" else experiment.data.validation
    return PrepareSpec(
        result=new_result_path(settings, f"prepare-{split}"),
        source=source,
        source_path=localize(parse_source(source, split)[0], settings.downloads_dir),
        split=split,
        data=experiment.data,
        model=experiment.model,
        datasets_dir=settings.datasets_dir,
    )


def _prepare_key(_: TaskRunContext, parameters: dict[str, Any]) -> str:
    spec = prepare_spec(parameters["experiment"], parameters["split"], Settings())
    return cache_key("prepare", dataset_key(spec), *_CODE)


def _resize_key(_: TaskRunContext, parameters: dict[str, Any]) -> str:
    spec = _resize_spec(parameters["experiment"], parameters["dataset"], Settings())
    return cache_key("resize", resized_key(spec), *_CODE)


@step(
    "prepare-dataset",
    task_run_name="prepare-{split}",
    cache_key_fn=_prepare_key,
    persist_result=True,
    result_serializer="json",
    others=(2, 20),
    timeout_seconds=_TIMEOUT_SECONDS,
)
def prepare(experiment: ExperimentConfig, split: Split) -> DatasetRef:
    """Source rows to a dataset with original images.

    Raises:
        DataError: the source is unusable, or no problem of it is.
    """
    settings = Settings()
    spec = prepare_spec(experiment, split, settings)
    forget_unused(settings.downloads_dir, int(settings.downloads_gib * 2**30))

    def make() -> DatasetRef:
        return run_job("rlcore.jobs.prepare", spec, DatasetRef, settings)

    return _usable(kept(prepared_folder(spec), settings, make))


@step(
    "resize-images",
    task_run_name="resize-{split}",
    cache_key_fn=_resize_key,
    persist_result=True,
    result_serializer="json",
    others=(2, 20),
    timeout_seconds=_TIMEOUT_SECONDS,
)
def resize(experiment: ExperimentConfig, split: Split, dataset: DatasetRef) -> DatasetRef:
    """The same dataset with each distinct image once, on the model's patch grid."""
    settings = Settings()
    spec = _resize_spec(experiment, dataset, settings)

    def make() -> DatasetRef:
        return run_job("rlcore.jobs.resize", spec, DatasetRef, settings)

    return _usable(kept(resized_folder(spec), settings, make))


def prepare_and_resize(experiment: ExperimentConfig, split: Split) -> DatasetRef:
    """Both tasks, in order; a cached result whose folder somebody has removed is made again."""
    prepared = present(prepare, _report, experiment, split)
    ready = present(resize, _report, experiment, split, prepared)
    get_logger().info(
        "data: %s: %d problems (%d set aside), %d images, longest prompt %d tokens",
        split,
        ready.num_problems,
        ready.num_rejected,
        ready.num_images,
        ready.max_prompt_tokens,
    )
    return ready


def _report(dataset: DatasetRef) -> Path:
    return Path(dataset.path) / "report.json"


def _resize_spec(experiment: ExperimentConfig, dataset: DatasetRef, settings: Settings) -> ResizeSpec:
    return ResizeSpec(
        result=new_result_path(settings, "resize"),
        dataset=dataset,
        data=experiment.data,
        model=experiment.model,
        datasets_dir=settings.datasets_dir,
        processes=usable_cores(),
    )


def _usable(dataset: DatasetRef) -> DatasetRef:
    if dataset.num_problems == 0:
        raise DataError(
            f"{dataset.source} has no usable problem: all {dataset.num_rejected} were set aside; "
            f"{dataset.path}/rejects.jsonl says why. Mend the source, or raise "
            "data.max_prompt_tokens if prompts are too long."
        )
    return dataset
