"""What may be removed from the data folder, and why. Pure: an inventory in, one verdict per item out.

Paths are relative to the data folder, with forward slashes. What uses a path also keeps the folders around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

DAY_SECONDS = 24 * 3600.0
TEMPORARY_DAYS = 1  # no step takes as long


class Kind(StrEnum):
    TRASH = "interrupted removals"
    JOBS = "jobs"
    DATASETS = "datasets"
    DUPLICATES = "duplicates"
    DOWNLOADS = "downloads"
    MODELS = "models"
    EVALUATIONS = "evaluations"
    CHECKPOINTS = "checkpoints"
    DAMAGED = "damaged checkpoints"
    TEMPORARY = "temporary files"
    COMPILED = "compiled code"
    STACKS = "stacks of stuck trainers"
    LOGS = "logs"
    PAGES = "pages"
    ABLATIONS = "logs of ablations"
    RECORDS = "records of removed results"
    FLOW_RUNS = "flow runs in Prefect"


_OF_FINISHED_RUNS = frozenset({Kind.CHECKPOINTS, Kind.LOGS, Kind.PAGES})
_SHARED = frozenset({Kind.DATASETS, Kind.DUPLICATES, Kind.MODELS, Kind.EVALUATIONS, Kind.CHECKPOINTS, Kind.FLOW_RUNS})
_BESIDES_QUOTA = frozenset({Kind.TRASH, Kind.FLOW_RUNS})


@dataclass(frozen=True, slots=True)
class Mark:
    """A file whose change shows that somebody began to use an item."""

    key: str
    changed: int | None  # nanoseconds since the epoch; None: there is no such file


@dataclass(frozen=True, slots=True)
class Item:
    """One file, folder or flow run."""

    kind: Kind
    key: str  # its path in the data folder; a path outside of it is absolute; of a flow run its id
    bytes: int
    used: float  # the last change or use, seconds since the epoch
    run: str | None = None  # it is a part of this run
    ablation: str | None = None  # or of this ablation
    held: str | None = None  # why it must stay, whatever its age
    policies: tuple[str, ...] = ()  # an evaluation: what it is of, in each way that its path can be read
    keep_bytes: int = 0  # of a log that is still written to: its last bytes stay
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class RunFacts:
    run_id: str
    alive: bool  # a trainer holds its lease, or its flow runs
    finished: bool
    readable: bool = True  # False: what it uses is not known
    registry_known: bool = True  # False: its MLflow run is in another MLflow, whose registry is not known
    ablation: str | None = None
    uses: frozenset[str] = frozenset()  # datasets, models and flow runs that it needs to go on
    leaderboard: frozenset[str] = frozenset()  # evaluations and checkpoints in its rows
    trunk: str | None = None  # the checkpoint that it was forked from


@dataclass(frozen=True, slots=True)
class AblationFacts:
    name: str
    alive: bool
    finished: bool
    uses: frozenset[str] = frozenset()  # with the checkpoint that its points are forked from
    readable: bool = True


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """A version in MLflow's registry that is neither archived nor deleted, or that has an alias."""

    name: str  # MODEL/VERSION, with its aliases
    run: str | None
    uses: frozenset[str] = frozenset()  # the merged model, its checkpoint, and what it was made from


@dataclass(frozen=True, slots=True)
class UserFacts:
    """A job without a result, or an experiment of prefect.yaml."""

    name: str
    uses: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything that the decision depends on."""

    now: float  # seconds since the epoch
    older_than_days: float
    items: tuple[Item, ...]
    runs: tuple[RunFacts, ...] = ()
    ablations: tuple[AblationFacts, ...] = ()
    versions: tuple[VersionFacts, ...] = ()
    jobs: tuple[UserFacts, ...] = ()
    experiments: tuple[UserFacts, ...] = ()  # of prefect.yaml
    notes: tuple[str, ...] = ()  # what could not be looked at


@dataclass(frozen=True, slots=True)
class Verdict:
    item: Item
    removable: bool
    reason: str  # the same words for all items of the same case
    by: str = ""  # the run, ablation, model or job of the reason


def decide(inventory: Inventory) -> list[Verdict]:
    """The verdict on each item, in their order."""
    return [_Judge(inventory).verdict(item) for item in inventory.items]


def choose(verdicts: Sequence[Verdict], used_bytes: int, limit_bytes: int | None) -> list[Verdict]:
    """Which removable items go. Without a limit all of them, the oldest first. With one, the oldest until the data
    folder is no larger; interrupted removals and flow runs always."""
    oldest_first = sorted((item for item in verdicts if item.removable), key=lambda item: item.item.used)
    if limit_bytes is None:
        return oldest_first
    chosen = [item for item in oldest_first if item.item.kind in _BESIDES_QUOTA]
    left = used_bytes - sum(item.item.bytes for item in chosen)
    for verdict in oldest_first:
        if verdict.item.kind not in _BESIDES_QUOTA and left > limit_bytes:
            chosen.append(verdict)
            left -= verdict.item.bytes
    return chosen


class _Judge:
    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._runs = {run.run_id: run for run in inventory.runs}
        self._ablations = {item.name: item for item in inventory.ablations}
        self._used = _used_by(inventory, self._ablations)
        self._unreadable = next((item.run_id for item in inventory.runs if not item.readable), None) or next(
            (item.name for item in inventory.ablations if not item.readable), None
        )
        self._elsewhere = next((run.run_id for run in inventory.runs if not run.registry_known), None)
        self._alive = next((item.run_id for item in inventory.runs if item.alive), None) or next(
            (item.name for item in inventory.jobs), None
        )
        self._over = {run.run_id for run in inventory.runs if _is_over(run, self._ablations)}
        self._origins_of_models = {version.run: version.name for version in inventory.versions if version.run}

    def verdict(self, item: Item) -> Verdict:
        why = next(self._reasons_to_stay(item), None)
        if why is not None:
            return Verdict(item, False, *why)
        if item.kind is Kind.TRASH:
            return Verdict(item, True, "its removal was interrupted")
        if item.keep_bytes:
            return Verdict(item, True, f"too long; its last {item.keep_bytes / 2**20:.0f} MiB stay")
        if item.kind is Kind.RECORDS:
            return Verdict(item, True, "what it names is gone")
        return Verdict(item, True, f"unused for {_days(self._days(item))}, and nothing refers to it")

    def _days(self, item: Item) -> float:
        return TEMPORARY_DAYS if item.kind is Kind.TEMPORARY else self._inventory.older_than_days

    def _reasons_to_stay(self, item: Item) -> Iterator[tuple[str, str]]:
        """Reason and who it is about, the most telling first."""
        if item.kind is Kind.TRASH:
            return
        if item.held is not None:
            yield item.held, ""
        yield from self._of_its_run(item)
        yield from self._of_its_ablation(item)
        for policy in item.policies:
            run = self._run_of(policy)
            if run is not None and (run.alive or run.run_id not in self._over):
                yield "an evaluation of a run that is alive or can be continued", run.run_id
        for path in (item.key, *item.policies):
            if path in self._used:
                yield self._used[path]
        if item.kind in _SHARED and self._unreadable is not None:
            yield "a run or ablation cannot be read, and may refer to it", self._unreadable
        if item.kind in _SHARED - {Kind.FLOW_RUNS} and self._elsewhere is not None:
            yield "MLflow does not know a run, and another MLflow's registry may refer to it", self._elsewhere
        if item.kind is Kind.COMPILED and self._alive is not None:
            yield "something runs and may use it", self._alive
        if not item.keep_bytes and self._inventory.now - item.used < self._days(item) * DAY_SECONDS:
            yield f"made or used within {_days(self._days(item))}", ""

    def _run_of(self, policy: str) -> RunFacts | None:
        """The run of a checkpoint."""
        parts = PurePosixPath(policy).parts
        return self._runs.get(parts[1]) if len(parts) > 1 and parts[0] == "runs" else None

    def _of_its_run(self, item: Item) -> Iterator[tuple[str, str]]:
        run = self._runs.get(item.run) if item.run is not None else None
        if run is None:
            return
        if not run.readable:
            yield "its run cannot be read", run.run_id
        if run.alive:
            yield "its run is alive", run.run_id
        if item.kind in _OF_FINISHED_RUNS and run.run_id not in self._over:
            yield "its run is not finished and can be continued", run.run_id
        if item.kind is Kind.PAGES and run.run_id in self._origins_of_models:
            yield "a registered model came from its run", self._origins_of_models[run.run_id]
        ablation = self._ablations.get(run.ablation) if run.ablation is not None else None
        if item.kind in _OF_FINISHED_RUNS and ablation is not None and not ablation.finished:
            yield "its ablation is not finished", ablation.name

    def _of_its_ablation(self, item: Item) -> Iterator[tuple[str, str]]:
        ablation = self._ablations.get(item.ablation) if item.ablation is not None else None
        if ablation is not None and (ablation.alive or not ablation.finished):
            yield "its ablation is not finished", ablation.name


def _days(number: float) -> str:
    return f"{number:g} day{'' if number == 1 else 's'}"


def _is_over(run: RunFacts, ablations: Mapping[str, AblationFacts]) -> bool:
    """Whether nobody continues the run: it is finished, or its ablation is, which has dropped it or seen it fail."""
    ablation = ablations.get(run.ablation) if run.ablation is not None else None
    return run.finished or (run.readable and ablation is not None and ablation.finished)


def _used_by(inventory: Inventory, ablations: Mapping[str, AblationFacts]) -> Mapping[str, tuple[str, str]]:
    """Path to the first reason why it stays, and who it is about."""
    used: dict[str, tuple[str, str]] = {}
    for paths, reason, by in _references(inventory, ablations):
        for path in sorted(paths):
            for key in (path, *map(str, PurePosixPath(path).parents)):
                used.setdefault(key, (reason, by))
    return used


def _references(
    inventory: Inventory, ablations: Mapping[str, AblationFacts]
) -> Iterator[tuple[frozenset[str], str, str]]:
    for run in inventory.runs:
        if run.alive or not _is_over(run, ablations):
            yield run.uses, "a run that is alive or can be continued uses it", run.run_id
    for ablation in inventory.ablations:
        if ablation.alive or not ablation.finished:
            yield ablation.uses, "an unfinished ablation uses it", ablation.name
    for job in inventory.jobs:
        yield job.uses, "a job at work uses it", job.name
    for version in inventory.versions:
        yield version.uses, "a registered model in use refers to it", version.name
    for run in inventory.runs:
        yield run.leaderboard, "the leaderboard names it", run.run_id
        if run.trunk is not None:
            yield frozenset({run.trunk}), "a fork starts from it", run.run_id
    for experiment in inventory.experiments:
        yield experiment.uses, "an experiment of prefect.yaml names it", experiment.name
