"""Run a flow in this terminal: embedded Prefect unless a server is set, clean errors, one JSON line last."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.events.worker import EventsWorker
from prefect.exceptions import ParameterTypeError, TerminationSignal
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_URL, temporary_settings
from pydantic import BaseModel

from infra import processes
from infra.errors import InfraError
from infra.logs import get_logger, log_to_console
from infra.servers import check_prefect, prefect_answers, prefect_server
from infra.settings import Settings
from rlcore.errors import RlflowError
from tasks.estimate import DEVICES, dry_run
from tasks.experiments import load_experiment
from tasks.runs import new_run_id

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_DRAIN_SECONDS = 5.0
_ALIVE_SECONDS = 5.0  # in which a server answers
_PATIENCE_SECONDS = 10.0  # for what ends by itself


def main(
    run_flow: Callable[..., BaseModel],
    command: str,
    *,
    trains: bool = False,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Parse the command line, call the flow, print its result as the last line.

    Args:
        run_flow: called as ``run_flow(experiment, overrides=..., run_id=...)``, with the experiment's name.
        trains: it also takes ``allow_changes``, the command line's --allow-changes, and there is --dry-run.
        options: further ones, as argparse takes them; each is passed to the flow under its name.
    """
    chosen, further = _parse(command, trains, options or {})
    try:
        overrides = [*_from_data_folder(chosen.data), *chosen.set]
        experiment = load_experiment(chosen.experiment, overrides)  # a mistake is told before a server starts
        if trains and chosen.dry_run:
            log_to_console()
            sys.stdout.write(dry_run(experiment, chosen.dry_run).model_dump_json() + "\n")
            return
        run_id = chosen.run_id or new_run_id(chosen.experiment)
    except (RlflowError, InfraError) as error:
        sys.exit(_say(error))
    run_once(
        lambda: run_flow(chosen.experiment, overrides=overrides, run_id=run_id, **further),
        lambda: _say_how_to_continue(command, run_id),
    )


def run_once(
    call: Callable[[], BaseModel],
    say_how_to_continue: Callable[[], None] = lambda: None,
    *,
    ends_with_parent: bool = False,
) -> None:
    """Call a flow with a Prefect server at hand, print its result as the last line; exit codes and words for errors
    and interrupts.

    Args:
        ends_with_parent: this process was started with ``processes.start(..., ends_with_parent=True)``.
    """
    log_to_console()
    if ends_with_parent:
        watch = threading.Thread(target=_end_without_server, args=(PREFECT_API_URL.value(), os.getppid()), daemon=True)
        watch.start()
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: commit, clean up, say how to continue
        signal.signal(number, _interrupt)
    try:
        with prefect_api(Settings()):
            result = call()
    except (RlflowError, InfraError, ParameterTypeError) as error:
        _say(error)
        say_how_to_continue()
        sys.exit(EXIT_FAILED)
    except (KeyboardInterrupt, TerminationSignal):
        sys.stderr.write("\nInterrupted; what is committed stays.\n")
        say_how_to_continue()
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


def _parse(
    command: str, trains: bool, options: Mapping[str, Mapping[str, Any]]
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """What every flow takes, and what this one takes beyond that."""
    parser = argparse.ArgumentParser(prog=f"python -m {command}")
    parser.add_argument("experiment", help="a deployment of prefect.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="training.steps=40, say")
    parser.add_argument("--run-id", help="name of a new run, or of one to continue")
    parser.add_argument("--data", type=Path, help="folder with train and validation files in place of the named ones")
    further = [parser.add_argument(flag, **values) for flag, values in options.items()]
    if trains:
        text = f"only estimate memory and time, on {', '.join(DEVICES)} (H100 unless named), and do nothing"
        parser.add_argument("--dry-run", nargs="?", const="H100", choices=DEVICES, metavar="DEVICE", help=text)
        text = "go on with other values than the run was started with; it records them in changes.jsonl"
        further.append(parser.add_argument("--allow-changes", action="store_true", help=text))
    chosen = parser.parse_args()
    return chosen, {option.dest: getattr(chosen, option.dest) for option in further}


def _from_data_folder(folder: Path | None) -> Sequence[str]:
    return [] if folder is None else [f"data.{split}={folder.absolute()}" for split in ("train", "validation")]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _end_without_server(url: str | None, parent: int) -> None:
    """Whoever killed the command that had started this process has killed its server as well. Then, once no trainer or
    job is left to wait for, the process ends: Prefect would report the interrupt to that server for two minutes."""
    since = time.monotonic()
    while url:
        time.sleep(1.0)
        if os.getppid() == parent or processes.has_children() or prefect_answers(url, _ALIVE_SECONDS):
            since = time.monotonic()
        elif time.monotonic() - since > _PATIENCE_SECONDS:
            sys.stderr.write(f"\nInterrupted, and no Prefect server is left at {url}; what is committed stays.\n")
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)


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
