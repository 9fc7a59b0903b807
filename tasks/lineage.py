"""What a run and a registered model were made from: code, environment, data, model, reward and template.

Each start of a run adds a line to ``origins.jsonl`` in its folder, unless an earlier start had the same origin.
Patches, package lists and the user's files are stored in ``origins/``, named by their hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from json import dumps
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from infra import provenance
from infra.errors import RegistryError
from infra.logs import redact
from infra.settings import Settings
from infra.tracking.results import find_model, read_text
from rlcore.artifacts import CheckpointRef, DatasetRef, DuplicatesRef, ModelRef
from rlcore.config import ExperimentConfig, read_experiment
from rlcore.config.reward import ModelReward, own_digest, own_file
from rlcore.data.messages import template_text
from rlcore.data.table import PreparedRow, load_rows
from rlcore.errors import StorageError
from rlcore.files import write_json_atomically
from rlcore.segment.batch_log import trained_problems
from rlcore.segment.store import read_manifest
from tasks.driver.failures import FailureLog, FailureRecord
from tasks.run import Driver, Run, append_line, drivers, read_fork

_HASH_SHOWN = 16
_DUPLICATES = "duplicates.jsonl"


class SegmentLine(BaseModel):
    """One segment on the way to the model, and the failed tries before it was committed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    segment: int
    first_step: int  # exclusive
    last_step: int
    checkpoint: str
    manifest_sha256: str
    on_disk: bool  # false: the retention rule removed it
    retries: tuple[FailureRecord, ...]


class Lineage(BaseModel):
    """Everything that a model was made from. ``origins`` and ``drivers`` are in the order of the run's starts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: ModelRef
    run_id: str
    run_dir: str
    mlflow_run_id: str
    checkpoint: CheckpointRef
    checkpoint_code_digest: str  # of the trainer's rlcore
    checkpoint_versions: dict[str, str]  # in the trainer's interpreter
    forked_from: str | None = None  # RUN@STEP; the steps up to there are that run's
    segments: tuple[SegmentLine, ...]
    drivers: tuple[Driver, ...]
    origins: tuple[Origin, ...]
    duplicates: tuple[DuplicatesRef, ...] = ()  # of the training data in the validation data
    changes: tuple[str, ...]  # lines of changes.jsonl
    experiment: dict[str, str | int | float | bool | None]  # dotted keys
    experiment_digest: str

    def rows(self) -> list[tuple[str, str]]:
        """Name and text of each row of the page."""
        where = self.checkpoint
        return [
            ("model", f"{self.model.registered_name} version {self.model.registered_version}, {self.model.path} "
             f"({self.model.digest[:_HASH_SHOWN]})"),
            ("run", f"{self.run_id}, {self.run_dir}; MLflow run {self.mlflow_run_id}"),
            ("checkpoint", f"step {where.step}, {where.path} (manifest {where.manifest_sha256[:_HASH_SHOWN]})"),
            *([("forked from", self.forked_from)] if self.forked_from else []),
            *((f"segment {item.segment}", _segment(item)) for item in self.segments),
            ("starts", f"{len(self.drivers)}: {'; '.join(map(_driver, self.drivers))}"),
            *(row for origin in self.origins for row in _origin_rows(origin, self.run_dir)),
            *(("duplicates of training in validation", _duplicates(found)) for found in self.duplicates),
            ("trained with", f"rlcore {self.checkpoint_code_digest}; {_versions(self.checkpoint_versions)}"),
            ("config", f"digest {self.experiment_digest}, {Path(self.run_dir) / 'experiment.json'}"),
            *(("changed during the run", line) for line in self.changes),
        ]  # fmt: skip


class TrainedRow(BaseModel):
    """A problem that an optimizer step was trained on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    problem_id: str
    source: str
    row: int  # in the source, from 0
    question: str
    answer: str
    images: tuple[str, ...]  # resized files, as used in training
    image_sha256: tuple[str, ...]  # of the original files


def lineage_of(run: Run, model: ModelRef, checkpoint: CheckpointRef, mlflow_run_id: str) -> Lineage:
    """The lineage of a model, read from the run's folder.

    Raises:
        CheckpointError: the checkpoint's manifest is gone or damaged.
    """
    manifest = read_manifest(checkpoint)
    changes = run.run_dir / "changes.jsonl"
    return Lineage(
        model=model,
        run_id=run.run_id,
        run_dir=str(run.run_dir),
        mlflow_run_id=mlflow_run_id,
        checkpoint=checkpoint,
        checkpoint_code_digest=manifest.code_digest,
        checkpoint_versions=manifest.versions,
        forked_from=str(origin) if (origin := read_fork(run)) else None,
        segments=tuple(_segments(run, checkpoint.step)),
        drivers=tuple(drivers(run)),
        origins=tuple(read_origins(run.run_dir)),
        duplicates=tuple(read_duplicates(run)),
        changes=tuple(changes.read_text().splitlines()) if changes.exists() else (),
        experiment=run.experiment.flat(),
        experiment_digest=run.experiment.digest(),
    )


def trained_rows(lineage: Lineage, run: Run, step: int) -> list[TrainedRow]:
    """The rows and images that optimizer step ``step`` was trained on.

    Raises:
        StorageError: the step is not in the run's log, or the dataset was removed.
    """
    wanted = trained_problems(run.run_dir, step, run.experiment.training)
    dataset, rows = _with_problems(lineage, wanted)
    return [
        TrainedRow(
            problem_id=name,
            source=rows[name].problem.source,
            row=rows[name].row,
            question=rows[name].problem.conversation,
            answer=rows[name].problem.answer,
            images=tuple(str(Path(dataset.path) / "images" / f"{i.sha256}.png") for i in rows[name].problem.images),
            image_sha256=tuple(image.sha256 for image in rows[name].problem.images),
        )
        for name in wanted
    ]


def _with_problems(lineage: Lineage, wanted: Sequence[str]) -> tuple[DatasetRef, dict[str, PreparedRow]]:
    """The newest training data of the run that has these problems; --allow-changes may have replaced the data."""
    datasets = {origin.train.path: origin.train for origin in reversed(lineage.origins)}
    for dataset in datasets.values():
        rows = {row.problem.problem_id: row for row in load_rows(Path(dataset.path))}
        if rows.keys() >= set(wanted):
            return dataset, rows
    raise StorageError(
        f"none of the datasets {sorted(datasets) or 'noted'} of run {lineage.run_id} has the problems "
        f"{list(wanted)[:5]}. Runs that started before origins were recorded have none."
    )


def find_lineage(words: str, settings: Settings) -> tuple[Lineage, Run | None]:
    """The lineage that was stored with a registered model, and its run if this machine has it.

    Raises:
        RegistryError: there is no such model, or it was registered without a lineage.
    """
    model = find_model(settings.tracking_uri, words)
    text = read_text(settings.tracking_uri, model.mlflow_run_id, artifact_name(model.name, model.version))
    if text is None:
        made_by = model.tags.get("rlflow.run_id")
        raise RegistryError(
            f"{model.name} version {model.version} has no lineage in its MLflow run: "
            + (f"it was registered before lineages existed. Run .venv/bin/rlflow merge {made_by}." if made_by else
               "rlflow did not register it.")
        )  # fmt: skip
    lineage = Lineage.model_validate_json(text)
    stored = Path(lineage.run_dir) / "experiment.json"
    if not stored.exists():
        return lineage, None
    experiment = read_experiment(stored)
    return lineage, Run(run_id=lineage.run_id, run_dir=stored.parent, experiment=experiment)


def artifact_name(model: str, version: str) -> str:
    """Name of the lineage among the artifacts of the model's MLflow run."""
    return f"lineage/{model}-{version}.json"


def format_lineage(model: str, settings: Settings, *, step: int | None = None, json: bool = False) -> str:
    """The lineage of a registered model as lines or as one JSON object; with ``step``, also the rows and images that
    this optimizer step was trained on."""
    lineage, run = find_lineage(model, settings)
    trained = None
    if step is not None:
        if run is None:
            raise StorageError(
                f"the run's folder {lineage.run_dir} is not on this machine, and only it lists the rows of a step."
            )
        trained = trained_rows(lineage, run, step)
    if json:
        rows = None if trained is None else [row.model_dump(mode="json") for row in trained]
        return dumps({**lineage.model_dump(mode="json"), "trained": rows})
    width = max(len(name) for name, _ in lineage.rows())
    lines = [f"{name:<{width}}  {text}" for name, text in lineage.rows()]
    for row in trained or ():
        lines.append(f"{row.problem_id:<{width}}  row {row.row} of {row.source}: {row.question!r} -> {row.answer!r}")
        lines += [f"{'':<{width}}  {image}" for image in row.images]
    return "\n".join(lines)


def _segments(run: Run, last_step: int) -> Iterator[SegmentLine]:
    records, index = FailureLog(run.run_dir).read(), 0
    while (manifest := run.manifest(index)) is not None and manifest.last_step <= last_step:
        yield SegmentLine(
            segment=index,
            first_step=manifest.first_step,
            last_step=manifest.last_step,
            checkpoint=manifest.checkpoint.path,
            manifest_sha256=manifest.checkpoint.manifest_sha256,
            on_disk=Path(manifest.checkpoint.path).is_dir(),
            retries=tuple(item for item in records if manifest.first_step <= item.step < manifest.last_step),
        )
        index += 1


def _segment(item: SegmentLine) -> str:
    removed = "" if item.on_disk else ", removed"
    retries = "; ".join(f"{retry.failure.value} at step {retry.step}" for retry in item.retries)
    tried = f"; retries: {retries}" if retries else ""
    return f"steps {item.first_step + 1} to {item.last_step}, {item.checkpoint}{removed}{tried}"


def _driver(item: Driver) -> str:
    at = datetime.fromtimestamp(item.at, UTC).isoformat(timespec="seconds")
    return f"{at} on {item.host}" + (f", flow run {item.flow_run_id}" if item.flow_run_id else "")


def _origin_rows(origin: Origin, run_dir: str) -> Iterator[tuple[str, str]]:
    folder = origins_dir(Path(run_dir))
    patch = f" and {folder / origin.patch}" if origin.patch else ", nothing uncommitted"
    yield f"code {origin.at}", f"commit {origin.commit or 'unknown'}{patch}; digest {origin.code_digest}"
    yield "environment", f"Python {origin.python}, {_versions(origin.versions)}; {folder / origin.environment}"
    yield "machine", origin.hardware
    for name, dataset in (("train", origin.train), ("validation", origin.validation)):
        yield (
            f"data, {name}",
            f"{dataset.source}: {dataset.num_problems} rows, {dataset.num_rejected} rejected, {dataset.num_images} "
            f"images; digest {dataset.digest[:_HASH_SHOWN]}, {dataset.path}",
        )
        for part in dataset.sources:
            yield (
                f"data, {name}, {part.name}",
                f"{part.source}: {part.num_problems} rows, {part.num_rejected} rejected; digest "
                f"{part.digest[:_HASH_SHOWN]}",
            )
    yield "started from", f"{origin.base.source}, {origin.base.path} ({origin.base.digest[:_HASH_SHOWN]})"
    if origin.teacher is not None:
        yield "teacher", f"{origin.teacher.source}, {origin.teacher.path} ({origin.teacher.digest[:_HASH_SHOWN]})"
    reward = f"; reward {folder / origin.reward}" if origin.reward else ""
    yield "prompt template", f"{folder / origin.template}{reward}"
    for name, fingerprint in sorted(origin.reward_models.items()):
        yield "reward model" + (f", {name}" if name else ""), f"fingerprint {fingerprint[:_HASH_SHOWN]}"
    for name, file in sorted(origin.of_sources.items()):
        yield name, str(folder / file)


def _duplicates(found: DuplicatesRef) -> str:
    return f"{found.text}; {found.path} ({found.digest[:_HASH_SHOWN]})"


def _versions(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


class Origin(BaseModel):
    """Code, environment, data and model of one or more starts of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: str  # time of the first such start
    commit: str  # empty: not a git checkout
    patch: str | None  # file in ``origins/`` with uncommitted changes; None: there were none
    code_digest: str  # of rlflow's source files
    environment: str  # file of ``origins/``
    python: str
    hardware: str
    versions: dict[str, str]
    reward: str | None  # file of ``origins/`` with the user's own reward
    template: str  # file of ``origins/`` with the prompt template's text
    train: DatasetRef
    validation: DatasetRef
    base: ModelRef
    teacher: ModelRef | None = None  # of algorithm.teacher
    reward_models: dict[str, str] = {}  # fingerprints of their folders by source; "": of all other problems
    of_sources: dict[str, str] = {}  # "prompt template, NAME" or "reward, NAME" -> file of ``origins/``

    @property
    def files(self) -> list[str]:
        own = (self.patch, self.environment, self.reward, self.template, *self.of_sources.values())
        return list(dict.fromkeys(name for name in own if name is not None))


def record_origin(
    run: Run,
    facts: provenance.Provenance,
    train: DatasetRef,
    validation: DatasetRef,
    base: ModelRef,
    teacher: ModelRef | None = None,
) -> Origin:
    """Record the origin of this start, unless an earlier start had the same."""
    folder = origins_dir(run.run_dir)
    reward = run.experiment.reward
    own = own_file(reward)
    origin = Origin(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=facts.commit,
        patch=_store_text(folder, "uncommitted.patch", facts.patch) if facts.patch else None,
        code_digest=facts.code,
        environment=_store_text(folder, "environment.txt", facts.environment),
        python=facts.python,
        hardware=facts.hardware,
        versions=facts.versions,
        reward=None if own is None else _store_text(folder, f"reward{own.suffix}", redact(own.read_text())),
        template=_store_text(folder, "template.jinja", template_text(run.experiment.data.template)),
        train=train,
        validation=validation,
        base=base,
        teacher=teacher,
        reward_models={
            name: digest
            for name, item in run.experiment.rewards.items()
            if isinstance(item, ModelReward) and (digest := own_digest(item)) is not None
        },
        of_sources=dict(_source_files(folder, run.experiment)),
    )
    known = [item.model_copy(update={"at": origin.at}) for item in read_origins(run.run_dir)]
    if origin not in known:
        append_line(run.run_dir / "origins.jsonl", origin.model_dump_json())
    return origin


def _source_files(folder: Path, experiment: ExperimentConfig) -> Iterator[tuple[str, str]]:
    """What the sources of a mixture have of their own: name in ``Origin.of_sources``, and the stored file."""
    for name, source in sorted(experiment.data.mixture.items()):
        if source.template is not None:
            text = template_text(source.template)
            yield f"prompt template, {name}", _store_text(folder, "template.jinja", text)
        if source.reward is not None and (own := own_file(source.reward)) is not None:
            yield f"reward, {name}", _store_text(folder, f"reward{own.suffix}", redact(own.read_text()))


def read_origins(run_dir: Path) -> list[Origin]:
    path = run_dir / "origins.jsonl"
    return [Origin.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def record_duplicates(run: Run, found: DuplicatesRef) -> None:
    """Note what training and validation have in common, unless it is noted already."""
    if found not in read_duplicates(run):
        append_line(run.run_dir / _DUPLICATES, found.model_dump_json())


def read_duplicates(run: Run) -> list[DuplicatesRef]:
    """What was noted, the newest last; several if the run was continued with other data."""
    path = run.run_dir / _DUPLICATES
    return [DuplicatesRef.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def origins_dir(run_dir: Path) -> Path:
    return run_dir / "origins"


def _store_text(folder: Path, name: str, text: str) -> str:
    """Write ``text`` to a file of ``folder`` named by its hash. Returns the file's name."""
    file = f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{name}"
    if not (folder / file).exists():
        write_json_atomically(folder / file, text)
    return file
