import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.errors import StorageError
from rlcore.segment import journal as journal_module
from rlcore.segment.journal import JournalTail, MetricJournal, StepRecord, read_journal


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
    assert read_journal(path)[1:] == [StepRecord(2, 1001, {"reward": 0.5})]
    assert read_journal(tmp_path / "none.jsonl") == []


def test_non_finite_values_survive_a_round_trip(tmp_path):
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


def _recorded(path: Path, steps: range, at: int) -> None:
    journal = MetricJournal(path, now_ms=lambda: at)
    for step in steps:
        journal.step(step, {"reward/mean": float(step)})


def test_a_tail_reads_only_what_was_appended(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    tail = JournalTail(path)
    assert tail.read() == []
    parsed = []
    parse_line = journal_module.parse_record
    monkeypatch.setattr(journal_module, "parse_record", lambda line: parsed.append(line) or parse_line(line))
    _recorded(path, range(1, 4), 1)
    parsed.clear()
    assert [record.step for record in tail.read()] == [1, 2, 3]
    assert len(parsed) == 3
    with path.open("a") as file:
        file.write('{"step":4,"timestamp_ms":1,"metr')  # under way
    assert [record.step for record in tail.read()] == [1, 2, 3]
    with path.open("a") as file:
        file.write('ics":{}}\n')
    assert [record.step for record in tail.read()] == [1, 2, 3, 4]
    assert len(parsed) == 4
    path.unlink()
    assert tail.read() == []


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 4)),
            st.tuples(st.just("cut"), st.integers(0, 12)),
            st.tuples(st.just("tear"), st.integers(1, 30)),
            st.tuples(st.just("look"), st.just(0)),
        ),
        max_size=12,
    )
)
def test_a_tail_sees_what_the_file_holds_whatever_happened_between_two_looks(events):
    """Resumes cut the journal and record the steps again, at other times but perhaps in as many bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        tail, step, now = JournalTail(path), 0, 1_700_000_000_000
        for what, amount in events:
            now += 1
            if what == "look":
                assert tail.read() == read_journal(path)
                continue
            journal = MetricJournal(path, now_ms=lambda now=now: now)
            if what == "tear":
                with path.open("a") as file:
                    file.write("x" * amount)
                journal = MetricJournal(path, now_ms=lambda now=now: now)
            if what != "append":
                journal.cut(min(step, amount) if what == "cut" else step)
                step = journal.last_step or 0
                continue
            for _ in range(amount):
                step += 1
                journal.step(step, {"reward/mean": 0.5})
        assert tail.read() == read_journal(path)


def test_a_tail_names_the_damaged_line_of_the_whole_file(tmp_path):
    path = tmp_path / "journal.jsonl"
    _recorded(path, range(1, 4), 1)
    tail = JournalTail(path)
    tail.read()
    with path.open("a") as file:
        file.write("nonsense\n")
    for _ in range(2):
        with pytest.raises(StorageError, match="line 4 is damaged"):
            tail.read()
