"""Runs and the load of this machine as a table in a terminal: ``rlflow top``."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from infra.load import GpuLoad, MachineLoad
from tasks.driver.progress import duration
from tasks.watch.facts import AT_WORK, RunView, State

_BLOCKS = "▁▂▃▄▅▆▇█"
_GIB = 2**30
_COLUMNS = ("run", "state", "step", "reward", "curve", "s/step", "left", "last warning")
_RIGHT = frozenset({"step", "reward", "s/step", "left"})
_LONG = frozenset({"run", "experiment", "last warning"})  # these wrap in a narrow terminal
_COLOURS = {
    State.TRAINS: "green", State.PREPARES: "cyan", State.EVALUATES: "cyan", State.WAITS: "yellow",
    State.FAILED: "red", State.CRASHED: "red", State.UNREADABLE: "red", State.FINISHED: "dim", State.STOPPED: "dim",
    State.AWAY: "cyan",
}  # fmt: skip


def sparkline(values: Sequence[float]) -> str:
    """One character per value, the lowest of them ▁ and the highest █. Values that are no number are blank."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(
        _BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1)) if span else 0] if math.isfinite(value) else " "
        for value in values
    )


def page(views: Sequence[RunView], load: MachineLoad, rows: int) -> Group:
    """The load, and a table of at most ``rows`` runs. Runs at work come first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    shown = views[:rows]
    named = all(view.run_id.startswith(view.experiment) for view in shown)  # the run's name says the experiment
    for name in _COLUMNS if named else ("run", "experiment", *_COLUMNS[1:]):
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=name not in _LONG)
    for view in shown:
        run, *others = _cells(view)
        table.add_row(run, *others) if named else table.add_row(run, Text(view.experiment), *others)
    hidden = len(views) - rows
    more = [Text(f"{hidden} more runs: --rows shows them", style="dim")] if hidden > 0 else []
    return Group(Text(_heading(views)), *map(Text, describe_load(load)), Text(), table, *more)


def _heading(views: Sequence[RunView]) -> str:
    counts = Counter(view.state.value for view in views)
    working = sum(view.state in AT_WORK for view in views)
    listed = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
    return f"{time.strftime('%H:%M:%S')}  {len(views)} runs, {working} at work" + (f" ({listed})" if listed else "")


def describe_load(load: MachineLoad) -> list[str]:
    """One line for the machine, and one for each GPU."""
    own = (
        f"CPU {load.cpu:.0%}, memory {load.memory_used / _GIB:.1f} of {load.memory_total / _GIB:.1f} GiB, "
        f"disk {load.disk_free / _GIB:.0f} GiB free"
    )
    return [own, *map(_describe_gpu, load.gpus)]


def _describe_gpu(gpu: GpuLoad) -> str:
    busy = "use unknown" if gpu.busy is None else f"{gpu.busy:.0%}"
    return (
        f"GPU {gpu.index} {gpu.name}: {busy}, memory {gpu.memory_used / _GIB:.1f} of {gpu.memory_total / _GIB:.1f} GiB"
    )


def _cells(view: RunView) -> list[Text]:
    reward = view.metrics.get("reward/mean")
    left = view.seconds_left
    return [
        Text(view.run_id),
        Text(view.state.value, style=_COLOURS[view.state]),
        Text(f"{view.step} of {view.steps}"),
        Text("" if reward is None else f"{reward:.3f}"),
        Text(sparkline(view.rewards)),
        Text("" if view.seconds_per_step is None else f"{view.seconds_per_step:.1f}"),
        Text("" if left is None else duration(left)),
        Text(view.last_warning[:80], style="yellow" if view.last_warning else ""),
    ]
