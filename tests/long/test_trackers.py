"""TensorBoard, W&B and SwanLab for real, fed by their processes: every committed step once, whatever is killed."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from infra import processes
from infra.errors import ServerError, ServerRefusedError
from infra.settings import Settings, TrackerName
from infra.tracking.extra import ExtraTracker, check_installed
from rlcore.segment.journal import StepRecord

ROOT = Path(__file__).resolve().parents[2]
START_MS = 1_700_000_000_000


def records(last: int) -> list[StepRecord]:
    return [
        StepRecord(step, START_MS + 1000 * step, {"reward/mean": step / 10, "loss/total": float("nan")})
        for step in range(1, last + 1)
    ]


def opened(name: TrackerName, folder: Path) -> ExtraTracker:
    """As the driver does after a kill: nothing but the files is left of the one before."""
    return ExtraTracker(
        name, Settings(), experiment="tiny", run_id="a-run", run_dir=folder / "runs" / "a-run", config={"seed": 7}
    )


def publish(tracker: ExtraTracker, last: int, through_step: int, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while tracker.publish(records(last), through_step) < through_step:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def forget(tracker: ExtraTracker, step: int) -> None:
    """As after a kill between the tracker's taking a batch and our noting it."""
    tracker._state.write_text(f'{{"published_step": {step}}}')


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def test_tensorboard_shows_each_committed_step_once_at_its_own_time(tmp_path: Path, data_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = opened("tensorboard", tmp_path)
    publish(tracker, 6, 4)
    forget(tracker, 2)
    publish(opened("tensorboard", tmp_path), 6, 6)
    shown = EventAccumulator(str(data_dir / "trackers" / "tensorboard" / "a-run"))
    shown.Reload()
    points = shown.Scalars("reward/mean")
    assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]
    assert [point.value for point in points] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert points[0].wall_time == (START_MS + 1000) / 1000
    assert len(shown.Scalars("loss/total")) == 6


def test_wandb_offline_resumes_one_run_step_after_step(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    publish(opened("wandb", tmp_path), 6, 4)
    publish(opened("wandb", tmp_path), 6, 4)  # nothing is new
    publish(opened("wandb", tmp_path), 6, 6)
    files = sorted((data_dir / "trackers" / "wandb" / "a-run" / "wandb").glob("offline-run-*/run-a-run.wandb"))
    assert len(files) == 2  # wandb sync puts them together: the same id, told to resume
    rows = [row for file in files for row in wandb_rows(file)]
    assert [(row["_step"], row["reward/mean"]) for row in rows] == [(step, step / 10) for step in range(1, 7)]
    assert rows[2]["_timestamp"] == (START_MS + 3000) / 1000


def wandb_rows(file: Path) -> list[dict[str, float]]:
    """The history in a W&B file: records of LevelDB's log format, each a protocol buffer."""
    import json

    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for text in leveldb_records(file.read_bytes()):
        record = Record.FromString(text)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def leveldb_records(data: bytes, header: int = 7, block: int = 32 * 1024) -> Iterator[bytes]:
    position, whole = header, b""  # W&B's own header is as long as a record's
    while position + header <= len(data):
        if block - position % block < header:
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        whole += data[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def test_swanlab_offline_takes_batches_under_one_id(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    publish(opened("swanlab", tmp_path), 6, 4)
    publish(opened("swanlab", tmp_path), 6, 6)
    found = sorted((data_dir / "trackers" / "swanlab" / "a-run").glob("run-*/*.swanlab"))
    assert len(found) == 2
    assert len({file.name for file in found}) == 1  # the id that they resume
    for file, steps in zip(found, ([1, 2, 3, 4], [5, 6]), strict=True):
        assert swanlab_steps(file, Settings().tracker_python) == steps


def swanlab_steps(file: Path, python: Path) -> list[int]:
    """Steps of reward/mean in a SwanLab file, read by SwanLab itself."""
    code = (
        "import sys\nfrom swanlab.proto.swanlab.record.v1.record_pb2 import Record\n"
        "from swanlab.sdk.internal.core_python.store import DataStoreReader\n"
        "reader = DataStoreReader()\nreader.open(sys.argv[1])\n"
        "for record in map(Record.FromString, reader):\n"
        "    if record.WhichOneof('record_type') == 'scalar' and record.scalar.key == 'reward/mean':\n"
        "        print(record.scalar.step)\n"
    )
    said = subprocess.run([str(python), "-c", code, str(file)], capture_output=True, text=True, check=True)
    return [int(line) for line in said.stdout.splitlines()]


def test_an_unreachable_tracker_is_an_error_and_catches_up_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing_port: int
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{refusing_port}")
    monkeypatch.setenv("WANDB_API_KEY", "local-" + 40 * "0")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    tracker = opened("wandb", tmp_path)
    with pytest.raises(ServerError, match=r"(?s)^wandb ended with 1: .*wandb\.log"):
        publish(tracker, 3, 3)
    assert tracker.published_step == 0
    assert 40 * "0" not in (tmp_path / "runs/a-run/trackers/wandb.log").read_text()
    monkeypatch.setenv("WANDB_MODE", "offline")
    publish(tracker, 3, 3)


def test_stopping_leaves_no_process_and_the_batch_comes_again(tmp_path: Path) -> None:
    tracker = opened("tensorboard", tmp_path)
    tracker.publish(records(3), 3)
    tracker.stop()
    assert not processes.marked(tracker.mark)
    publish(opened("tensorboard", tmp_path), 3, 3)


def test_what_is_not_installed_is_named_with_what_to_do(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    with pytest.raises(ServerRefusedError, match=r"has no wandb where wandb>=.* RLFLOW_TRACKER_PYTHON"):
        check_installed("wandb", bare / "bin" / "python")


def test_each_sink_is_a_metric_sink() -> None:
    """A type checker would say so; the signature is all that there is at run time."""
    from infra.tracking.sinks import TensorBoardSink
    from rlcore.types import MetricSink

    def use(sink: MetricSink) -> None:
        sink.step(1, {"reward/mean": 0.5})

    folder = Path(os.environ["RLFLOW_DATA_DIR"])
    sink = TensorBoardSink(folder, first_step=1)
    use(sink)
    sink.close()
    assert files_of(folder)


def files_of(folder: Path) -> Sequence[Path]:
    return [path for path in folder.iterdir() if path.stat().st_size > 0]
