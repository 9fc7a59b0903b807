"""Copies of what URIs name: inside their folder whatever objects are called, and not more than there is room for."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from infra.errors import StorageError
from infra.store import download as storage
from infra.store.download import forget_unused, localize


def test_an_object_s_name_cannot_lead_out_of_the_copy(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.store["/bucket/data/../../../evil.jsonl"] = memory.open("/tmp-file", "wb")
    try:
        with pytest.raises(StorageError, match=r"'\.\./\.\./\.\./evil\.jsonl' leads out of"):
            localize("memory://bucket/data", tmp_path / "downloads")
    finally:
        memory.store.clear()
    assert not list(tmp_path.rglob("evil*"))


def copy(cache: Path, name: str, size: int, age_days: float) -> Path:
    folder = cache / name
    folder.mkdir(parents=True)
    (folder / "data.jsonl").write_bytes(bytes(size))
    (folder / ".used").touch()
    when = time.time() - age_days * 86400
    os.utime(folder / ".used", (when, when))
    return folder


def test_the_least_recently_used_copies_go_and_none_that_may_be_in_use(tmp_path: Path) -> None:
    oldest, older, fresh = (copy(tmp_path, *one) for one in (("a", 500, 9), ("b", 500, 3), ("c", 900, 0.5)))
    assert forget_unused(tmp_path, 2000) == []
    assert forget_unused(tmp_path, 1500) == [oldest]
    assert forget_unused(tmp_path, 100) == [older], "more than allowed, but asked for today"
    assert fresh.exists()


def test_a_copy_that_is_asked_for_counts_as_used(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/rows.jsonl", b"{}\n")
    path = localize("memory://bucket/rows.jsonl", tmp_path)
    assert path is not None
    used = path.parent / ".used"
    os.utime(used, (1, 1))
    assert localize("memory://bucket/rows.jsonl", tmp_path) == path
    assert time.time() - used.stat().st_mtime < 60
    memory.store.clear()


def test_processes_that_share_a_pid_fetch_the_same_folder_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of two pods do over one volume; here they are threads."""
    source = tmp_path / "source"
    for number in range(20):
        (source / str(number)).mkdir(parents=True)
        (source / str(number) / "rows.jsonl").write_bytes(bytes([number]) * 1000)
    barrier = threading.Barrier(8, timeout=30)
    download = storage._download

    def at_the_same_time(filesystem: fsspec.AbstractFileSystem, name: str, target: Path) -> None:
        barrier.wait()
        download(filesystem, name, target)

    monkeypatch.setattr(storage, "_download", at_the_same_time)

    def fetch(_: int) -> Path | None:
        return localize(source.as_uri(), tmp_path / "downloads")

    with ThreadPoolExecutor(8) as pool:
        copies = set(pool.map(fetch, range(8)))
    (copy,) = copies
    assert copy is not None
    assert len(list(copy.rglob("rows.jsonl"))) == 20
    assert sorted(path.name for path in copy.parent.iterdir()) == [".used", "source"]


def test_a_download_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in "ab":
        (source / name).write_text(name)
    monkeypatch.setattr("infra.store.download._download", _fails_at_b)
    with pytest.raises(StorageError, match="broke off"):
        localize(source.as_uri(), tmp_path / "downloads")
    assert not [path for path in (tmp_path / "downloads").rglob("*") if path.is_file()]


def _fails_at_b(_filesystem: object, name: str, target: Path) -> None:
    if name.endswith("b"):
        raise StorageError("broke off")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("half")


def test_a_copy_has_the_times_of_its_source(tmp_path: Path) -> None:
    """The key of a dataset counts them for images that are named by path: it is the same on every machine."""
    memory = fsspec.filesystem("memory")
    memory.pipe("/bucket/data/a.png", b"picture")
    memory.pipe("/bucket/data/rows.jsonl", b"{}\n")
    changed = memory.modified("/bucket/data/a.png").timestamp()
    copies = [localize("memory://bucket/data", tmp_path / name) for name in ("here", "there")]
    memory.store.clear()
    assert [copy is not None and (copy / "a.png").stat().st_mtime for copy in copies] == [changed, changed]
