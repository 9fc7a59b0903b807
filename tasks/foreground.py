"""Run a flow in this terminal: embedded Prefect unless a server is set, clean errors, one JSON line last."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from prefect.events.worker import EventsWorker
from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import BaseModel

from infra.errors import InfraError
from infra.logs import get_logger, log_to_console
from infra.servers import check_prefect, prefect_server
from infra.settings import Settings
from rlcore.errors import RlflowError
from tasks.experiments import load_experiment
from tasks.runs import new_run_id

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_DRAIN_SECONDS = 5.0


def main(run_flow: Callable[..., BaseModel], command: str, *, may_change: bool = False) -> None:
    """Parse the command line, call the flow, print its result as the last line.

    Args:
        run_flow: called as ``run_flow(experiment, run_id=...)``.
        may_change: it also takes ``allow_changes``, the command line's --allow-changes.
    """
    options = _parse(command, may_change)
    log_to_console()
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: commit, clean up, say how to continue
        signal.signal(number, _interrupt)
    try:
        overrides = [*_from_data_folder(options.data), *options.set]
        experiment = load_experiment(options.experiment, overrides)
        run_id = options.run_id or new_run_id(experiment.name)
    except (RlflowError, InfraError) as error:
        sys.exit(_say(error))
    try:
        with prefect_api(Settings()):
            result = run_flow(experiment, run_id=run_id, **_allowed(options))
    except (RlflowError, InfraError) as error:
        _say(error)
        _say_how_to_continue(command, run_id)
        sys.exit(EXIT_FAILED)
    except (KeyboardInterrupt, TerminationSignal):
        sys.stderr.write("\nInterrupted; what is committed stays.\n")
        _say_how_to_continue(command, run_id)
        sys.exit(EXIT_INTERRUPTED)
    sys.stdout.write(result.model_dump_json() + "\n")


@contextmanager
def prefect_api(settings: Settings) -> Iterator[None]:
    """The Prefect server that is set, checked; else one of our own over the data folder, gone afterwards."""
    url = PREFECT_API_URL.value()
    if url:
        check_prefect(url, settings.server_timeout_seconds)
        yield
        return
    with prefect_server(settings) as address, temporary_settings({PREFECT_API_URL: f"{address}/api"}):
        get_logger().info("prefect: %s while this runs", address)
        try:
            yield
        finally:
            # What Prefect still has queued goes out while its server is there; later it would hang.
            APILogHandler().flush()
            EventsWorker.drain_all(timeout=_DRAIN_SECONDS)


def _allowed(options: argparse.Namespace) -> dict[str, bool]:
    return {"allow_changes": options.allow_changes} if "allow_changes" in options else {}


def _parse(command: str, may_change: bool) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {command}")
    parser.add_argument("experiment", help="a deployment of prefect.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="training.steps=40, say")
    parser.add_argument("--run-id", help="name of a new run, or of one to continue")
    parser.add_argument("--data", type=Path, help="folder with train and validation files in place of the named ones")
    if may_change:
        text = "go on with other values than the run was started with; it records them in changes.jsonl"
        parser.add_argument("--allow-changes", action="store_true", help=text)
    return parser.parse_args()


def _from_data_folder(folder: Path | None) -> Sequence[str]:
    return [] if folder is None else [f"data.{split}={folder.absolute()}" for split in ("train", "validation")]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _say(error: Exception) -> int:
    sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
    for note in getattr(error, "__notes__", []):
        get_logger().debug(note)
    return EXIT_FAILED


def _say_how_to_continue(command: str, run_id: str) -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--run-id")]
    if "--run-id" in sys.argv:
        words.remove(sys.argv[sys.argv.index("--run-id") + 1])
    data = os.environ.get("RLFLOW_DATA_DIR")
    prefix = f"RLFLOW_DATA_DIR={shlex.quote(data)} " if data else ""
    again = shlex.join([sys.executable, "-m", command, *words, "--run-id", run_id])
    sys.stderr.write(f"Continue with: {prefix}{again}\n")
