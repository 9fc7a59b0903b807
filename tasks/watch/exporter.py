"""Runs and the load of this machine as Prometheus metrics: ``rlflow metrics``.

Only runs at work, and those that moved within the last day, have series, so that old runs do not fill Prometheus.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from infra.load import MachineLoad, machine_load
from infra.settings import Settings
from infra.stack.apps import PasswordRequired
from infra.stack.login import login_file, login_of
from infra.store.disk import usage_of
from tasks.watch.facts import AT_WORK, RunView, State, Watch

_RECENT_SECONDS = 86_400.0
_SPACE_SECONDS = 300.0  # between two walks through the data folder
_RUN = ("run", "experiment")
_GPU = ("gpu", "name")


@dataclass(frozen=True, slots=True)
class OfRun:
    """A number of each run. None: the run has none yet, and so no series."""

    name: str
    help: str
    value: Callable[[RunView], float | None]
    counts: bool = False  # a counter, whose name gets _total


OF_RUNS = (
    OfRun("rlflow_run_step", "Last optimizer step in the journal.", lambda view: view.step),
    OfRun("rlflow_run_steps", "Optimizer steps that the run takes in all.", lambda view: view.steps),
    OfRun(
        "rlflow_run_progress_timestamp_seconds", "Time of the last step, or of the last start.", lambda view: view.at
    ),
    OfRun("rlflow_run_reward", "reward/mean of the last step.", lambda view: view.metrics.get("reward/mean")),
    OfRun("rlflow_run_accuracy", "reward/accuracy of the last step.", lambda view: view.metrics.get("reward/accuracy")),
    OfRun(
        "rlflow_run_tokens_per_second",
        "Prompt and completion tokens per second of the last step.",
        lambda view: view.metrics.get("system/tokens_per_second"),
    ),
    OfRun("rlflow_run_step_seconds", "Seconds per step over the last ten steps.", lambda view: view.seconds_per_step),
    OfRun("rlflow_run_left_seconds", "Seconds until the last step at that pace.", lambda view: view.seconds_left),
    OfRun("rlflow_run_health_warnings", "Health rules that warned.", lambda view: view.warnings, counts=True),
    OfRun("rlflow_run_failures", "Failed tries of the trainer.", lambda view: view.failures, counts=True),
)


class DataSpace:
    """The size of the data folder, measured by a thread, because a walk through a large folder takes long."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.bytes: int | None = None  # None: not measured yet
        threading.Thread(target=self._repeat, name="data-space", daemon=True).start()

    def _repeat(self) -> None:
        while True:
            self.bytes = usage_of(self._settings.data_dir).bytes
            time.sleep(_SPACE_SECONDS)


class Exporter(Collector):
    """Looks at the data folder at each scrape."""

    def __init__(self, settings: Settings, space: DataSpace, *, now: Callable[[], float] = time.time) -> None:
        self._settings, self._space, self._now = settings, space, now
        self._watch = Watch(settings)
        self._lock = threading.Lock()  # two scrapes at a time share the watch

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            views = self._watch.look()
            load = machine_load(self._settings.data_dir)
        since = self._now() - _RECENT_SECONDS
        shown = [view for view in views if view.state in AT_WORK or view.at >= since]
        yield _states(shown)
        yield from (_of_runs(item, shown) for item in OF_RUNS)
        yield from self._of_machine(load)
        yield from _of_gpus(load)

    def _of_machine(self, load: MachineLoad) -> Iterator[Metric]:
        quota = self._settings.max_gib * 2**30
        for name, text, value in (
            ("rlflow_cpu_ratio", "Share of all cores at work since the last scrape.", load.cpu),
            ("rlflow_memory_used_bytes", "Memory in use on this machine.", load.memory_used),
            ("rlflow_memory_total_bytes", "Memory of this machine.", load.memory_total),
            ("rlflow_disk_free_bytes", "Free space of the data folder's file system.", load.disk_free),
            ("rlflow_data_bytes", "Size of the data folder, measured every five minutes.", self._space.bytes),
            ("rlflow_data_quota_bytes", "RLFLOW_MAX_GIB; no series without a quota.", quota or None),
        ):
            yield _family(name, text, (), [] if value is None else [((), value)])


def _family(name: str, text: str, labels: tuple[str, ...], values: Sequence[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for own, value in values:
        family.add_metric(own, value)
    return family


def _states(views: list[RunView]) -> Metric:
    """One series per run and state: 1 for the state that it has, 0 for the others."""
    family = GaugeMetricFamily("rlflow_run_state", "1: the run has this state.", labels=(*_RUN, "state"))
    for view in views:
        for state in State:
            family.add_metric((view.run_id, view.experiment, state.value), float(view.state is state))
    return family


def _of_runs(item: OfRun, views: list[RunView]) -> Metric:
    kind = CounterMetricFamily if item.counts else GaugeMetricFamily
    family = kind(item.name, item.help, labels=_RUN)
    for view in views:
        if view.state is not State.UNREADABLE and (value := item.value(view)) is not None:
            family.add_metric((view.run_id, view.experiment), value)
    return family


def _of_gpus(load: MachineLoad) -> Iterator[Metric]:
    labels = {gpu.index: (str(gpu.index), gpu.name) for gpu in load.gpus}
    busy = [(labels[gpu.index], gpu.busy) for gpu in load.gpus if gpu.busy is not None]
    yield _family("rlflow_gpu_ratio", "Share of the time in which a kernel was at work.", _GPU, busy)
    used = [(labels[gpu.index], float(gpu.memory_used)) for gpu in load.gpus]
    yield _family("rlflow_gpu_memory_used_bytes", "GPU memory in use.", _GPU, used)
    total = [(labels[gpu.index], float(gpu.memory_total)) for gpu in load.gpus]
    yield _family("rlflow_gpu_memory_total_bytes", "GPU memory.", _GPU, total)


def endpoint(settings: Settings, *, login: bool) -> ASGIApp:
    """``/metrics`` and ``/health``. Host names are checked as for the stack's servers.

    Args:
        login: require the stack's login, as Prefect and MLflow do.
    """
    registry = CollectorRegistry()
    registry.register(Exporter(settings, DataSpace(settings)))

    def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def health(_: Request) -> Response:
        return PlainTextResponse("OK\n")

    app: ASGIApp = Starlette(routes=[Route("/metrics", metrics), Route("/health", health)])
    if login:
        where = f"user:password is in {login_file(settings)}, for basic_auth of Prometheus"
        app = PasswordRequired(app, login_of(settings), name="The metrics endpoint", where=where)
    return TrustedHostMiddleware(app, allowed_hosts=settings.names, www_redirect=False)
