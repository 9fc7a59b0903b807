"""Which failures of a step are tried again, how often, and after how long."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from infra.errors import ServerError, ServerRefusedError, StorageAwayError, StorageError, StorageRefusedError
from rlcore.errors import ConfigError, TrainerFailedError
from rlcore.failures import Failure, policy_of
from tasks import retries
from tasks.retries import Tries, step


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (ServerError("MLflow is away"), len(policy_of(Failure.TRACKING).delays)),
        (StorageError("the store is away"), len(policy_of(Failure.STORAGE).delays)),
        (TrainerFailedError("the job died"), 2),
        (StorageRefusedError("quota exceeded"), 0),
        (ServerRefusedError("the experiment is deleted"), 0),
        (StorageAwayError("for an hour already"), 0),
        (ConfigError("a typo"), 0),
        (ZeroDivisionError("a mistake of ours"), 0),
    ],
)
def test_a_failure_has_the_tries_of_its_class(error: Exception, tries: int) -> None:
    counted = Tries()
    assert [counted.failed("step", error, others=(5, 30)) for _ in range(tries + 1)] == [True] * tries + [False]


def test_delays_are_those_of_the_table_and_each_class_counts_for_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RLFLOW_RETRY_DELAY_SCALE", "0.5")
    counted = Tries()
    for error in (ServerError("a"), StorageError("b"), ServerError("c")):
        assert counted.failed("report", error, others=())
    assert [line.partition(" in ")[2] for line in caplog.messages] == ["15 s: a", "5 s: b", "30 s: c"]


def test_the_next_try_waits_for_what_is_left_of_the_delay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now, slept = [1000.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(retries.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(retries.time, "sleep", sleep)
    counted = Tries()
    counted.wait("report")
    assert counted.failed("report", StorageError("away"), others=())
    first = policy_of(Failure.STORAGE).delays[0]
    now[0] += first - 2.5
    caplog.clear()
    counted.wait("report")
    assert slept == [1.0, 1.0, 0.5]
    assert caplog.messages == ["report: the next try starts in 2 s"]
    counted.wait("report")
    assert len(slept) == 3, "the time is over"


def test_a_step_counts_its_failed_tries_by_its_run() -> None:
    done: list[int] = []

    @step("add", others=(5,), timeout_seconds=10)
    def add(number: int) -> int:
        """Adds."""
        done.append(number)
        return number + 1

    assert add.fn(2) == 3
    assert done == [2]
    assert (add.name, add.description) == ("add", "Adds.")
    longest = max(*policy_of(Failure.TRACKING).delays, *policy_of(Failure.STORAGE).delays)
    assert add.timeout_seconds == 10 + longest
    assert add.retries >= len(policy_of(Failure.TRACKING).delays)
    assert (add.persist_result, add.cache_policy) == (False, NO_CACHE)
    asked = add.retry_condition_fn
    assert asked is not None
    first, second = SimpleNamespace(id=uuid4()), SimpleNamespace(id=uuid4())
    failed = SimpleNamespace(data=TrainerFailedError("the job died"))
    answers = [asked(add, run, failed) for run in (first, first, second)]  # type: ignore[arg-type]
    assert answers == [True, False, True]
    assert not asked(add, second, SimpleNamespace(data=None))  # type: ignore[arg-type]


def test_a_try_of_a_step_waits_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr(Tries, "wait", lambda _, name: waited.append(name))
    told = step("tell")(lambda: "told")
    again, new = uuid4(), uuid4()
    monkeypatch.setitem(retries._TRIES, again, Tries())
    with TaskRunContext.model_construct(task_run=SimpleNamespace(id=new)):
        assert told.fn() == "told"
    assert waited == []
    with TaskRunContext.model_construct(task_run=SimpleNamespace(id=again)):
        assert told.fn() == "told"
    assert waited == ["tell"]
