"""Run a flow in this terminal: embedded Prefect unless a server is set, clean errors, one JSON line last."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import Flow
from prefect.events.worker import EventsWorker
from prefect.exceptions import ParameterTypeError, TerminationSignal
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from pydantic import BaseModel

from infra import processes
from infra.errors import InfraError
from infra.login import login_of
from infra.logs import get_logger, log_to_console
from infra.servers import check_prefect, prefect_answers, prefect_server
from infra.settings import Settings
from rlcore.errors import RlflowError
from tasks.estimate import DEVICES, dry_run
from tasks.runs import new_run_id

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_DRAIN_SECONDS = 5.0
_ALIVE_SECONDS = 5.0  # in which a server answers
_PATIENCE_SECONDS = 10.0  # for what ends by itself


def main(
    run_flow: Flow[..., Any],
    command: str,
    check: Callable[..., Any],
    *,
    estimates: bool = False,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Parse the command line, call the flow, print its result as the last line.

    The command line follows the flow's parameters: NAME is ``experiment``, --run-id is ``run_id``, --set and --data are
    ``overrides``, --allow-changes is ``allow_changes``. A parameter without a default is required. The parser refuses
    what the flow does not take.

    Args:
        check: called with the flow's arguments before a server starts; raises what is wrong with them.
        estimates: there is --dry-run, for the experiment that ``check`` then returns.
        options: further ones, as argparse takes them; each is passed to the flow under its name.
    """
    chosen = _parser(run_flow, command, options or {}, estimates=estimates).parse_args()
    device = vars(chosen).pop("dry_run", None)
    try:
        arguments = _arguments(chosen)
        checked = check(**arguments)
        if device:
            log_to_console()
            sys.stdout.write(dry_run(checked, device).model_dump_json() + "\n")
            return
    except (RlflowError, InfraError) as error:
        sys.exit(_say(error))
    run_once(lambda: run_flow(**arguments), lambda: _say_how_to_continue(command, arguments.get("run_id")))


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
    except BaseException as error:
        if not was_interrupted(error):
            raise
        sys.stderr.write("\nInterrupted; what is committed stays.\n")
        say_how_to_continue()
        sys.exit(EXIT_INTERRUPTED)
    sys.stdout.write(result.model_dump_json() + "\n")


def was_interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt is the error or its cause.

    An interrupt while Prefect makes a task run ends in a ValueError of Prefect.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt | TerminationSignal):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def prefect_api(settings: Settings) -> Iterator[None]:
    """The Prefect server that is set, checked; else one of our own over the data folder, gone afterwards."""
    url = PREFECT_API_URL.value()
    if url:
        check_prefect(url, settings.server_timeout_seconds, PREFECT_API_AUTH_STRING.value())
        yield
        return
    with (
        prefect_server(settings) as address,
        temporary_settings(
            {PREFECT_API_URL: f"{address}/api", PREFECT_API_AUTH_STRING: login_of(settings).text},
        ),
    ):
        get_logger().info("prefect: %s while this runs", address)
        try:
            yield
        finally:
            # What Prefect still has queued goes out while its server is there; later it would hang.
            APILogHandler().flush()
            EventsWorker.drain_all(timeout=_DRAIN_SECONDS)


def _parser(
    run_flow: Flow[..., Any], command: str, options: Mapping[str, Mapping[str, Any]], *, estimates: bool
) -> argparse.ArgumentParser:
    """One argument for each of the flow's parameters that a command line has."""
    parser = argparse.ArgumentParser(prog=f"python -m {command}")
    required, shown = run_flow.parameters.required, run_flow.parameters.properties
    if "experiment" in shown:
        text = shown["experiment"]["description"]
        parser.add_argument("experiment", nargs=None if "experiment" in required else "?", metavar="NAME", help=text)
    if "run_id" in shown:
        text = shown["run_id"]["description"]
        parser.add_argument("--run-id", metavar="RUN", required="run_id" in required, help=text)
    if "overrides" in shown:
        parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help="training.steps=40, say"
        )
        text = "folder with train and validation files in place of the named ones, or its URI (s3://bucket/folder)"
        parser.add_argument("--data", metavar="FOLDER", help=text)
    for flag, values in options.items():
        parser.add_argument(flag, **values)
    if "allow_changes" in shown:
        parser.add_argument("--allow-changes", action="store_true", help=shown["allow_changes"]["description"])
    if estimates:
        text = f"only estimate memory and time, on {', '.join(DEVICES)} (H100 unless named), and do nothing"
        parser.add_argument("--dry-run", nargs="?", const="H100", choices=DEVICES, metavar="DEVICE", help=text)
    return parser


def _arguments(chosen: argparse.Namespace) -> dict[str, Any]:
    """The flow's arguments. A new run gets its name here, so that an interrupt can say how to continue it."""
    arguments = vars(chosen)
    if "overrides" in arguments:
        folder = arguments.pop("data")
        if folder is not None and "://" not in folder:
            folder = Path(folder).expanduser().absolute()
        splits = [] if folder is None else [f"data.{split}={folder}" for split in ("train", "validation")]
        arguments["overrides"] = [*splits, *arguments["overrides"]]
    if "run_id" in arguments and arguments["run_id"] is None:
        arguments["run_id"] = new_run_id(arguments["experiment"])
    return arguments


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


def _say_how_to_continue(command: str, run_id: str | None) -> None:
    """A flow without a run begins anew; what it has cached stays."""
    words = [word for word in sys.argv[1:] if not word.startswith("--run-id")]
    if "--run-id" in sys.argv:
        words.remove(sys.argv[sys.argv.index("--run-id") + 1])
    data = os.environ.get("RLFLOW_DATA_DIR")
    prefix = f"RLFLOW_DATA_DIR={shlex.quote(data)} " if data else ""
    again = shlex.join([sys.executable, "-m", command, *words, *(["--run-id", run_id] if run_id else [])])
    sys.stderr.write(f"Continue with: {prefix}{again}\n")
