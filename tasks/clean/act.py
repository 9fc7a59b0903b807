"""Removes what nobody needs: inventory, decision, removal, and the report. The only file here that changes anything."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from prefect.artifacts import create_table_artifact
from prefect.settings import PREFECT_API_URL

from infra import processes
from infra.errors import StorageError
from infra.files import now_of
from infra.logs import get_logger
from infra.settings import Settings
from infra.store.bucket import Store
from infra.store.disk import Trash, usage_of
from tasks.clean.decide import Inventory, Item, Kind, Verdict, choose, decide
from tasks.clean.facts import References, is_alive
from tasks.clean.flow_runs import delete_flow_runs, ended_flow_runs
from tasks.clean.items import TEMPORARY_MARKS, has_changed, items_of
from tasks.clean.report import CleanReport, rows_of
from tasks.driver.outbox import prefect_outage_named
from tasks.retries import step
from tasks.store.made import store_of
from tasks.store.restore import read_mirror

Name: TypeAlias = tuple[Kind, str]

ARTIFACT = "clean"
_GIB = 2**30
_NO_PREFECT = "No Prefect server is set (PREFECT_API_URL), so its flow runs were not looked at."
# What the store has copies of, by the first folder; of a run these parts.
_MIRRORED = ("datasets/", "duplicates/", "models/", "evaluations/")
_MIRRORED_OF_RUN = ("checkpoints/step-", "report", "trainer.log")


def take_inventory(settings: Settings, older_than_days: float) -> Inventory:
    """Everything that the decision depends on. Writes nothing.

    Raises:
        ServerError, RegistryError: MLflow does not tell which models are in use.
    """
    references = References(settings)
    jobs = references.jobs_at_work()  # first: what a job of before makes is in the folder afterwards
    runs, ablations = references.runs(), references.ablations()
    items = [*items_of(settings, runs, ablations), *_flow_runs(older_than_days)]
    return Inventory(
        now=now_of(settings.data_dir),  # clocks of machines that share the folder may differ
        older_than_days=older_than_days,
        items=tuple(items),
        runs=tuple(runs),
        ablations=tuple(ablations),
        versions=tuple(references.versions()),
        jobs=tuple(jobs),
        experiments=tuple(references.experiments()),
    )


def look(settings: Settings, older_than_days: float) -> CleanReport:
    """What ``clean`` would remove now, and why the rest stays. Writes nothing."""
    verdicts = decide(take_inventory(settings, older_than_days))
    used = usage_of(settings.data_dir).bytes
    chosen = choose(verdicts, used, _limit(settings))
    return _report(settings, older_than_days, verdicts, chosen, used)


def clean(settings: Settings, older_than_days: float) -> CleanReport:
    """Remove what ``look`` shows. A kill at any moment leaves each item whole or in the trash, which the next call
    empties. Call it from one process at a time.

    Raises:
        ServerError, RegistryError: MLflow does not tell which models are in use. Only the trash was emptied.
    """
    remover = _Remover(settings)
    remover.empty_trash()
    first = report = look(settings, older_than_days)
    seen = {_name(verdict): verdict for verdict in first.verdicts}
    # In rounds: a file with several names frees its space only with the last one.
    while todo := [verdict for verdict in report.chosen if _name(verdict) not in remover.tried]:
        seen |= {_name(verdict): verdict for verdict in todo if _name(verdict) not in seen}
        remover.remove(todo)
        report = look(settings, older_than_days)
    gone = tuple(verdict for name, verdict in seen.items() if name in remover.removed)
    return replace(
        first, verdicts=tuple(seen.values()), chosen=gone, left_bytes=report.used_bytes,
        notes=(*first.notes, *remover.notes),
    )  # fmt: skip


@step("clean", timeout_seconds=12 * 3600)
def clean_data(older_than_days: float) -> CleanReport:
    """``clean`` over the data folder, with a log line per kind."""
    report = clean(Settings(), older_than_days)
    for note in report.notes:
        get_logger().warning("clean: %s", note)
    get_logger().info("clean: %s", report.summary())
    return report


@step("show-cleaning")
def show_cleaning(report: CleanReport) -> None:
    """Show the table in Prefect."""
    with prefect_outage_named():
        create_table_artifact([row.cells() for row in rows_of(report)], key=ARTIFACT, description=report.summary())


def _name(verdict: Verdict) -> Name:
    return verdict.item.kind, verdict.item.key


def _flow_runs(older_than_days: float) -> Iterator[Item]:
    if PREFECT_API_URL.value():
        for name, ended in ended_flow_runs(older_than_days):
            yield Item(Kind.FLOW_RUNS, name, 0, ended)


def _quota(settings: Settings) -> int | None:
    return int(settings.max_gib * _GIB) if settings.max_gib else None


def _limit(settings: Settings) -> int | None:
    """Size to which the data folder is reduced, with room for the next runs below the quota."""
    return int(settings.max_gib * _GIB * (1 - settings.clean_free_share)) if settings.max_gib else None


def _report(
    settings: Settings, days: float, verdicts: Sequence[Verdict], chosen: Sequence[Verdict], used: int
) -> CleanReport:
    notes = () if PREFECT_API_URL.value() else (_NO_PREFECT,)
    return CleanReport(settings.data_dir, days, tuple(verdicts), tuple(chosen), used, _quota(settings), notes=notes)


@dataclass(slots=True)
class _Remover:
    settings: Settings
    tried: set[Name] = field(default_factory=set)
    removed: set[Name] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def _trash(self) -> Trash:
        return Trash(self.settings.data_dir)

    def empty_trash(self) -> None:
        """Finish removals that were interrupted."""
        for entry in self._trash.entries():
            self._delete(entry)

    def remove(self, verdicts: Sequence[Verdict]) -> None:
        self.tried |= set(map(_name, verdicts))
        flow_runs = [verdict for verdict in verdicts if verdict.item.kind is Kind.FLOW_RUNS]
        delete_flow_runs(verdict.item.key for verdict in flow_runs)
        self.removed |= set(map(_name, flow_runs))
        for verdict in verdicts:
            if verdict.item.kind in (Kind.FLOW_RUNS, Kind.TRASH):  # done, or a note for the next clean
                continue
            try:
                if self._remove(verdict.item):
                    self.removed.add(_name(verdict))
            except FileNotFoundError:  # somebody else removed it
                continue
            except OSError as error:
                self.notes.append(f"{verdict.item.key} stays: {error}")

    def _remove(self, item: Item) -> bool:
        path = self.settings.data_dir / item.key
        if Path(item.key).is_absolute():  # the temporary folder of processes that were killed
            if (path, False) not in processes.temporary_folders(*TEMPORARY_MARKS):
                return False
            shutil.rmtree(path, ignore_errors=True)
            return not path.exists()
        if item.keep_bytes:
            _shorten(path, item.keep_bytes)
            return True
        if self._begun(item):
            return False
        entry = self._trash.put(path)
        # Who began to use it before this line changed a mark; who begins afterwards finds that it is gone.
        if self._begun(item) and self._trash.put_back(entry):
            return False
        self._delete(entry)
        return True

    def _begun(self, item: Item) -> bool:
        """Whether somebody began to use the item since it was listed."""
        run = item.run is not None and is_alive(self.settings.runs_dir / item.run)
        if run or has_changed(item, self.settings.data_dir):
            self.notes.append(f"{item.key} stays: somebody began to use it.")
            return True
        return False

    def _delete(self, entry: Path) -> None:
        """Delete an entry of the trash and the copy in the store. If the store is away, the entry stays as a note."""
        trash = self._trash
        key, is_file = trash.key(entry), entry.is_file()
        try:
            self._delete_copy(key, is_file=is_file)
        except StorageError as error:
            trash.empty(entry)
            self.notes.append(f"the copy of {key} in the store stays until the next clean: {error}")
        else:
            trash.delete(entry)

    def _delete_copy(self, key: str, *, is_file: bool) -> None:
        store = store_of(self.settings)
        if store is None or not is_mirrored(key) or (self.settings.data_dir / key).exists():
            return
        if key.startswith("runs/") and not self._owns_copy(store, key.split("/")[1]):
            return
        if is_file:
            store.discard(key)
        else:
            store.remove(key)

    def _owns_copy(self, store: Store, run_id: str) -> bool:
        """Whether this machine is the one that mirrors the run."""
        state = read_mirror(self.settings.runs_dir / run_id, self.settings)
        return not state.taken_over and store.get(f"runs/{run_id}/.holder") == state.token.encode()


def is_mirrored(key: str) -> bool:
    """Whether the store may have a copy of the path."""
    if key.startswith("runs/"):
        return key.partition("/")[2].partition("/")[2].startswith(_MIRRORED_OF_RUN)
    return key.startswith(_MIRRORED)


def _shorten(log: Path, keep_bytes: int) -> None:
    """Keep the end of a log that a process appends to."""
    with log.open("rb") as file:
        file.seek(-min(keep_bytes, log.stat().st_size), os.SEEK_END)
        end = file.read()
    os.truncate(log, 0)  # the process goes on at the new end
    with log.open("ab") as file:
        file.write(end)
