"""Is a killed run equal to the undisturbed one? Weights, journal, and MLflow through its server's API."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from mlflow import MlflowClient

from rlcore.segment.journal import StepRecord, read_journal
from rlcore.segment.resume import read_segments

Points = Mapping[tuple[str, int], list[float]]
"""Metric and step -> every value that was recorded; one each where all is well."""

_CLOCK = ("time/", "cost/", "system/")  # cost/: times by devices; system/: memory and rates of this machine
_RATE = "_per_second"


@dataclass(frozen=True, slots=True)
class Comparison:
    different: list[str]  # one line per metric and step
    missing_steps: list[int]  # of some metric, in the journal or at MLflow
    duplicate_steps: list[int]


def weights_of(run_dir: Path) -> str:
    """A hash of the last checkpoint's weights, adapters merged, by name, bit for bit."""
    from tests.train_states import load_full_weights

    spec = run_dir / "spec.json"  # absent where a run was restored from a store
    base = Path(json.loads(spec.read_text())["model"]["path"]) if spec.exists() else None
    digest = hashlib.sha256()
    for name, value in sorted(load_full_weights(Path(read_segments(run_dir)[-1].checkpoint.path), base).items()):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def compare(killed: Path, undisturbed: Path, client: MlflowClient) -> Comparison:
    """Two runs by their folders.

    Raises:
        ValueError: no step had a gradient, so nothing was trained that could be lost.
    """
    own, expected = (points_of(read_journal(run / "journal.jsonl")) for run in (killed, undisturbed))
    if not any(value for (name, _), values in expected.items() if name == "optim/grad_norm" for value in values):
        raise ValueError("no step of the undisturbed run had a gradient: equal runs would prove nothing")
    steps = {name for name, _ in expected}
    at_mlflow, expected_at_mlflow = (
        without_machine_load(mlflow_points(client, run), steps) for run in (killed, undisturbed)
    )
    return Comparison(
        [
            *differences("journal", without_clock(own), without_clock(expected)),
            *differences("MLflow", without_clock(at_mlflow), without_clock(expected_at_mlflow)),
            # Times may differ here too: a step that is taken again after damage is not sent to MLflow again.
            *differences(
                "MLflow, own journal", without_clock({key: at_mlflow.get(key, []) for key in own}), without_clock(own)
            ),
        ],
        sorted(
            {step for _, step in (*(expected.keys() - own.keys()), *(expected_at_mlflow.keys() - at_mlflow.keys()))}
        ),
        sorted({step for found in (own, at_mlflow) for (_, step), values in found.items() if len(values) > 1}),
    )


def points_of(records: Iterable[StepRecord]) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = {}
    for record in records:
        for name, value in record.metrics.items():
            found.setdefault((name, record.step), []).append(value)
    return found


def mlflow_points(client: MlflowClient, run_dir: Path) -> dict[tuple[str, int], list[float]]:
    run = json.loads((run_dir / "mlflow.json").read_text())["mlflow_run_id"]
    found: dict[tuple[str, int], list[float]] = {}
    for name in client.get_run(run).data.metrics:
        for point in client.get_metric_history(run, name):
            found.setdefault((name, point.step), []).append(point.value)
    return found


def without_machine_load(points: Points, steps: Set[str]) -> dict[tuple[str, int], list[float]]:
    """Without MLflow's own ``system/`` metrics, whose steps count the seconds of the flow. ``steps``: names of the
    journal."""
    return {
        (name, step): values
        for (name, step), values in points.items()
        if name in steps or not name.startswith("system/")
    }


def without_clock(points: Points) -> dict[tuple[str, int], list[float]]:
    """Without what the clock and the load of the machine decide."""
    return {
        (name, step): values
        for (name, step), values in points.items()
        if not name.startswith(_CLOCK) and not name.endswith(_RATE)
    }


def differences(where: str, found: Points, expected: Points) -> list[str]:
    """One line for each metric and step whose values are not the expected ones, bit for bit; NaN equals NaN."""
    return [
        f"{where}: {name} of step {step}: {found.get((name, step), [])}, expected {expected.get((name, step), [])}"
        for name, step in sorted({*found, *expected})
        if not _equal(found.get((name, step), []), expected.get((name, step), []))
    ]


def _equal(one: list[float], two: list[float]) -> bool:
    return len(one) == len(two) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, two, strict=True)
    )
