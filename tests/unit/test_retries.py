"""Which failures of a step are tried again, how often, and after how long."""

from __future__ import annotations

import pytest

from infra.errors import ServerError, ServerRefusedError, StorageAwayError, StorageError, StorageRefusedError
from rlcore.errors import ConfigError, TrainerFailedError
from rlcore.segment.failures import Failure, policy_of
from tasks.retries import Tries


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
