"""evaluate-latest: evaluate every committed checkpoint on the benchmarks of its experiment, the newest first."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from infra.logs import get_logger
from infra.processes import alone
from infra.settings import Settings
from rlcore.errors import RlflowError
from tasks import experiments as form
from tasks.champion import evaluate_todo, newest_unevaluated, promote, show_leaderboard
from tasks.experiments import load_benchmarks


@flow(name="evaluate-latest")
def evaluate_latest(
    benchmarks: form.Benchmarks = None, workers: form.Workers = None, confidence: form.Confidence = 0.95
) -> None:
    """Started by a schedule and by each committed checkpoint; only one runs at a time over a data folder.

    A failed evaluation does not stop the others; the flow then fails with the first error. A checkpoint that the run
    removes meanwhile (``segment.keep_checkpoints``) is left out.
    """
    chosen = load_benchmarks(benchmarks)
    failures: list[RlflowError] = []
    tried: set[str] = set()
    with alone(Settings(), "evaluate-latest") as mine:
        while mine and (todo := newest_unevaluated(chosen, workers, tried)) is not None:
            tried.add(todo.key)
            try:
                promote(todo, evaluate_todo(todo), confidence)
            except RlflowError as error:
                if Path(todo.checkpoint.path).is_dir():
                    failures.append(error)
                else:
                    get_logger().info("eval: %s was removed before it was evaluated", todo.checkpoint.path)
        if tried:
            show_leaderboard()
    if failures:
        raise failures[0]
