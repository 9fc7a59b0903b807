"""Messages and heartbeats go on while whoever started them waits."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rlcore.segment.lease import Control
from tasks.driver.outbox import Heartbeat, Outbox


def test_a_server_that_hangs_gets_the_newest_state_once_it_answers() -> None:
    outbox, being_sent, hangs, sent = Outbox("test"), threading.Event(), threading.Event(), []

    def hang() -> None:
        being_sent.set()
        hangs.wait()

    outbox.put("progress", hang)
    being_sent.wait()
    for step in range(5):
        outbox.put("progress", lambda step=step: sent.append(step))
    outbox.put("health", lambda: sent.append("breach"))
    assert not sent
    hangs.set()
    outbox.close()
    assert sent == [4, "breach"]


def test_a_message_that_fails_is_logged_and_the_next_one_sent(caplog: pytest.LogCaptureFixture) -> None:
    outbox, sent = Outbox("test"), []
    outbox.put("the first", lambda: 1 / 0)
    outbox.put("the second", lambda: sent.append(2))
    outbox.close()
    assert sent == [2]
    assert "the first was not sent" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_closing_waits_no_longer_than_its_timeout() -> None:
    outbox, hangs, sent = Outbox("test"), threading.Event(), []
    outbox.put("one", hangs.wait)
    outbox.put("two", lambda: sent.append(2))
    outbox.close(wait_seconds=0.1)
    hangs.set()
    outbox.close()
    assert not sent


def test_the_heart_beats_while_its_owner_waits_and_repeats_the_last_wish(tmp_path: Path) -> None:
    control = Control(tmp_path / "control.json")
    heart = Heartbeat(tmp_path / "control.json")
    heart.want(1)
    heart.want(2, stop=True)
    first = control.read()
    assert first is not None
    while (last := control.read()) is not None and last.heartbeat == first.heartbeat:
        time.sleep(0.05)
    assert last is not None
    assert (last.through_segment, last.stop) == (2, True)
    heart.end()
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()], "nobody is left to beat"
