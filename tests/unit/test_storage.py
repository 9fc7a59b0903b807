"""Copies of what URIs name: inside their folder whatever objects are called, and not more than there is room for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import fsspec
import pytest

from infra.errors import StorageError
from infra.storage import forget_unused, localize


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
