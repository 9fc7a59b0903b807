"""Load of this machine (CPU, memory, disk, network, GPUs) as MLflow's system metrics of a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_WAIT_SECONDS = 5.0  # for the last points, at the end


@contextmanager
def system_metrics(uri: str, mlflow_run_id: str, seconds: float) -> Iterator[None]:
    """Inside the block, log ``system/...`` every so many seconds from a thread; 0: never.

    MLflow's monitor stops at the first request that fails. An outage costs its points, and nothing else waits for it.
    """
    if not seconds:
        yield
        return
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    monitor = SystemMetricsMonitor(  # type: ignore[no-untyped-call]
        mlflow_run_id, sampling_interval=seconds, samples_before_logging=1, resume_logging=True, tracking_uri=uri
    )
    monitor.start()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        # in a thread, because it sends the last points: a server that hangs must not keep the flow from its end
        last = threading.Thread(target=monitor.finish, name="system-metrics", daemon=True)
        last.start()
        last.join(_WAIT_SECONDS)
