"""Chaos that cannot lie: each of its checks sees what it is there to see."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric

from tests.chaos.compare import compare
from tests.chaos.faults import SmallDisk
from tests.chaos.harness import FAULTS, Chaos, Job
from tests.chaos.report import DroppedFault, Report, Row, faults_of, hits
from tests.chaos.victims import Kind, Scene

WELL = Report(
    seed=1,
    legs=["whole"],
    kills=3,
    by_victim={"flow run: start": 1, "trainer: any": 2},
    missed=[],
    recovered=3,
    disturbances=3,
    retyped=1,
    weights_equal=True,
    metrics_equal=True,
    missing_steps=0,
    duplicate_steps=0,
    orphans=0,
    dropped_faults=[DroppedFault("disk of the checkpoints: full", "must be root")],
    wall_seconds=1,
)


def test_an_unharmed_report_is_one_without_faults() -> None:
    assert faults_of(WELL) == []


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ({"missed": ["merge: merge (whole)"]}, "never hit: merge: merge (whole)"),
        ({"recovered": 2}, "1 of 3 disturbances"),
        ({"retyped": 2}, "typed again 2 times and killed 1 times"),
        ({"retyped": 0}, "typed again 0 times and killed 1 times"),
        ({"weights_equal": False}, "weights"),
        ({"metrics_equal": False}, "metrics"),
        ({"missing_steps": 1}, "missing"),
        ({"duplicate_steps": 1}, "more than once"),
        ({"orphans": 1}, "left behind"),
    ],
)
def test_each_harm_is_a_fault_of_the_report(harm: dict[str, Any], words: str) -> None:
    (found,) = faults_of(replace(WELL, **harm))
    assert words in found


def test_victims_are_counted_by_moment() -> None:
    rows = [Row("whole", "trainer", moment, True, True, 1.0, 0) for moment in ("any", "resume", "any")]
    assert hits(rows) == {"trainer: any": 2, "trainer: resume": 1}


_SAME = {"loss/kl_ref": math.nan, "perf/update_tokens": 109.0}
RECORDS: tuple[dict[str, float], ...] = (
    {**_SAME, "reward/mean": 0.25, "optim/grad_norm": 1.5, "time/step": 1.0, "perf/tokens_per_second": 1.0},
    {**_SAME, "reward/mean": 0.5, "optim/grad_norm": 0.0, "time/step": 2.0, "perf/tokens_per_second": 2.0},
)


class Bench:
    """Two runs with journals and MLflow runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
        self._experiment = self.client.create_experiment("chaos", artifact_location=folder.as_uri())

    def run(self, name: str, records: Any = RECORDS, at_mlflow: Any = None, **evaluated: float) -> Path:
        run_dir = self._folder / name
        run_dir.mkdir()
        lines = [json.dumps({"step": n, "timestamp_ms": n, "metrics": m}) + "\n" for n, m in enumerate(records, 1)]
        (run_dir / "journal.jsonl").write_text("".join(lines))
        run = self.client.create_run(self._experiment).info.run_id
        (run_dir / "mlflow.json").write_text(json.dumps({"mlflow_run_id": run}))
        for step, metrics in enumerate(at_mlflow or records, 1):
            self.client.log_batch(run, [Metric(name, value, step, step) for name, value in metrics.items()])
        for metric, value in evaluated.items():
            self.client.log_metric(run, f"eval/{metric}", value, step=2)
        return run_dir

    def log(self, run_dir: Path, name: str, value: float, step: int) -> None:
        run = json.loads((run_dir / "mlflow.json").read_text())["mlflow_run_id"]
        self.client.log_metric(run, name, value, timestamp=99, step=step)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("mlflow"))


def changed(step: int, **metrics: float) -> list[dict[str, float]]:
    return [{**record, **(metrics if number == step else {})} for number, record in enumerate(RECORDS, 1)]


@pytest.fixture(scope="module")
def undisturbed(database: Bench) -> Path:
    return database.run("undisturbed", accuracy=0.5)


def test_times_and_rates_may_differ(database: Bench, undisturbed: Path) -> None:
    slower = changed(2, **{"time/step": 9.0, "perf/tokens_per_second": 0.1})
    found = compare(database.run("slower", slower, accuracy=0.5), undisturbed, database.client)
    assert (found.different, found.missing_steps, found.duplicate_steps) == ([], [], [])


def test_a_last_bit_of_a_metric_is_a_difference(database: Bench, undisturbed: Path) -> None:
    records = changed(2, **{"reward/mean": math.nextafter(0.5, 1.0)})
    found = compare(database.run("last-bit", records, accuracy=0.5), undisturbed, database.client)
    assert [line.split(" of ")[0] for line in found.different] == ["journal: reward/mean", "MLflow: reward/mean"]


def test_a_value_that_only_mlflow_has_otherwise_is_a_difference(database: Bench, undisturbed: Path) -> None:
    run = database.run("mlflow", RECORDS, changed(1, **{"reward/mean": 0.26}), accuracy=0.5)
    assert compare(run, undisturbed, database.client).different == [
        "MLflow: reward/mean of step 1: [0.26], expected [0.25]",
        "MLflow, own journal: reward/mean of step 1: [0.26], expected [0.25]",
    ]


def test_a_time_that_mlflow_lacks_is_a_missing_step(database: Bench, undisturbed: Path) -> None:
    without = [RECORDS[0], {name: value for name, value in RECORDS[1].items() if name != "time/step"}]
    run = database.run("time", RECORDS, without, accuracy=0.5)
    assert compare(run, undisturbed, database.client).missing_steps == [2]


def test_a_longer_flow_has_more_points_of_the_machines_load(database: Bench) -> None:
    known = [{**record, "system/tokens_per_second": 3.0} for record in RECORDS]
    longer, shorter = database.run("longer", known), database.run("shorter-flow", known)
    for step in (1, 2, 2, 3):
        database.log(longer, "system/cpu_utilization_percentage", 50.0, step)
    for one, two in ((longer, shorter), (shorter, longer)):
        found = compare(one, two, database.client)
        assert (found.different, found.missing_steps, found.duplicate_steps) == ([], [], [])
    lost = database.run("without-rate", known, [known[0], RECORDS[1]])
    assert compare(lost, shorter, database.client).missing_steps == [2]


def test_a_metric_of_the_evaluation_is_compared(database: Bench, undisturbed: Path) -> None:
    (line,) = compare(database.run("evaluated", accuracy=0.4), undisturbed, database.client).different
    assert line == "MLflow: eval/accuracy of step 2: [0.4], expected [0.5]"


def test_a_step_that_the_journal_or_mlflow_lacks_is_missing(database: Bench, undisturbed: Path) -> None:
    lost = database.run("lost", RECORDS, RECORDS[:1], accuracy=0.5)
    shorter = database.run("shorter", RECORDS[:1], accuracy=0.5)
    for run in (lost, shorter):
        found = compare(run, undisturbed, database.client)
        assert found.missing_steps == [2]
        assert found.different


def test_a_step_that_mlflow_has_twice_is_a_duplicate(database: Bench, undisturbed: Path) -> None:
    again = database.run("again", accuracy=0.5)
    database.log(again, "reward/mean", 0.25, 1)
    found = compare(again, undisturbed, database.client)
    assert found.duplicate_steps == [1]
    assert found.different


def test_a_run_without_a_gradient_proves_nothing(database: Bench) -> None:
    still = [{**record, "optim/grad_norm": 0.0} for record in RECORDS]
    one, two = database.run("still", still), database.run("still-again", still)
    with pytest.raises(ValueError, match="gradient"):
        compare(one, two, database.client)


class Sleep:
    """Stands for the job: a command that ends well after some seconds."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.run_id, self.data_dir, self.run_dir, self.log = "run", folder, folder / "runs" / "run", folder / "log"
        self.log.touch()
        self._seconds = seconds

    def start(self) -> subprocess.Popen[bytes]:
        code = f"import time; time.sleep({self._seconds})"
        return subprocess.Popen([sys.executable, "-c", code, str(self.data_dir)])


@pytest.fixture
def bystander() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


def chaos_over(folder: Path, seconds: float) -> Chaos:
    job = cast(Job, Sleep(folder, seconds))
    return Chaos("leg", job, random.Random(0), types_again=True, small_disk=False)


def kind(found: list[psutil.Process], holds: Any = lambda scene: True) -> Kind:
    looks = iter(range(10**9))
    return Kind("victim", "moment", lambda _: found if next(looks) > 5 else [], holds, 0.0, False, "end")


def test_a_victim_that_is_never_there_is_missed(tmp_path: Path) -> None:
    with chaos_over(tmp_path, 1.0) as chaos:
        chaos.disturb(kind([]), after_commit=False)
    assert (chaos.missed, chaos.rows) == (["victim: moment (leg)"], [])


def test_a_victim_whose_moment_never_holds_is_missed_and_lives(tmp_path: Path, bystander: psutil.Process) -> None:
    seen = []

    def never(scene: Scene) -> bool:
        seen.append(bystander.status())
        return False

    with chaos_over(tmp_path, 1.0) as chaos:
        chaos.disturb(kind([bystander], never), after_commit=False)
    assert chaos.missed == ["victim: moment (leg)"]
    assert psutil.STATUS_STOPPED in seen  # looked at while it could not move on
    assert bystander.status() in (psutil.STATUS_SLEEPING, psutil.STATUS_RUNNING)


def test_a_victim_that_is_not_there_yet_is_looked_for_again(tmp_path: Path, bystander: psutil.Process) -> None:
    with chaos_over(tmp_path, 3.0) as chaos:
        chaos.disturb(kind([bystander]), after_commit=False)
    assert chaos.missed == []
    assert hits(chaos.rows) == {"victim: moment": 1}
    assert bystander.status() == psutil.STATUS_ZOMBIE


def test_a_command_that_fails_is_an_error_where_nothing_may_be_typed_again(tmp_path: Path) -> None:
    job = cast(Job, Sleep(tmp_path, -1.0))  # a negative time is refused
    with (
        pytest.raises(RuntimeError, match="nothing may be typed again"),
        Chaos("leg", job, random.Random(0), types_again=False, small_disk=False) as chaos,
    ):
        chaos.finish()


def test_a_process_of_the_run_does_not_outlive_the_leg(tmp_path: Path) -> None:
    with chaos_over(tmp_path, 0.0):
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", str(tmp_path)])
    assert left.wait(10) == -9


def test_disk_faults_that_cannot_be_had_are_dropped_by_name_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mount").write_text("#!/bin/sh\necho 'mount: must be superuser' >&2\nexit 32\n")
    (tmp_path / "mount").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    disk = SmallDisk(tmp_path / "disk", "1m")
    assert disk.refused == "mount: must be superuser"
    disk.close()
    with chaos_over(tmp_path, 0.5) as chaos:
        chaos._disk = disk
        chaos.fill_and_damage()
    assert [(fault.fault, fault.reason) for fault in chaos.dropped] == [
        (name, "mount: must be superuser") for name in FAULTS[:2]
    ]
    assert chaos.missed == [f"{name} (leg)" for name in FAULTS[2:]]  # the run ended before
