"""What a trainer leaves behind when it stops for an error."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.errors import SamplerError, WorkerTraceback
from rlcore.files import write_json_atomically
from rlcore.jobs.segment import _failed
from rlcore.segment.spec import SegmentSpec
from rlcore.specs import JobError


def spec_in(folder: Path) -> SegmentSpec:
    return SegmentSpec(
        run_id="r",
        run_dir=folder,
        experiment=ExperimentConfig(name="toy"),
        dataset=DatasetRef(
            path="d", digest="d", source="s", num_problems=1, num_rejected=0, num_images=0, max_prompt_tokens=1
        ),
        model=ModelRef(path="m", digest="m", source="tiny", num_parameters=1),
    )


def test_the_traceback_of_the_rank_is_the_one_in_the_report(tmp_path: Path) -> None:
    error = SamplerError("weights differ")
    error.__cause__ = WorkerTraceback("Traceback of rank 1")
    assert _failed(spec_in(tmp_path), error) == 1
    report = JobError.model_validate_json((tmp_path / "trainer_error.json").read_text())
    assert (report.kind, report.message, report.traceback) == ("SamplerError", "weights differ", "Traceback of rank 1")


def test_a_full_disk_leaves_no_staged_part_and_says_how_full(tmp_path: Path) -> None:
    staged, committed = (tmp_path / "checkpoints" / name for name in (".staging-step-000002", "step-000001"))
    for folder in (staged, committed):
        folder.mkdir(parents=True)
        (folder / "weights").write_text("w")
    assert _failed(spec_in(tmp_path), OSError(errno.ENOSPC, "No space left on device")) == 81
    assert not staged.exists()
    assert (committed / "weights").read_text() == "w"
    report = JobError.model_validate_json((tmp_path / "trainer_error.json").read_text())
    assert report.kind == "StorageError"
    assert "MiB free" in report.message


def test_a_report_that_cannot_be_written_leaves_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "trainer_error.json").mkdir()  # a rename onto a folder fails
    assert _failed(spec_in(tmp_path), SamplerError("s")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["trainer_error.json"]  # nothing aside


def test_a_failed_write_leaves_nothing_aside(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match=r"x\.json"):
        write_json_atomically(tmp_path / "x.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_writers_that_share_a_pid_do_not_disturb_each_other(tmp_path: Path) -> None:
    """As processes of two pods do that write to one volume; here they are threads."""
    path, texts = tmp_path / "x.json", [str(number) * 1000 for number in range(8)]

    def write_often(text: str) -> None:
        for _ in range(50):
            write_json_atomically(path, text)
            assert path.read_text() in texts

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write_often, texts))
    assert [left.name for left in tmp_path.iterdir()] == ["x.json"]


def test_the_file_is_on_disk_before_its_name_and_its_name_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(str(tmp_path)):  # threads of other tests may write as well
            synced.append((path, (tmp_path / "x.json").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    write_json_atomically(tmp_path / "x.json", "{}")
    (aside, named_before), (folder, named_after) = synced
    assert (Path(aside).parent, named_before) == (tmp_path, False)
    assert (folder, named_after) == (str(tmp_path), True)
