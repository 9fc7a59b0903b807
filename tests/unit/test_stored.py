"""The store beside the data folder: what is left alone without one, and how long its outages are waited for."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.errors import StorageError, StorageRefusedError
from infra.settings import Settings
from rlcore.failures import Failure, policy_of
from tasks.driver import mirror as mirroring
from tasks.store import made, restore
from tasks.store.made import fetch, key_of, patient_store_of, send, send_file, store_of


def test_only_what_is_below_the_data_folder_has_a_key(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "data")
    assert key_of(tmp_path / "data" / "runs" / "a", settings) == "runs/a"
    assert key_of(tmp_path / "models" / "a", settings) is None


def test_a_patient_store_waits_as_the_table_says(tmp_path: Path) -> None:
    assert store_of(Settings(data_dir=tmp_path)) is None
    assert patient_store_of(Settings(data_dir=tmp_path)) is None
    settings = Settings(data_dir=tmp_path, store="s3://bucket/lab", retry_delay_scale=0.5)
    impatient, patient = store_of(settings), patient_store_of(settings)
    assert impatient is not None
    assert patient is not None
    assert (impatient.uri, impatient.delays) == ("s3://bucket/lab", ())
    assert patient.uri == "s3://bucket/lab"
    assert patient.delays == tuple(seconds / 2 for seconds in policy_of(Failure.STORAGE).delays)


@pytest.mark.parametrize(("store", "folder"), [("", "data/runs/a"), ("s3://nobody/asks", "elsewhere/a")])
def test_without_a_store_and_outside_of_the_data_folder_nothing_is_sent_or_fetched(
    store: str, folder: str, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path / "data", store=store)
    assert not fetch(tmp_path / folder, settings)
    send(tmp_path / folder, settings)
    send_file(tmp_path / folder, settings)
    restore._unseal(tmp_path / folder, settings)
    assert not list(tmp_path.iterdir())


def test_a_terminal_shows_how_much_has_been_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    with made._bar("merged-5") as progress:
        assert progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    with made._bar("merged-5") as progress:
        assert progress is not None
        progress(3_000_000, 12_000_000)
    shown, told = capsys.readouterr()
    assert shown == ""
    assert "fetching merged-5" in told
    assert "3.0/12.0 MB" in told


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        monkeypatch.setattr(mirroring.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(mirroring.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Mirror:
    """Fails ``times`` times."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left, self.error = times, error

    def sync_all(self) -> None:
        if self.left:
            self.left -= 1
            raise self.error


def patiently(mirror: Any, seconds: float) -> None:
    mirroring._send_rest(mirror, seconds)


def test_the_last_of_a_run_is_sent_with_doubling_delays_up_to_the_longest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    patiently(Mirror(9, StorageError("away")), 10_000)
    assert clock.slept == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert caplog.messages[1] == "store: the next try is in 10 s: away"


def test_the_wait_for_the_store_has_an_end_and_a_refusal_no_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(StorageError, match="^away$"):
        patiently(Mirror(99, StorageError("away")), 35)
    assert clock.slept == [5, 10, 20], "35 seconds are waited, not more"
    with pytest.raises(StorageRefusedError, match="quota"):
        patiently(Mirror(1, StorageRefusedError("quota")), 35)
    assert len(clock.slept) == 3


def test_a_failed_run_says_that_its_end_is_not_in_the_store(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    mirror: Any = Mirror(1, StorageError("away"))
    mirroring._send_rest_of_failed_run(mirror)
    assert caplog.messages == ["store: the end of the run could not be sent: away"]
    mirroring._send_rest_of_failed_run(mirror)
    assert len(caplog.messages) == 1
