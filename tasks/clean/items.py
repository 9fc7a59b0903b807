"""What is in the data folder that may be removed one day: each item with its size and its last use. Writes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from infra import processes
from infra.settings import Settings
from infra.stack.services import read_state
from infra.store.disk import Trash, usage_of
from rlcore.artifacts import EvalReport
from tasks.clean.decide import AblationFacts, Item, Kind, Mark, RunFacts
from tasks.clean.facts import UNREADABLE, Keys

LONGEST_LOG = 64 * 2**20  # of a running service, whose log is shortened when it is longer
KEPT_LOG = 8 * 2**20
TEMPORARY_MARKS = ("trainer-", "job-")  # of trainers and jobs
_HALF_WRITTEN = (".staging-*", ".trash-*", ".sending-*")  # checkpoints of a killed trainer, retention or mirror
_AGES_WITH_RUN = (Kind.CHECKPOINTS, Kind.LOGS, Kind.PAGES)


def items_of(settings: Settings, runs: Iterable[RunFacts], ablations: Iterable[AblationFacts]) -> Iterator[Item]:
    """Every item of the data folder, and this user's temporary folders of processes."""
    lister = _Lister(settings)
    yield from lister.trash()
    yield from lister.made()
    for run in runs:
        yield from lister.of_run(settings.runs_dir / run.run_id)
    for ablation in ablations:
        yield from lister.of_ablation(settings.ablations_dir / ablation.name)
    yield from lister.temporary()
    yield from lister.compiled()
    yield from lister.logs()
    yield from lister.records()


def has_changed(item: Item, data_dir: Path) -> bool:
    """Whether somebody began to use the item since it was listed."""
    return any(_mark(data_dir / mark.key, mark.key) != mark for mark in item.marks)


class _Lister:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._keys = Keys(settings.data_dir)
        self._records = list(self._read_records())

    def trash(self) -> Iterator[Item]:
        for entry in Trash(self._settings.data_dir).entries():
            yield self._item(Kind.TRASH, entry)

    def made(self) -> Iterator[Item]:
        """What jobs make, and the folders of the jobs. Its last use is in the records of ``tasks.store.made``."""
        settings = self._settings
        used: dict[str, list[Path]] = {}
        for record, path in self._records:
            for key in self._keys.among([path, path.parent]):
                used.setdefault(key, []).append(record)
        for kind, folder in (
            (Kind.DATASETS, settings.datasets_dir), (Kind.DUPLICATES, settings.duplicates_dir),
            (Kind.MODELS, settings.models_dir), (Kind.EVALUATIONS, settings.evaluations_dir),
            (Kind.DOWNLOADS, settings.downloads_dir), (Kind.JOBS, settings.jobs_dir),
        ):  # fmt: skip
            for path in _visible(folder):
                item = self._item(kind, path, used.get(self._keys.of(path), ()))
                yield replace(item, policies=self._policies(path)) if kind is Kind.EVALUATIONS else item

    def of_run(self, folder: Path) -> Iterator[Item]:
        marks, checkpoints = [folder / name for name in ("finished", "drivers.jsonl", "lease.json")], "checkpoints"
        half_written = [path for pattern in _HALF_WRITTEN for path in (folder / checkpoints).glob(pattern)]
        found: dict[Kind, Iterable[Path]] = {
            Kind.CHECKPOINTS: (folder / checkpoints).glob("step-*"),
            Kind.DAMAGED: (folder / checkpoints).glob(".damaged-*"),
            Kind.TEMPORARY: half_written,
            Kind.STACKS: (folder / "stacks").glob("hang-*"),
            Kind.LOGS: folder.glob("trainer.log"),
            Kind.PAGES: folder.glob("report"),
        }
        for kind, paths in found.items():
            for path in sorted(paths):
                item = self._item(kind, path, marks)
                if kind not in _AGES_WITH_RUN:
                    item = replace(item, used=usage_of(path).newest)
                yield replace(item, run=folder.name)

    def of_ablation(self, folder: Path) -> Iterator[Item]:
        if (folder / "logs").is_dir():
            marks = [folder / name for name in ("finished", "drivers.jsonl")]
            yield replace(self._item(Kind.ABLATIONS, folder / "logs", marks), ablation=folder.name)

    def temporary(self) -> Iterator[Item]:
        """What a killed process was writing, and temporary folders of processes that were killed."""
        settings = self._settings
        folders = [settings.data_dir, *_folders(settings.data_dir), *_folders(settings.downloads_dir),
                   *_folders(settings.ablations_dir), *settings.ablations_dir.glob("*/results")]  # fmt: skip
        for path in (path for folder in folders for path in sorted(folder.glob(".*.tmp"))):
            yield self._item(Kind.TEMPORARY, path)
        for path in sorted(settings.runs_dir.glob(".fork-*")):
            yield self._item(Kind.TEMPORARY, path)
        for path, lives in processes.temporary_folders(*TEMPORARY_MARKS):
            usage = usage_of(path)
            held = "its processes run" if lives else None
            yield Item(Kind.TEMPORARY, str(path), usage.bytes, usage.newest, held=held)

    def compiled(self) -> Iterator[Item]:
        for compiler in _visible(self._settings.data_dir / "compiled"):
            for path in _visible(compiler):
                yield self._item(Kind.COMPILED, path)

    def logs(self) -> Iterator[Item]:
        """Of the stack and its servers. While it runs only the ones that are too long, which are shortened."""
        is_up = read_state(self._settings) is not None
        for folder in (self._settings.stack_dir, self._settings.prefect_home, self._settings.mlflow_dir):
            for path in sorted(folder.glob("*.log")):
                item = self._item(Kind.LOGS, path)
                if is_up and item.bytes <= LONGEST_LOG:
                    continue
                yield replace(item, bytes=item.bytes - KEPT_LOG, keep_bytes=KEPT_LOG) if is_up else item

    def records(self) -> Iterator[Item]:
        for record, path in self._records:
            if path.is_relative_to(self._settings.data_dir) and not path.exists():
                yield self._item(Kind.RECORDS, record)

    def _item(self, kind: Kind, path: Path, marks: Iterable[Path] = ()) -> Item:
        usage = usage_of(path)
        held = "a link, and what it leads to may not be ours" if path.is_symlink() else None
        stamps = tuple(_mark(mark, self._keys.of(mark)) for mark in marks)
        used = max([usage.newest, *(stamp.changed / 1e9 for stamp in stamps if stamp.changed is not None)])
        return Item(kind, self._keys.of(path), usage.bytes, used, held=held, marks=stamps)

    def _policies(self, folder: Path) -> tuple[str, ...]:
        """The checkpoint or model that an evaluation is of."""
        try:
            report = EvalReport.model_validate_json((folder / "report.json").read_bytes())
        except UNREADABLE:
            return ()
        return tuple(sorted(self._keys.among([report.policy])))

    def _read_records(self) -> Iterator[tuple[Path, Path]]:
        """Records of ``tasks.store.made`` and the path that each names; a model check names a model of others."""
        for record in sorted((self._settings.data_dir / "made").glob("*.json")):
            try:
                values: Mapping[str, str] = json.loads(record.read_bytes())
                path = Path(values.get("table") or values["path"])
            except UNREADABLE:
                continue
            if not record.name.startswith("check-") and path.is_absolute():
                yield record, path


def _mark(path: Path, key: str) -> Mark:
    try:
        return Mark(key, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return Mark(key, None)


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if not path.name.startswith("."))


def _folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()]
