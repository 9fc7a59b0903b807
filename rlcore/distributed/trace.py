"""A profiler trace of one training step of a running trainer, requested by ``touch RUN_FOLDER/profile_step``.

Every rank records the trainer's work in the next step: log-probs, update, weight sync. The sampler is left out, because
its thousands of decode steps would hide the rest. The result is a Chrome trace per rank in ``profiles/`` of the run's
folder, for Perfetto or chrome://tracing. The report sends them to MLflow.
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlcore.distributed.ranks import RankRange

if TYPE_CHECKING:
    from torch.profiler import profile

logger = logging.getLogger(__name__)

REQUEST, FOLDER = "profile_step", "profiles"  # in a run's folder; tasks/report/result.py knows the second


class Traced(Protocol):
    trace: Trace


class StepTrace:
    """Records one step on the ranks that train, if the run's folder contains a request."""

    def __init__(self, trainers: RankRange[Traced], run_dir: Path | None) -> None:
        self._trainers, self._run_dir, self._recording = trainers, run_dir, False

    def begin(self) -> None:
        """Start recording if requested. Call it before the work of a step."""
        if self._recording or self._run_dir is None or not (self._run_dir / REQUEST).exists():
            return
        (self._run_dir / REQUEST).unlink()
        self._recording = True
        self._trainers.each(lambda worker: worker.trace.start())

    def end(self, step: int) -> None:
        """Write the recorded traces. Call it after the work of a step."""
        if not self._recording or self._run_dir is None:
            return
        self._recording = False
        folder = self._run_dir / FOLDER
        traces = self._trainers.each(lambda worker: worker.trace.stop())
        folder.mkdir(exist_ok=True)
        for rank, trace in enumerate(traces):
            (folder / f"step-{step:06d}-rank-{rank}.json.gz").write_bytes(trace)
        logger.info("the trace of step %d is in %s", step, folder)


class Trace:
    """Records what this process computes between ``start`` and ``stop``, on the CPU and its GPU."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        from torch.profiler import profile

        self._profile = profile(record_shapes=True)  # all activities that torch supports here
        self._profile.start()

    def stop(self) -> bytes:
        """A Chrome trace, gzipped.

        Raises:
            RuntimeError: not started.
        """
        if self._profile is None:
            raise RuntimeError("stop was called before start: nothing is being traced")
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json.gz"
            self._profile.export_chrome_trace(str(path))
            self._profile = None
            return path.read_bytes()
