"""Atomic writes of files and folders, also with several writers."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from infra import files
from rlcore import files as rlcore_files

Building = Callable[[Path], AbstractContextManager[Path]]
EVERY = pytest.mark.parametrize("building", [files.building, rlcore_files.building], ids=["infra", "rlcore"])


def test_of_many_writers_each_reader_sees_one_whole_file(tmp_path: Path) -> None:
    """Threads share a pid, as processes of two pods on one volume may."""
    path, texts = tmp_path / "x.json", [str(number) * 1000 for number in range(8)]

    def write_often(text: str) -> None:
        for _ in range(30):
            files.write_atomically(path, text)
            assert path.read_text() in texts

    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(write_often, texts))
    assert [left.name for left in tmp_path.iterdir()] == ["x.json"]


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises(OSError, match=r"x\.json"):
        files.write_atomically(tmp_path / "x.json", "{}")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def _synced(monkeypatch: pytest.MonkeyPatch, final: Path) -> list[tuple[Path, bool]]:
    """What is synced from now on, and whether ``final`` was there already."""
    synced: list[tuple[Path, bool]] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")), final.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    return synced


def test_a_file_is_on_disk_before_its_name_and_its_name_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = _synced(monkeypatch, tmp_path / "x.json")
    files.write_atomically(tmp_path / "x.json", "{}")
    (aside, named_before), (folder, named_after) = synced
    assert (aside.parent, named_before) == (tmp_path, False)
    assert (folder, named_after) == (tmp_path, True)


@EVERY
def test_a_folder_is_on_disk_before_its_name_and_its_name_before_the_block_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, building: Building
) -> None:
    synced = _synced(monkeypatch, tmp_path / "made")
    with building(tmp_path / "made") as aside:
        (aside / "sub").mkdir(parents=True)
        (aside / "sub" / "file").write_text("x")
    assert sorted((path.name, there) for path, there in synced[:-1])[-2:] == [("file", False), ("sub", False)]
    assert len(synced) == 4
    assert synced[-1] == (tmp_path, True)


@EVERY
def test_of_two_that_make_the_same_folder_the_first_counts(tmp_path: Path, building: Building) -> None:
    barrier = threading.Barrier(2, timeout=30)

    def make(name: str) -> None:
        with building(tmp_path / "made") as aside:
            aside.mkdir(exist_ok=True)
            barrier.wait()
            (aside / name).touch()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make, "ab"))
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert len(list((tmp_path / "made").iterdir())) == 1


@EVERY
@pytest.mark.parametrize("skew_days", [-2, 0, 2])
def test_what_a_killed_process_has_left_goes_after_a_day(
    tmp_path: Path, building: Building, skew_days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of the file system, whatever this machine's says."""
    with building(tmp_path / "made") as made:
        made.mkdir(exist_ok=True)
        name = made.name
    old, fresh = tmp_path / name, tmp_path / f"{name.removesuffix('.tmp')}-2.tmp"
    for path in (old, fresh):
        path.mkdir()
    now = time.time()
    os.utime(old, (now - 90_000,) * 2)
    monkeypatch.setattr(time, "time", lambda: now + skew_days * 24 * 3600)
    with building(tmp_path / "made") as made:
        made.mkdir(exist_ok=True)
    assert not old.exists()
    assert fresh.exists()


@EVERY
def test_files_of_this_hosts_dead_processes_are_removed(tmp_path: Path, building: Building) -> None:
    with building(tmp_path / "control.json") as aside:
        aside.mkdir(exist_ok=True)
        name = aside.name
    with subprocess.Popen(["true"]) as ended:
        pass
    living, dead = f"-{os.getpid()}-", f"-{ended.pid}-"
    assert living in name
    host = socket.gethostname()
    kept = [name, name.replace(living, dead).replace(host, f"{host}2"), "control.json", ".other.tmp"]
    (tmp_path / "folder").mkdir()
    for left in (*kept, name.replace(living, dead), f"folder/{name.replace(living, dead)}"):
        (tmp_path / left).touch()
    rlcore_files.remove_abandoned(tmp_path)
    left_over = {path.name for path in tmp_path.iterdir()}
    assert left_over == {*kept, "folder"}
    assert list((tmp_path / "folder").iterdir())


def test_a_new_folder_is_private_and_an_old_one_stays_as_it_is(tmp_path: Path) -> None:
    files.make_private(tmp_path / "a" / "data")
    assert stat.S_IMODE((tmp_path / "a" / "data").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o770)
    files.make_private(tmp_path / "shared")
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o770


def test_the_time_of_a_file_system_that_cannot_be_asked_is_this_machines(tmp_path: Path) -> None:
    assert abs(files.now_of(tmp_path) - time.time()) < 5
    assert abs(files.now_of(tmp_path / "missing") - time.time()) < 5
    assert not list(tmp_path.iterdir())


def test_files_are_listed_while_somebody_renames_their_folder(tmp_path: Path) -> None:
    (tmp_path / "staged" / "ranks").mkdir(parents=True)
    (tmp_path / "staged" / "ranks" / "weights").touch()
    (tmp_path / "journal").touch()
    over = threading.Event()

    def rename() -> None:
        while not over.is_set():
            (tmp_path / "staged").rename(tmp_path / "final")
            (tmp_path / "final").rename(tmp_path / "staged")

    with ThreadPoolExecutor(1) as pool:
        renaming = pool.submit(rename)
        try:
            seen = {frozenset(path.name for path in rlcore_files.files_below(tmp_path)) for _ in range(3000)}
        finally:
            over.set()
        renaming.result()
    assert seen <= {frozenset({"journal"}), frozenset({"journal", "weights"})}
    assert {path.name for path in rlcore_files.files_below(tmp_path)} == {"journal", "weights"}


def test_the_digest_of_a_folder_is_that_of_names_and_contents_in_order(tmp_path: Path) -> None:
    contents = {f"model-{number:05d}.safetensors": bytes([number]) * (1 << 20) for number in range(20)}
    contents |= {"config.json": b"{}", "original/params.json": b"1", "z.txt": b""}
    for name, content in (contents | {"verified.json": b"mark", ".hidden": b"x"}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    whole = hashlib.sha256()
    for name in sorted(contents):
        whole.update(f"{name} ".encode() + hashlib.sha256(contents[name]).digest())
    assert rlcore_files.folder_digest(tmp_path) == whole.hexdigest()[:16]
