"""A profiler trace of one training step, asked for while the run goes on: ``touch RUN_FOLDER/profile_step``.

The next step's work of the trainer (log-probs, update, weight sync; the sampler's thousands of decode steps would bury
it) is recorded on every rank and written as Chrome traces to ``profiles/`` of the run's folder, for Perfetto or
chrome://tracing; the report sends them to MLflow.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.profiler import profile

    from rlcore.distributed.ranks import Ranks

logger = logging.getLogger(__name__)

REQUEST, FOLDER = "profile_step", "profiles"  # in a run's folder; tasks/report/result.py knows the second
_FIRST, _LAST = ("logprobs", "update"), "sync_weights"


class ProfiledRanks:
    """Ranks of which those that train are recorded in their next step when the request lies in the run's folder.
    Implements ``Ranks``."""

    def __init__(self, ranks: Ranks, run_dir: Path) -> None:
        self._ranks, self._request, self._folder = ranks, run_dir / REQUEST, run_dir / FOLDER
        self.size = ranks.size
        self._recorded = 0  # ranks, from the first on

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> list[Any]:
        if not self._recorded and method in _FIRST and self._request.exists():
            self._request.unlink()
            self._recorded = len(arguments)
            self._ranks.call("start_trace", [()] * self._recorded)
        results = self._ranks.call(method, arguments, first)
        if self._recorded and method == _LAST:
            traces = self._ranks.call("stop_trace", [()] * self._recorded)
            self._recorded = 0
            self._write(step=arguments[0][0], traces=traces)
        return results

    def stream(self, method: str, arguments: Sequence[tuple[Any, ...]], first: int = 0) -> Iterator[tuple[int, Any]]:
        return self._ranks.stream(method, arguments, first)

    def _write(self, step: int, traces: Sequence[bytes]) -> None:
        self._folder.mkdir(exist_ok=True)
        for rank, trace in enumerate(traces):
            (self._folder / f"step-{step:06d}-rank-{rank}.json.gz").write_bytes(trace)
        logger.info("step %d is in %s", step, self._folder)


class Trace:
    """What this process computes between ``start`` and ``stop``, on the CPU and its GPU."""

    def __init__(self) -> None:
        self._profile: profile | None = None

    def start(self) -> None:
        from torch.profiler import profile

        self._profile = profile(record_shapes=True)  # of every activity that torch supports here
        self._profile.start()

    def stop(self) -> bytes:
        """A Chrome trace, gzipped.

        Raises:
            RuntimeError: not started.
        """
        if self._profile is None:
            raise RuntimeError("stop_trace was called before start_trace")
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json.gz"
            self._profile.export_chrome_trace(str(path))
            self._profile = None
            return path.read_bytes()
