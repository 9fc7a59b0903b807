"""Run a flow in this terminal: an embedded Prefect server if none is set, short errors, the result as one JSON line."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from prefect.events.worker import EventsWorker
from prefect.exceptions import ParameterTypeError, TerminationSignal
from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from pydantic import BaseModel

from infra import processes
from infra.errors import InfraError
from infra.logs import get_logger, log_to_console
from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.servers import check_prefect, prefect_answers, prefect_server
from rlcore.errors import RlflowError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_DRAIN_SECONDS = 5.0
_ALIVE_SECONDS = 5.0  # limit for a server to answer
_PATIENCE_SECONDS = 10.0  # for processes to end by themselves


def overrides_of(given: Sequence[str] | None, data: str | None) -> list[str]:
    """The options --set and --data as ``key=value`` overrides."""
    if data is not None and "://" not in data:
        data = str(Path(data).expanduser().absolute())
    splits = [] if data is None else [f"data.{split}={data}" for split in ("train", "validation")]
    return [*splits, *(given or ())]


def run_once(
    call: Callable[[], BaseModel],
    say_how_to_continue: Callable[[], None] = lambda: None,
    *,
    module: str | None = None,
    ends_with_parent: bool = False,
) -> None:
    """Call a flow with a Prefect server and print its result as the last line. Errors set the exit code.

    Args:
        module: of the flow, if it is not imported yet; imported while an embedded server starts.
        ends_with_parent: this process was started with ``processes.start(..., ends_with_parent=True)``.
    """
    log_to_console()
    if ends_with_parent:
        watch = threading.Thread(target=_end_without_server, args=(PREFECT_API_URL.value(), os.getppid()), daemon=True)
        watch.start()
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: commit, clean up, print how to continue
        signal.signal(number, _interrupt)
    try:
        with prefect_api(Settings(), module):
            result = call()
    except (RlflowError, InfraError, ParameterTypeError) as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        for note in getattr(error, "__notes__", []):
            get_logger().debug(note)
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
def prefect_api(settings: Settings, module: str | None = None) -> Iterator[None]:
    """Check the Prefect server that is set, or run an embedded one over the data folder inside the ``with`` block.

    Args:
        module: imported while an embedded server starts.
    """
    url = PREFECT_API_URL.value()
    if url:
        check_prefect(url, settings.server_timeout_seconds, PREFECT_API_AUTH_STRING.value())
        yield
        return
    with (
        prefect_server(settings, meanwhile=lambda: module and import_module(module)) as address,
        temporary_settings(
            {PREFECT_API_URL: f"{address}/api", PREFECT_API_AUTH_STRING: login_of(settings).text},
        ),
    ):
        get_logger().info("prefect: %s while this runs", address)
        try:
            yield
        finally:
            # Send Prefect's queued logs and events while its server runs; later the client would hang.
            APILogHandler().flush()
            EventsWorker.drain_all(timeout=_DRAIN_SECONDS)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _end_without_server(url: str | None, parent: int) -> None:
    """End this process when the command that started it, and so its Prefect server, was killed and no child is left.

    Otherwise Prefect would try for two minutes to report the interrupt to that server.
    """
    since = time.monotonic()
    while url:
        time.sleep(1.0)
        if os.getppid() == parent or processes.has_children() or prefect_answers(url, _ALIVE_SECONDS):
            since = time.monotonic()
        elif time.monotonic() - since > _PATIENCE_SECONDS:
            sys.stderr.write(f"\nInterrupted, and no Prefect server is left at {url}; what is committed stays.\n")
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)


def say_how_to_continue(run_id: str | None = None) -> None:
    """Print the typed command with the run's name. A flow without a run starts again and finds its cached results."""
    typed = sys.argv[1:]
    words = [word for word in typed if not word.startswith("--run-id")]
    if "--run-id" in typed:
        words.remove(typed[typed.index("--run-id") + 1])
    python = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(typed)]]
    program = [sys.argv[0]] if Path(sys.argv[0]).name == "rlflow" else python
    data = os.environ.get("RLFLOW_DATA_DIR")
    prefix = f"RLFLOW_DATA_DIR={shlex.quote(data)} " if data else ""
    sys.stderr.write(
        f"Continue with: {prefix}{shlex.join([*program, *words, *(['--run-id', run_id] if run_id else [])])}\n"
    )
