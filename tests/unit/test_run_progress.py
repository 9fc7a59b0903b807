"""What is shown of a run while it goes on."""

from __future__ import annotations

import logging

import pytest

from rlcore.config import build_experiment
from rlcore.segment.journal import StepRecord
from tasks.driver import progress
from tasks.driver.outbox import Outbox
from tasks.driver.progress import AblationProgress, TrainingProgress, describe, duration, show_on_page


def record(step: int, at: float, **metrics: float) -> StepRecord:
    return StepRecord(step, round(at * 1000), {name.replace("__", "/"): value for name, value in metrics.items()})


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0:00"),
        (9.4, "0:09"),
        (59.6, "1:00"),
        (61, "1:01"),
        (3599, "59:59"),
        (3600, "1:00:00"),
        (37_265, "10:21:05"),
    ],
)
def test_a_duration_has_hours_only_where_there_are_some(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_the_latest_numbers_the_pace_of_ten_steps_and_what_is_left() -> None:
    records = [record(step, at=100.0 * step) for step in range(1, 5)]  # slow, and too long ago to count
    records += [record(step, at=400 + 2.5 * (step - 4)) for step in range(5, 14)]
    last = record(14, at=425, reward__mean=0.12345, reward__accuracy=0.5, system__tokens_per_second=1234.56, other=1)
    # Ten steps, 4 to 14, in 25 s; 26 are left.
    text = "reward 0.123, accuracy 0.500, tokens/s 1235, 2.5 s/step, 1:05 left"
    assert describe([*records, last], 40) == text
    assert describe([record(1, at=3, reward__accuracy=0.25)], 40) == "accuracy 0.250"
    assert describe([record(1, at=3), record(2, at=5)], 3) == "2.0 s/step, 0:02 left"


def test_lines_come_every_fifteen_seconds_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown: list[tuple[str, object]] = []

    class Page(Outbox):
        def put(self, key: str, send: object) -> None:
            shown.append((key, send))

    experiment = build_experiment({"name": "toy", "training": {"steps": 4}}, [])
    page = Page("test")
    with TrainingProgress(experiment, page) as bar:
        bar.show([])
        for seconds, step in ((4.9, 1), (5, 2), (14.9, 2), (15, 3), (15.5, 3), (16, 4)):
            now[0] = 1000 + seconds
            bar.show([record(step, at=step, reward__mean=step / 4)])
    page.close()
    assert [item.getMessage() for item in caplog.records] == [
        "train: step 3 of 4, reward 0.750",
        "train: step 4 of 4, reward 1.000",
    ]
    assert [(key, send.args) for key, send in shown] == [
        ("the progress", (50.0, "reward 0.500")),
        ("the progress", (75.0, "reward 0.750")),
    ]


def test_an_ablation_says_how_far_all_points_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown: list[tuple[str, object]] = []

    class Page(Outbox):
        def put(self, key: str, send: object) -> None:
            shown.append((key, send.args))

    page = Page("test")
    with AblationProgress("lr", 80, page) as bar:
        for seconds, steps in ((0, 0), (14.9, 20), (15, 20), (15.1, 30), (20, 40)):
            now[0] = 1000 + seconds
            bar.show(steps)
    page.close()
    assert [item.getMessage() for item in caplog.records] == ["ablate: 30 of at most 80 steps"]
    assert shown == [
        ("the progress", (0.0, "0 of at most 80 steps")),
        ("the progress", (25.0, "20 of at most 80 steps")),
        ("the progress", (37.5, "30 of at most 80 steps")),
        ("the progress", (50.0, "40 of at most 80 steps")),
    ]
    assert bar._key == "lr-progress"


def test_a_terminal_gets_a_bar_instead_of_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    page = Outbox("test")
    with TrainingProgress(build_experiment({"name": "toy", "training": {"steps": 4}}, []), page) as bar:
        bar.show([record(4, at=1, reward__mean=0.5)])
    told = capsys.readouterr().err
    assert "training" in told
    assert "4 of 4 steps, reward 0.500" in told
    with AblationProgress("lr", 80, page) as both:
        both.show(30)
    page.close()
    told = capsys.readouterr().err
    assert "points" in told
    assert "30 of 80 steps" in told
    assert not caplog.records


def test_there_is_no_page_outside_a_task() -> None:
    assert show_on_page(None, "key", 50.0, "half") is None
