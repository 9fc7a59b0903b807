import json
import math
from pathlib import Path

import pytest

from rlcore.errors import StorageError
from rlcore.segment.journal import MetricJournal, StepRecord, read_journal


def _clock():
    ticks = iter(range(1000, 2000))
    return lambda: next(ticks)


def _journal(path: Path, steps: int) -> MetricJournal:
    journal = MetricJournal(path, now_ms=_clock())
    for step in range(1, steps + 1):
        journal.step(step, {"reward": step / 4})
    return journal


def test_a_step_is_one_json_line_with_the_time_it_was_recorded(tmp_path):
    path = tmp_path / "journal.jsonl"
    _journal(path, 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "timestamp_ms": 1000, "metrics": {"reward": 0.25}},
        {"step": 2, "timestamp_ms": 1001, "metrics": {"reward": 0.5}},
    ]
    assert read_journal(path, after_step=1) == [StepRecord(2, 1001, {"reward": 0.5})]
    assert read_journal(tmp_path / "none.jsonl") == []


def test_non_finite_values_come_back(tmp_path):
    path = tmp_path / "journal.jsonl"
    MetricJournal(path).step(1, {"nan": math.nan, "inf": math.inf, "minus": -math.inf, "tenth": 0.1})
    metrics = read_journal(path)[0].metrics
    assert math.isnan(metrics["nan"])
    assert (metrics["inf"], metrics["minus"], metrics["tenth"]) == (math.inf, -math.inf, 0.1)


@pytest.mark.parametrize("step", [1, 2])
def test_steps_must_increase_also_after_reopening(tmp_path, step):
    path = tmp_path / "journal.jsonl"
    for journal in (_journal(path, 2), MetricJournal(path)):
        assert journal.last_step == 2
        with pytest.raises(StorageError, match="already holds step 2"):
            journal.step(step, {})


def test_cut_keeps_the_prefix_and_puts_the_rest_aside(tmp_path):
    path = tmp_path / "journal.jsonl"
    _journal(path, 5)
    before = read_journal(path)
    journal = MetricJournal(path)
    assert journal.cut(3) == 2
    assert read_journal(path) == before[:3]  # timestamps too
    assert read_journal(tmp_path / "journal.cut-1.jsonl") == before[3:]
    journal.step(4, {"reward": 9.0})
    assert journal.cut(3) == 1
    assert read_journal(tmp_path / "journal.cut-2.jsonl")[0].metrics == {"reward": 9.0}
    assert journal.cut(3) == 0
    assert len(list(tmp_path.iterdir())) == 3  # nothing cut, no file


def test_cut_to_zero_empties_the_journal(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = _journal(path, 2)
    assert journal.cut(0) == 2
    assert read_journal(path) == []
    assert journal.last_step is None
    journal.step(1, {})


def test_every_way_to_tear_the_last_line_loses_that_line_only(tmp_path):
    path = tmp_path / "journal.jsonl"
    _journal(path, 2)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert [record.step for record in read_journal(path)] == [1]
        journal = MetricJournal(path)
        with pytest.raises(StorageError, match="half-written"):
            journal.step(2, {})
        assert journal.cut(1) == 0
        aside = tmp_path / "journal.cut-1.jsonl"
        assert aside.read_bytes() == whole[first:end]
        aside.unlink()
        journal.step(2, {"reward": 0.5})
        assert [record.step for record in read_journal(path)] == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"step": 1, "timestamp_ms": 1, "metrics"\n{"step": 2, "timestamp_ms": 1, "metrics": {}}\n',
            "line 1",
        ),
        ('{"step": 1, "timestamp_ms": 1}\n', "line 1 is damaged"),
        ("null\n", "line 1 is damaged"),
        ('{"step": 1, "timestamp_ms": 1, "metrics": {}}\n\n', "line 2 is damaged"),
        ('{"step": 2, "timestamp_ms": 1, "metrics": {}}\n' * 2, "step 2 after step 2"),
    ],
)
def test_any_other_damage_is_an_error(tmp_path, text, message):
    path = tmp_path / "journal.jsonl"
    path.write_text(text)
    with pytest.raises(StorageError, match=message):
        read_journal(path)


def test_a_journal_shorter_than_the_checkpoint_is_reported(tmp_path, caplog):
    _journal(tmp_path / "journal.jsonl", 2).cut(5)
    assert "ends at step 2, the checkpoint" in caplog.text
