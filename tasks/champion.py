"""The steps of evaluate-latest: find and evaluate new checkpoints, choose the champion, show the leaderboard.

``evaluations.jsonl`` in each run's folder lists the finished evaluations.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.artifacts import create_table_artifact
from pydantic import BaseModel, ConfigDict, ValidationError

from infra.logs import get_logger
from infra.settings import Settings
from rlcore.artifacts import CheckpointRef, EvalReport
from rlcore.config import ExperimentConfig
from rlcore.errors import CheckpointError, ConfigError, RlflowError
from rlcore.segment.store import LocalCheckpointStore, checkpoint_ref, read_manifest
from tasks.data import prepare_and_resize
from tasks.driver.outbox import prefect_outage_named
from tasks.evaluate import evaluate_and_log, evaluate_policy, suite_of
from tasks.experiments import Benchmark, deciding_benchmark
from tasks.models import CHAMPION, bootstrap_policy, merge_checkpoint, register_model
from tasks.retries import step
from tasks.run import Run, append_line, existing_run, tracker_of
from tasks.store.made import send_file

ARTIFACT = "leaderboard"


class Evaluation(BaseModel):
    """One line of ``evaluations.jsonl``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    benchmark: str
    key: str
    report: EvalReport


@dataclass(frozen=True, slots=True)
class Todo:
    """A checkpoint that is not yet evaluated on a benchmark."""

    run: Run
    checkpoint: CheckpointRef
    committed: float  # seconds since the epoch
    benchmark: Benchmark
    suite: ExperimentConfig

    @property
    def key(self) -> str:
        """Identifies the weights and everything that the numbers depend on, but not the machine."""
        config = self.suite.model_dump(mode="json", include={"seed", "model", "data", "reward"})
        config["evaluation"] = self.suite.evaluation.suite()
        content = json.dumps([self.checkpoint.manifest_sha256, config], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def evaluations(run: Run) -> list[Evaluation]:
    path = run.run_dir / "evaluations.jsonl"
    return [Evaluation.model_validate_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def all_runs(settings: Settings) -> list[Run]:
    """Every readable run; the others are reported and skipped."""
    readable = []
    for stored in sorted(settings.runs_dir.glob("*/experiment.json")):
        try:
            readable.append(existing_run(stored.parent.name, settings))
        except (RlflowError, ValidationError) as error:
            get_logger().warning("evaluate-latest: %s is skipped, it cannot be read: %s", stored.parent, error)
    return readable


def newest_unevaluated(benchmarks: Sequence[Benchmark], workers: int | None, tried: Collection[str]) -> Todo | None:
    """The newest committed checkpoint that is not yet evaluated on a benchmark of its experiment; None: there is none.
    Runs of ablations are left out."""
    todos = [
        todo
        for run in all_runs(Settings())
        if not run.ablation_marker.exists()
        for todo in _todos(run, [item for item in benchmarks if run.experiment.name in item.of], workers)
        if todo.key not in tried
    ]
    return max(todos, key=lambda todo: todo.committed, default=None)  # the first benchmark first


def _todos(run: Run, benchmarks: Sequence[Benchmark], workers: int | None) -> list[Todo]:
    if not benchmarks:
        return []
    known = {item.key for item in evaluations(run)}
    todos = []
    for path in LocalCheckpointStore(run.run_dir, run.run_id).newest_first():
        try:
            checkpoint = checkpoint_ref(path, read_manifest(path))
            committed = (path / "manifest.json").stat().st_mtime
        except (CheckpointError, FileNotFoundError):  # incomplete, or removed in the meantime
            continue
        for benchmark in benchmarks:
            todo = Todo(run, checkpoint, committed, benchmark, suite_of(run, benchmark.like, workers=workers))
            if todo.key not in known:
                todos.append(todo)
    return todos


def evaluate_todo(todo: Todo) -> Evaluation:
    """Evaluate, log the numbers to the run in MLflow, and add a line to its ``evaluations.jsonl``.

    Raises:
        RlflowError: a step failed, or the run has removed the checkpoint meanwhile.
    """
    base = bootstrap_policy(todo.run.experiment.model)
    problems = prepare_and_resize(todo.suite, "validation")
    report = evaluate_and_log(todo.run, todo.suite, todo.checkpoint, base, problems, todo.benchmark.name)
    done = Evaluation(benchmark=todo.benchmark.name, key=todo.key, report=report)
    note_evaluation(todo.run, done)
    return done


@step("note-evaluation")
def note_evaluation(run: Run, done: Evaluation) -> None:
    """Add the evaluation to the run's folder and send it to the store. Safe to repeat."""
    known = run.run_dir / "evaluations.jsonl"
    if done not in evaluations(run):
        append_line(known, done.model_dump_json())
    send_file(known, Settings())


def promote(todo: Todo, done: Evaluation, confidence: float) -> None:
    """Make the checkpoint its experiment's champion if the sequential test calls it better than the old champion, on
    the first benchmark of the experiment. A champion is merged, verified and registered like the end of a run."""
    if deciding_benchmark(todo.run.experiment.name) == todo.benchmark.name and judge(todo, done, confidence).promote:
        run, base = todo.run, bootstrap_policy(todo.run.experiment.model)
        train = prepare_and_resize(run.experiment, "train")
        model = merge_checkpoint(run.experiment, todo.checkpoint, base, train)
        register_model(run, model, todo.checkpoint, done.report, alias=CHAMPION, benchmark=todo.benchmark.name)


@dataclass(frozen=True, slots=True)
class Verdict:
    promote: bool
    reason: str
    compared: bool = True  # False: nothing of the champion is left to compare with


@step("judge-champion", timeout_seconds=12 * 3600)  # it may evaluate the old champion
def judge(todo: Todo, done: Evaluation, confidence: float) -> Verdict:
    """Compare with the old champion, paired over the problems of the benchmark.

    Args:
        confidence: 1 - the error rate of the sequential test, whose verdict decides.
    """
    verdict = _compare_with_champion(todo, done, confidence)
    name = f"{todo.run.experiment.name}, step {todo.checkpoint.step} of {todo.run.run_id}"
    get_logger().log(logging.INFO if verdict.compared else logging.WARNING, "champion: %s: %s", name, verdict.reason)
    return verdict


def _compare_with_champion(todo: Todo, done: Evaluation, confidence: float) -> Verdict:
    from rlcore.evaluation.comparison import Evaluated, compare_on_suite, compare_pair
    from rlcore.evaluation.rows import accuracy_per_problem, read_rows

    settings, name = Settings(), todo.run.experiment.name
    tags = tracker_of(todo.run, settings).tags_at(name, CHAMPION)
    if tags is None:
        return Verdict(True, "the first champion")
    rows = read_rows(Path(done.report.table))
    champion = Champion.of(tags)
    table = _table_of(champion, todo, settings)
    if table is not None:
        old, new = (
            Evaluated(policy, done.benchmark, dataset_digest="", step=None, rows=found)
            for policy, found in ((str(champion), read_rows(table)), (todo.run.run_id, rows))
        )
        result = compare_on_suite(old, [new], 1 - confidence).policies[1].against_first
        assert result is not None  # of the second policy
        return Verdict(result.verdict == "better", f"{result} against the champion, {champion}")
    if champion.accuracy is not None and champion.dataset_digest == done.report.dataset_digest:
        after = accuracy_per_problem(rows)
        result = compare_pair(dict.fromkeys(after, champion.accuracy), after, 1 - confidence)
        return Verdict(
            result.verdict == "better",
            f"{result} against the champion's recorded accuracy, because neither the run nor the merged model of "
            f"{champion} is on this machine",
        )
    return Verdict(
        False,
        f"nothing to compare with: the champion, {champion}, has no evaluation on {done.benchmark}, and neither its "
        f"run nor its merged model is on this machine. It stays the champion. To let the next evaluated checkpoint "
        f"replace it, delete the alias {CHAMPION} of the model {name} in MLflow.",
        compared=False,
    )


@dataclass(frozen=True, slots=True)
class Champion:
    """The tags of the model version under the alias. A version that a person registered may have none of them."""

    run_id: str | None
    step: int | None
    folder: Path | None  # the merged model, where it was made
    accuracy: float | None  # when it was registered, on the dataset of this digest
    dataset_digest: str | None

    @classmethod
    def of(cls, tags: Mapping[str, str]) -> Champion:
        return cls(
            run_id=tags.get("rlflow.run_id"),
            step=int(tags["rlflow.step"]) if "rlflow.step" in tags else None,
            folder=Path(tags["rlflow.path"]) if "rlflow.path" in tags else None,
            accuracy=float(tags["eval.accuracy"]) if "eval.accuracy" in tags else None,
            dataset_digest=tags.get("eval.dataset_digest"),
        )

    def __str__(self) -> str:
        return f"step {self.step} of {self.run_id}" if self.run_id else "a version that rlflow did not register"


def _table_of(champion: Champion, todo: Todo, settings: Settings) -> Path | None:
    """The champion's completions on the same benchmark: the latest of its run, else from evaluating its merged model.
    None: this machine has neither."""
    if champion.run_id is not None:
        try:
            known = evaluations(existing_run(champion.run_id, settings))
        except ConfigError:  # its folder was removed, or is on another machine
            known = []
        for item in reversed(known):
            table = Path(item.report.table)
            if (item.benchmark, item.report.step) == (todo.benchmark.name, champion.step) and table.exists():
                return table
    if champion.folder is None or not (champion.folder / "config.json").exists():
        return None
    model = todo.suite.model.model_copy(update={"path": str(champion.folder)})
    merged_model = bootstrap_policy(model)
    problems = prepare_and_resize(todo.suite, "validation")
    suite = todo.suite.model_copy(update={"model": model})
    return Path(evaluate_policy(suite, merged_model, merged_model, problems).table)


@step("show-leaderboard")
def show_leaderboard() -> None:
    """Show a table of every evaluation in Prefect, the best of each benchmark first."""
    settings = Settings()
    rows: list[dict[str, Any]] = []
    for run in all_runs(settings):
        known = evaluations(run)
        tags = tracker_of(run, settings).tags_at(run.experiment.name, CHAMPION) if known else None
        champion = Champion.of(tags or {})
        rows += [
            {
                "benchmark": item.benchmark,
                "accuracy": round(item.report.accuracy, 4),
                "95% interval": f"[{item.report.accuracy_low:.3f}, {item.report.accuracy_high:.3f}]",
                "experiment": run.experiment.name,
                "run": run.run_id,
                "step": item.report.step,
                "champion": CHAMPION if (champion.run_id, champion.step) == (run.run_id, item.report.step) else "",
            }
            for item in known
        ]
    rows.sort(key=lambda row: (row["benchmark"], -row["accuracy"]))
    if rows:
        with prefect_outage_named():
            about = "Evaluated checkpoints, the best of each benchmark first."
            create_table_artifact(rows, key=ARTIFACT, description=about)
