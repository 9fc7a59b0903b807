"""Each class of failure: how it is detected, what changes before the retry, and how often it is retried."""

from __future__ import annotations

import errno
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.errors import ServerError, StorageAwayError, StorageRefusedError
from infra.settings import Settings
from rlcore import errors
from rlcore.adjustments import Adjustments, Intervention
from rlcore.config import ExperimentConfig, HealthRule
from rlcore.failures import POLICIES, Failure, classify, error_of_exit, exit_code, table, with_free_space
from rlcore.process import oom_kills
from rlcore.segment.journal import MetricJournal
from tasks.driver.failures import FailureLog, FailureRecord, handle_failures, read_adjustments, wait_for_next_try
from tasks.run import Run

ROOT = Path(__file__).resolve().parents[2]


class OutOfMemoryError(RuntimeError):
    """Named as torch's and Ray's."""


def run_in(folder: Path, **values: object) -> Run:
    experiment = ExperimentConfig.model_validate({"name": "toy", **values})
    return Run(run_id="r", run_dir=folder, experiment=experiment)


def settings(**values: object) -> Settings:
    return Settings(retry_delay_scale=1.0, **values)


class Announced:
    def __init__(self) -> None:
        self.consequences: list[str] = []

    def __call__(self, run: Run, breach: object, consequence: str) -> None:
        self.consequences.append(consequence)


def fail(run: Run, error: Exception, announce: Announced | None = None) -> Exception:
    """What a try that fails with ``error`` raises in the end."""
    with (
        pytest.raises(Exception, match=r"(?s).") as caught,
        handle_failures(run, settings(), announce=announce or Announced()),
    ):
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("error", "failure", "code"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), Failure.OUT_OF_MEMORY, 76),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), Failure.OUT_OF_MEMORY, 76),
        (MemoryError(), Failure.OUT_OF_MEMORY, 76),
        (errors.MemoryExhaustedError("m"), Failure.OUT_OF_MEMORY, 76),
        (errors.WorkerLostError("rank 1"), Failure.WORKER_LOST, 79),
        (errors.HangError("h"), Failure.HANG, 1),
        (errors.DivergedError("nan"), Failure.DIVERGED, 77),
        (errors.UngradedError("u"), Failure.UNGRADED, 80),
        (errors.RewardError("no such function"), Failure.BAD_INPUT, 78),
        (errors.ConfigError("typo"), Failure.BAD_INPUT, 78),
        (errors.ConfigError("the message quotes: out of memory"), Failure.BAD_INPUT, 78),
        (errors.StarvedError("s"), Failure.STARVED, 78),
        (errors.PreemptedError("p"), Failure.PREEMPTED, 75),
        (errors.HealthError("h"), Failure.PAUSED, 82),
        (errors.RollbackError("h"), Failure.ROLLBACK, 83),
        (OSError(errno.ENOSPC, "No space left on device"), Failure.STORAGE, 81),
        (OSError(errno.EROFS, "Read-only file system"), Failure.STORAGE, 81),
        (PermissionError(errno.EACCES, "Permission denied"), Failure.STORAGE, 81),
        (errors.CheckpointError("damaged"), Failure.STORAGE, 81),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), Failure.STORAGE, 81),
        (ServerError("mlflow"), Failure.TRACKING, 1),
        (errors.TrainerFailedError("t"), Failure.UNKNOWN, 1),
        (errors.SamplerError("s"), Failure.UNKNOWN, 1),
        (FileNotFoundError(errno.ENOENT, "x"), Failure.UNKNOWN, 1),
        (ZeroDivisionError("a mistake of ours"), None, 1),
        (errors.RetriesUsedUpError("r"), None, 1),
    ],
)
def test_errors_have_a_class_and_an_exit_code(error: Exception, failure: Failure | None, code: int) -> None:
    assert classify(error) == failure
    assert exit_code(error) == code


def test_the_cause_of_an_error_is_looked_at() -> None:
    error = RuntimeError("CheckpointException ranks:dict_keys([1])")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert classify(error) == Failure.STORAGE


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (76, errors.MemoryExhaustedError), (77, errors.DivergedError), (78, errors.ConfigError),
        (75, errors.PreemptedError), (81, errors.StorageError), (82, errors.HealthError), (83, errors.RollbackError),
        (79, errors.WorkerLostError), (80, errors.UngradedError), (-9, errors.WorkerLostError),
        (1, errors.TrainerFailedError), (3, errors.TrainerFailedError),
    ],
)  # fmt: skip
def test_a_trainer_without_a_report_is_known_by_its_exit_code(code: int, kind: type[Exception]) -> None:
    assert type(error_of_exit(code, f"exit code {code}")) is kind


def test_every_class_has_one_row_and_the_docs_print_them() -> None:
    assert [policy.failure for policy in POLICIES] == list(Failure)
    assert table() in (ROOT / "docs" / "reliability.md").read_text()


def test_a_storage_error_tells_the_free_space(tmp_path: Path) -> None:
    told = with_free_space(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert isinstance(told, errors.StorageError)
    assert "No space left on device" in str(told)
    assert "MiB free" in str(told)


def test_the_kernel_s_count_of_memory_kills(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 1\noom_kill 7\n")
    assert oom_kills((str(tmp_path / "none"), str(events), str(vmstat))) == 2
    assert oom_kills((str(vmstat),)) == 7
    assert oom_kills((str(tmp_path / "none"),)) == 0


def test_a_class_is_retried_as_often_as_the_table_says_then_names_itself(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    for _ in range(3):
        assert type(fail(run, errors.WorkerLostError("rank 1 is gone"))) is errors.WorkerLostError
    final = fail(run, errors.WorkerLostError("rank 1 is gone"))
    assert type(final) is errors.RetriesUsedUpError
    assert "worker or node death: 4 times since step 0" in str(final)
    assert str(final).startswith("rank 1 is gone")
    assert [record.delay for record in FailureLog(tmp_path).read()] == [1, 30, 120, None]


def test_a_re_run_goes_on_counting_and_progress_starts_anew(tmp_path: Path) -> None:
    log = FailureLog(tmp_path)
    for attempt in range(1, 5):
        log.add(
            FailureRecord(
                at=datetime.now(UTC), failure=Failure.HANG, step=0, attempt=attempt, delay=None, error="stuck"
            )
        )
    assert type(fail(run_in(tmp_path), errors.HangError("stuck"))) is errors.RetriesUsedUpError
    assert type(fail(run_in(tmp_path), errors.WorkerLostError("other"))) is errors.WorkerLostError
    assert [record.attempt for record in log.read()] == [1, 2, 3, 4, 5, 1]

    class Further(Run):
        def committed_step(self) -> int:
            return 20

    further = Further(run_id="r", run_dir=tmp_path, experiment=run_in(tmp_path).experiment)
    assert type(fail(further, errors.HangError("stuck"))) is errors.HangError
    assert log.read()[-1].attempt == 1


def test_what_is_never_retried_is_recorded_and_raised_as_it_is(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert type(fail(run, errors.DivergedError("nan"))) is errors.DivergedError
    assert type(fail(run, errors.StarvedError("few"))) is errors.StarvedError
    assert [record.delay for record in FailureLog(tmp_path).read()] == [None, None]


def test_a_mistake_in_our_own_code_is_not_counted(tmp_path: Path) -> None:
    assert type(fail(run_in(tmp_path), KeyError("x"))) is KeyError
    assert not (tmp_path / "failures.jsonl").exists()


def test_a_full_disk_does_not_stop_the_counting(tmp_path: Path) -> None:
    run = run_in(tmp_path / "run")
    (tmp_path / "run").write_text("a file where the folder should be: nothing can be written")
    for _ in range(6):
        told = fail(run, OSError(errno.ENOSPC, "No space left on device"))
        assert type(told) is errors.StorageError
        assert "MiB free" in str(told)
    assert type(fail(run, OSError(errno.ENOSPC, "No space left"))) is errors.RetriesUsedUpError
    (tmp_path / "run").unlink()
    fail(run, errors.DivergedError("nan"))
    lines = (tmp_path / "run" / "failures.jsonl").read_text().splitlines()
    assert len(lines) == 8  # those of before as well


def test_the_next_try_waits_for_what_is_left_of_the_delay(tmp_path: Path) -> None:
    run, slept = run_in(tmp_path), []
    wait_for_next_try(run, sleep=slept.append)
    old = datetime.now(UTC) - timedelta(hours=1)
    record = FailureRecord(at=old, failure=Failure.HANG, step=0, attempt=1, delay=30.0, error="e")
    FailureLog(tmp_path).add(record)
    wait_for_next_try(run, sleep=slept.append)
    assert not slept

    class Enough(Exception):
        pass

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        raise Enough

    ahead = record.model_copy(update={"at": datetime.now(UTC) + timedelta(minutes=5), "delay": 0.5})
    FailureLog(tmp_path).add(ahead)  # by the clock of another host
    with pytest.raises(Enough):
        wait_for_next_try(run, sleep=sleep)
    assert 0 < slept.pop() <= 0.5
    FailureLog(tmp_path).add(record.model_copy(update={"at": datetime.now(UTC)}))
    with pytest.raises(Enough):
        wait_for_next_try(run, sleep=sleep)
    assert slept == [1.0]


def test_out_of_memory_halves_the_budget_down_to_one_sequence_then_says_what_to_lower(tmp_path: Path) -> None:
    data, rollout = {"max_prompt_tokens": 200}, {"max_completion_tokens": 100}
    run = run_in(tmp_path, data=data, rollout=rollout, training={"tokens_per_microbatch": 1000})
    budgets = []
    for _ in range(2):
        assert type(fail(run, errors.MemoryExhaustedError("no memory"))) is errors.MemoryExhaustedError
        budgets.append(read_adjustments(run).tokens_per_microbatch)
    assert budgets == [500, 300]
    final = fail(run, errors.MemoryExhaustedError("no memory"))
    assert type(final) is errors.ConfigError
    assert "tokens_per_microbatch at 300" in str(final)
    assert "rollout.max_completion_tokens (100)" in str(final)
    adjusted = read_adjustments(run).applied_to(run.experiment)
    assert adjusted.training.tokens_per_microbatch == 300
    assert run.experiment.training.tokens_per_microbatch == 1000


def test_a_worker_that_the_kernel_killed_for_memory_is_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([4, 5])
    monkeypatch.setattr("tasks.driver.failures.oom_kills", lambda: next(counts))
    final = fail(run_in(tmp_path), errors.WorkerLostError("the trainer ended with SIGKILL"))
    assert type(final) is errors.MemoryExhaustedError
    assert read_adjustments(run_in(tmp_path)).tokens_per_microbatch == 8192


RULE = {"metric": "loss/kl_ref", "above": 0.5, "for_steps": 2, "learning_rate_factor": 0.25}


def with_breach(folder: Path, action: str) -> Run:
    journal = MetricJournal(folder / "journal.jsonl")
    for step, value in enumerate([0.1, 0.6, 0.7, 0.8], start=1):
        journal.step(step, {"loss/kl_ref": value})
    return run_in(folder, health=[{**RULE, "action": action}])


def test_a_rollback_lowers_the_rate_and_takes_another_seed_from_the_checkpoint_on(tmp_path: Path) -> None:
    run, announced = with_breach(tmp_path, "rollback"), Announced()
    assert type(fail(run, errors.RollbackError("kl"), announced)) is errors.RollbackError
    adjustments = read_adjustments(run)
    (change,) = adjustments.interventions
    assert (change.step, change.learning_rate_factor) == (0, 0.25)
    assert adjustments.learning_rate_factor(1) == 0.25
    assert adjustments.seed(1, configured=0) == change.seed != 0
    assert announced.consequences == [
        "Rolled back to step 0 (rollback 1 of 2); from there on the learning rate is 0.25 times the configured one, "
        f"and the sampling seed is {change.seed}."
    ]
    assert FailureLog(tmp_path).read()[-1].delay == 0
    fail(run, errors.RollbackError("kl"), announced)
    again = read_adjustments(run)
    assert [item.learning_rate_factor for item in again.interventions] == [0.0625]
    assert again.interventions[0].seed != change.seed


def test_steps_before_an_intervention_keep_their_rate_and_seed() -> None:
    changed = Adjustments(interventions=(Intervention(step=20, learning_rate_factor=0.5, seed=7, rule="r"),))
    assert [changed.learning_rate_factor(step) for step in (20, 21)] == [1.0, 0.5]
    assert [changed.seed(step, configured=3) for step in (20, 21)] == [3, 7]
    experiment = ExperimentConfig(name="toy")
    further_back = changed.rolled_back(10, experiment, factor=0.5, rule="r")
    assert [(item.step, item.learning_rate_factor) for item in further_back.interventions] == [(10, 0.25)]
    later = changed.rolled_back(30, experiment, factor=0.5, rule="r")
    assert [later.learning_rate_factor(step) for step in (20, 30, 31)] == [1.0, 0.5, 0.25]


def test_a_pause_is_final_and_the_rule_counts_from_there(tmp_path: Path) -> None:
    class Committed(Run):
        def committed_step(self) -> int:
            return 4

    run, announced = with_breach(tmp_path, "pause"), Announced()
    run = Committed(run_id="r", run_dir=tmp_path, experiment=run.experiment)
    assert type(fail(run, errors.HealthError("kl"), announced)) is errors.HealthError
    assert read_adjustments(run).healthy_from == 4
    assert announced.consequences == ["Paused at step 4, which is committed. Continue the run to go on from there."]


def test_a_health_rule_has_exactly_one_bound() -> None:
    with pytest.raises(ValueError, match="has no bound"):
        HealthRule(metric="reward/mean")
    with pytest.raises(ValueError, match="has above and below"):
        HealthRule(metric="reward/mean", above=1, below=0)


def test_a_store_that_was_waited_for_is_not_waited_for_again(tmp_path: Path) -> None:
    run, error = run_in(tmp_path), StorageAwayError("s3://lab has not taken the checkpoint of step 4 within 3600 s")
    assert fail(run, error) is error
    (record,) = FailureLog(tmp_path).read()
    assert (record.failure, record.delay) == (Failure.STORAGE, None)
    refused = StorageRefusedError("sending s3://lab/x failed: Access Denied. Give the key the rights")
    assert fail(run, refused) is refused
    assert FailureLog(tmp_path).read()[-1].delay is None
