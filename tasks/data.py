"""The steps that prepare a dataset, resize its images and compare it with another one, each cached by content."""

from __future__ import annotations

from typing import Literal

from infra.logs import get_logger
from infra.provenance import usable_cores
from infra.settings import Settings
from infra.store.download import forget_unused, localize
from rlcore.artifacts import DatasetRef, DuplicatesRef
from rlcore.config import ExperimentConfig
from rlcore.data.prepare.folder import (
    dataset_key,
    mixed_folder,
    mixed_key,
    prepared_folder,
    resized_folder,
    resized_key,
)
from rlcore.data.prepare.sources import parse_source
from rlcore.errors import DataError
from rlcore.specs import DuplicatesSpec, MixSpec, PrepareSpec, ResizeSpec
from tasks.driver.jobs import new_result_path, run_job
from tasks.lineage import record_duplicates
from tasks.retries import step
from tasks.run import Run
from tasks.store.made import content_key, made

Split = Literal["train", "validation"]
CODE = (
    *("rlcore/jobs/prepare.py", "rlcore/jobs/resize.py", "rlcore/jobs/mix.py"),
    *("rlcore/data", "rlcore/families", "rlcore/config", "rlcore/specs.py"),
)
DUPLICATES_CODE = ("rlcore/jobs/duplicates.py", "rlcore/data", "rlcore/families")
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


def resize_spec(experiment: ExperimentConfig, dataset: DatasetRef, settings: Settings) -> ResizeSpec:
    return ResizeSpec(
        result=new_result_path(settings, "resize"),
        dataset=dataset,
        data=experiment.data,
        model=experiment.model,
        datasets_dir=settings.datasets_dir,
        processes=usable_cores(),
    )


@step("prepare-dataset", task_run_name="prepare-{split}", others=(2, 20), timeout_seconds=_TIMEOUT_SECONDS)
def prepare_dataset(experiment: ExperimentConfig, split: Split) -> DatasetRef:
    """Source rows to a dataset with original images.

    Raises:
        DataError: the source is unusable, or none of its problems is usable.
    """
    settings = Settings()
    spec = prepare_spec(experiment, split, settings)

    def make() -> DatasetRef:
        forget_unused(settings.downloads_dir, int(settings.downloads_gib * 2**30))
        return run_job("rlcore.jobs.prepare", spec, DatasetRef, settings)

    key = content_key("prepare", dataset_key(spec), *CODE)
    return _require_problems(made(key, prepared_folder(spec), make, DatasetRef))


@step("resize-images", task_run_name="resize-{split}", others=(2, 20), timeout_seconds=_TIMEOUT_SECONDS)
def resize_images(experiment: ExperimentConfig, split: Split, dataset: DatasetRef) -> DatasetRef:
    """The same dataset with each distinct image stored once, at a size that fits the model's patch grid."""
    settings = Settings()
    spec = resize_spec(experiment, dataset, settings)
    key = content_key("resize", resized_key(spec), *CODE)
    ready = _require_problems(
        made(key, resized_folder(spec), lambda: run_job("rlcore.jobs.resize", spec, DatasetRef, settings), DatasetRef)
    )
    get_logger().info(
        "data: %s: %d problems (%d set aside), %d images, longest prompt %d tokens",
        split, ready.num_problems, ready.num_rejected, ready.num_images, ready.max_prompt_tokens,
    )  # fmt: skip
    return ready


@step("mix-datasets", task_run_name="mix-{split}", others=(2, 20), timeout_seconds=_TIMEOUT_SECONDS)
def mix_datasets(experiment: ExperimentConfig, split: Split, parts: dict[str, DatasetRef]) -> DatasetRef:
    """The datasets of a mixture's sources as one."""
    settings = Settings()
    spec = MixSpec(
        result=new_result_path(settings, f"mix-{split}"),
        parts=parts,
        data=experiment.data,
        datasets_dir=settings.datasets_dir,
    )
    key = content_key("mix", mixed_key(spec), *CODE)
    mixed = made(key, mixed_folder(spec), lambda: run_job("rlcore.jobs.mix", spec, DatasetRef, settings), DatasetRef)
    counts = ", ".join(f"{part.num_problems} of {part.name}" for part in mixed.sources)
    get_logger().info("data: %s: %d problems: %s", split, mixed.num_problems, counts)
    return mixed


def source_experiments(experiment: ExperimentConfig, split: Split) -> dict[str, ExperimentConfig]:
    """The experiment of each source that ``split`` has, by its name. A single source: the experiment itself as ""."""
    sources = experiment.data.sources(split)
    if not sources:
        return {"": experiment}
    rewards = experiment.rewards
    return {
        name: experiment.model_copy(update={"data": data, "reward": rewards.get(name, experiment.reward)})
        for name, data in sources.items()
    }


def prepare_and_resize(experiment: ExperimentConfig, split: Split) -> DatasetRef:
    """The problems of ``split``. The sources of a mixture are prepared and cached each on its own."""
    parts = {
        name: resize_images(own, split, prepare_dataset(own, split))
        for name, own in source_experiments(experiment, split).items()
    }
    return mix_datasets(experiment, split, parts) if experiment.data.sources(split) else parts[""]


@step("find-duplicates", others=(2, 20), timeout_seconds=_TIMEOUT_SECONDS)
def find_duplicates(run: Run, train: DatasetRef, validation: DatasetRef) -> DuplicatesRef | None:
    """The validation problems that training has too, noted in the run's folder. None: the run does not want to know."""
    if not run.experiment.evaluation.find_duplicates:
        return None
    found = duplicates_between(train, validation)
    record_duplicates(run, found)
    get_logger().info("data: duplicates of training in validation: %s", found.text)
    return found


def duplicates_between(train: DatasetRef, evaluation: DatasetRef) -> DuplicatesRef:
    """The problems of an evaluation that training has too, compared once for each pair of datasets.

    Raises:
        StorageError: a dataset is gone, or an image is missing or damaged.
    """
    settings = Settings()
    key = content_key("duplicates", f"{train.digest} {evaluation.digest}", *DUPLICATES_CODE)
    spec = DuplicatesSpec(
        result=new_result_path(settings, "duplicates"),
        train=train,
        evaluation=evaluation,
        out_dir=settings.duplicates_dir / key,
        threads=usable_cores(),
    )
    return made(
        key, spec.out_dir, lambda: run_job("rlcore.jobs.duplicates", spec, DuplicatesRef, settings), DuplicatesRef
    )


def _require_problems(dataset: DatasetRef) -> DatasetRef:
    if dataset.num_problems == 0:
        raise DataError(
            f"{dataset.source} has no usable problem: all {dataset.num_rejected} were set aside; "
            f"{dataset.path}/rejects.jsonl has the reasons. Fix the source, or raise data.max_prompt_tokens if prompts "
            "are too long."
        )
    return dataset
