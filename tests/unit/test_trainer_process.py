"""The trainer's process from its spec to its exit code. Everything is real but Ray, the rank behind it and the grading
processes: lease, control file, journal, checkpoints, health rules, loop and worker group."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

import rlcore.training.assemble
from rlcore import gpus
from rlcore.adjustments import Adjustments, Intervention
from rlcore.artifacts import DatasetRef, ModelRef
from rlcore.config import ExperimentConfig
from rlcore.data.table import PreparedRow, write_rows
from rlcore.errors import DivergedError
from rlcore.evaluation.records import read_records
from rlcore.failures import EXIT_DIVERGED, EXIT_DONE, EXIT_PAUSED, EXIT_PREEMPTED, EXIT_ROLLBACK, EXIT_UNKNOWN
from rlcore.jobs.segment import StopRequest, live_stacks, main
from rlcore.process import SIGNAL
from rlcore.segment.journal import MetricJournal, read_journal
from rlcore.segment.lease import Control, Lease, LeaseInfo
from rlcore.segment.spec import SegmentManifest, SegmentSpec, segment_path
from rlcore.specs import JobError
from tests.unit import toy_run as toy
from tests.unit.toy_rank import ToyRank, started, weights_in


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    faulthandler.unregister(SIGNAL)
    for number, handler in before.items():
        signal.signal(number, handler)


@dataclass
class Run:
    """A run's folder, and a driver that wants every segment."""

    root: Path
    monkeypatch: pytest.MonkeyPatch
    rank: ToyRank = field(default_factory=ToyRank)  # of the last trainer
    on_start: Callable[[ExperimentConfig], object] = lambda config: None

    def __post_init__(self) -> None:
        self.dir = self.root / "run"
        self.dir.mkdir(parents=True)
        self.control = Control(self.dir / "control.json")
        self.control.beat(99)
        write_rows(self.root, [PreparedRow(problem, i, 2, 0) for i, problem in enumerate(toy.PROBLEMS)])

    def train(
        self,
        before_update: Callable[[int], object] = lambda number: None,
        adjustments: Adjustments | None = None,
        before_evaluation: Callable[[int], object] | None = None,
        **parts: object,
    ) -> int:
        """The exit code of one trainer of five steps in segments of two. With ``before_evaluation`` it evaluates."""
        dataset = DatasetRef(
            path=str(self.root), digest="d", source="test", num_problems=24, num_rejected=0, num_images=0,
            max_prompt_tokens=2,
        )  # fmt: skip
        spec = SegmentSpec(
            run_id="run",
            run_dir=self.dir,
            experiment=toy.config(
                training={"problems_per_batch": 4, "steps": 5, "learning_rate": 0.01, **parts.pop("training", {})},
                segment={"steps": 2, "keep_checkpoints": 9},
                **parts,
            ),
            dataset=dataset,
            validation=dataset if before_evaluation is not None else None,
            model=ModelRef(path=str(self.root), digest="m", source="tiny", num_parameters=1),
            adjustments=adjustments or Adjustments(),
        )
        path = self.root / "spec.json"
        path.write_text(spec.model_dump_json())
        self.rank = ToyRank(before_update, before_evaluation or (lambda number: None))
        self.monkeypatch.setattr(rlcore.training.assemble, "graded_ranks", started(self.rank, self.on_start))
        return main(path)

    def manifest(self, segment: int) -> SegmentManifest:
        return SegmentManifest.model_validate_json(segment_path(self.dir, segment).read_text())

    def wait_for_segment(self, segment: int) -> None:
        while not segment_path(self.dir, segment).exists():
            time.sleep(0.01)

    def segments(self) -> list[tuple[int, int, bool]]:
        """First and last step of each, and whether it is complete."""
        found = [self.manifest(number) for number in range(len(list(self.dir.glob("segments/*.json"))))]
        return [(manifest.first_step, manifest.last_step, manifest.complete) for manifest in found]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.dir / "checkpoints").iterdir())

    def weights(self) -> dict[str, float]:
        return {name: weights_in(self.dir / "checkpoints" / name) for name in self.checkpoints()}

    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        """Of each step, without what measures time."""
        timed = ("time/", "perf/update_tokens_per_second", "perf/update_tflops", "system/")
        return [
            (record.step, {name: value for name, value in record.metrics.items() if not name.startswith(timed)})
            for record in read_journal(self.dir / "journal.jsonl")
        ]

    def error(self) -> JobError:
        return JobError.model_validate_json((self.dir / "trainer_error.json").read_text())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_a_run_ends_with_a_manifest_for_each_segment_and_nothing_held(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    stale = live_stacks(run.dir) / "trainer-1.txt"
    stale.parent.mkdir(parents=True)
    stale.write_text("stacks of the trainer before")
    with caplog.at_level(logging.WARNING):
        assert run.train() == EXIT_DONE
    assert not caplog.records
    assert run.segments() == [(0, 2, True), (2, 4, True), (4, 5, True)]
    assert run.checkpoints() == ["step-000002", "step-000004", "step-000005"]
    assert [step for step, _ in run.metrics()] == [1, 2, 3, 4, 5]
    nothing = ("filled", "from_buffer", "buffered", "in_flight", "dropped_stale")
    assert [[metrics[f"rollout/groups_{name}"] for name in nothing] for _, metrics in run.metrics()] == [[0] * 5] * 5
    assert [metrics["rollout/problems_seen"] for _, metrics in run.metrics()] == [4, 8, 12, 16, 20]
    assert [path.name for path in sorted((run.dir / "trained").iterdir())] == [
        f"step-00000{n}.json" for n in range(1, 6)
    ]
    assert run.rank.calls == [
        "sync_weights 0",
        *(call for step in range(1, 6) for call in ("generate", "update", f"sync_weights {step}")),
        "closed",
    ]
    assert not (run.dir / "lease.json").exists()
    assert not (run.dir / "trainer_error.json").exists()
    assert run.rank.folder == live_stacks(run.dir) == run.dir / "stacks" / "live"
    assert [path.name for path in run.rank.folder.iterdir()] == [f"trainer-{os.getpid()}.txt"]
    manifest = run.manifest(2)
    assert (manifest.run_id, manifest.segment, manifest.dataset_digest) == ("run", 2, "d")
    probe = json.loads((Path(manifest.checkpoint.path) / "canary.json").read_text())
    assert [sequence["token_ids"] for sequence in probe["sequences"]] == [[1, 0], [1, 1], [1, 2], [1, 3]]
    assert probe["sequences"][0]["logprobs"] == pytest.approx([-run.weights()["step-000005"]])


@pytest.mark.parametrize("how", ["signal", "driver"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    undisturbed, stopped = (Run(tmp_path / name, monkeypatch) for name in ("undisturbed", "stopped"))
    assert undisturbed.train() == EXIT_DONE

    def take_signals(config: ExperimentConfig) -> None:
        """As Ray does when it starts."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def stop_in_the_third(number: int) -> None:
        if number == 3:
            signal.raise_signal(signal.SIGTERM) if how == "signal" else stopped.control.beat(99, stop=True)

    stopped.on_start = take_signals
    assert stopped.train(stop_in_the_third) == EXIT_PREEMPTED
    assert stopped.segments() == [(0, 2, True), (2, 3, False)]
    assert not (stopped.dir / "lease.json").exists()
    # a step that no checkpoint has is not the run's
    MetricJournal(stopped.dir / "journal.jsonl").step(4, {"loss/total": 9.0})

    stopped.control.beat(99)
    assert stopped.train() == EXIT_DONE
    assert stopped.rank.calls[:3] == ["load step-000003", "sync_weights 3", "generate"]
    assert stopped.segments() == undisturbed.segments() == [(0, 2, True), (2, 4, True), (4, 5, True)]
    assert stopped.metrics() == undisturbed.metrics()
    weights = stopped.weights()
    assert weights.pop("step-000003") > 1
    assert weights == undisturbed.weights()

    assert stopped.train() == EXIT_DONE  # there is nothing left to train
    assert stopped.rank.calls == ["load step-000005", "sync_weights 5", "closed"]


@pytest.mark.parametrize(
    ("every", "steps"), [("segment", [0, 2, 4, 5]), (1, [0, 1, 2, 3, 4, 5]), (3, [0, 3, 5]), (None, [])]
)
def test_the_trainer_evaluates_when_it_is_due_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int | str | None, steps: list[int]
) -> None:
    plain, evaluated = (Run(tmp_path / name, monkeypatch) for name in ("plain", "evaluated"))
    assert plain.train() == EXIT_DONE
    evaluation = {"every_steps": every, "problems": 3}
    assert evaluated.train(before_evaluation=lambda number: None, evaluation=evaluation) == EXIT_DONE
    assert [record.report.step for record in read_records(evaluated.dir)] == steps
    assert evaluated.metrics() == plain.metrics()
    assert evaluated.weights() == plain.weights()
    wanted = ["sync_weights 0", *(["add_images evaluated"] if steps else []), *_evaluation(0, steps)]
    for step in range(1, 6):
        wanted += ["generate", "update", f"sync_weights {step}", *_evaluation(step, steps)]
    assert evaluated.rank.calls == [*wanted, "closed"]


def _evaluation(step: int, steps: list[int]) -> list[str]:
    return ["evaluate", "reset"] if step in steps else []


def test_patience_ends_the_run_at_a_segment_end_and_a_restart_trains_no_further(run: Run) -> None:
    evaluation = {"patience": 1, "problems": 3, "temperature": 0.0}  # the toy rank's accuracy never changes
    for calls in (["generate", "update", "sync_weights 1"], ["load step-000002"]):
        assert run.train(before_evaluation=lambda number: None, evaluation=evaluation) == EXIT_DONE
        assert run.segments() == [(0, 2, True)]
        assert set(calls) <= set(run.rank.calls)
    assert "update" not in run.rank.calls
    assert run.train(before_evaluation=lambda number: None, evaluation={**evaluation, "patience": 2}) == EXIT_DONE
    assert run.segments() == [(0, 2, True), (2, 4, True)]


@pytest.mark.parametrize(
    ("every", "interrupted", "left"),
    [
        ("segment", 0, []),  # step 0
        ("segment", 2, [(0, 2, True), (2, 4, False)]),  # step 4
        ("segment", 3, [(0, 2, True), (2, 4, True), (4, 5, True)]),  # step 5, the last
        (3, 1, [(0, 2, True), (2, 3, False)]),  # step 3, in the middle of a segment
    ],
)
def test_a_trainer_that_has_to_stop_leaves_its_evaluation_to_the_next_one(
    run: Run, every: int | str, interrupted: int, left: list[tuple[int, int, bool]]
) -> None:
    def stop(number: int) -> None:
        if number == interrupted + 1:
            run.control.beat(99, stop=True)

    evaluation = {"every_steps": every, "problems": 3}
    code = run.train(before_evaluation=stop, evaluation=evaluation)
    assert (code, run.segments()) == (EXIT_DONE if len(left) == 3 else EXIT_PREEMPTED, left)
    assert len(read_records(run.dir)) == interrupted
    before = [record.report for record in read_records(run.dir)]
    run.control.beat(99)
    assert run.train(before_evaluation=lambda number: None, evaluation=evaluation) == EXIT_DONE
    assert run.segments() == [(0, 2, True), (2, 4, True), (4, 5, True)]
    after = [record.report for record in read_records(run.dir)]
    assert after[:interrupted] == before
    due = {"segment": [0, 2, 4, 5], 3: [0, 3, 5]}[every]
    assert [report.step for report in after] == (due[:-1] if len(left) == 3 else due)  # the flow evaluates the last


def test_a_driver_that_wants_no_further_segment_gets_none(run: Run) -> None:
    run.control.beat(0)

    def stop_after_the_first() -> None:
        run.wait_for_segment(0)
        run.control.beat(0, stop=True)

    with ThreadPoolExecutor(1) as driver:
        driver.submit(stop_after_the_first)
        assert run.train() == EXIT_PREEMPTED
    assert run.segments() == [(0, 2, True)]
    assert run.rank.calls.count("update") == 2


def test_the_settings_of_a_continued_run_are_logged(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    assert run.train() == EXIT_DONE
    with caplog.at_level(logging.WARNING):
        assert run.train(training={"steps": 6, "learning_rate": 0.02}) == EXIT_DONE
    assert "this run continues with another experiment" in caplog.text
    assert run.segments()[-1] == (5, 6, True)
    assert run.metrics()[-1][1]["optim/learning_rate"] == 0.02


def test_a_run_that_another_trainer_holds_is_left_alone(run: Run) -> None:
    lease = Lease(run.dir / "lease.json")
    mine = lease.acquire("t")
    parent = psutil.Process(os.getppid())
    other = mine.model_copy(
        update={"token": "other", "pid": parent.pid, "started": parent.create_time() - psutil.boot_time()}
    )
    (run.dir / "lease.json").write_text(other.model_dump_json())
    live_stacks(run.dir).mkdir(parents=True)
    assert run.train() == EXIT_UNKNOWN
    assert run.rank.calls == []
    assert run.error().kind == "LeaseLostError"
    assert "token other" in run.error().message
    assert LeaseInfo.model_validate_json((run.dir / "lease.json").read_text()) == other
    assert list(run.dir.glob("journal.jsonl")) == []
    assert live_stacks(run.dir).exists(), "the other trainer's"


def test_a_trainer_that_finds_another_token_writes_nothing_more(run: Run) -> None:
    def lose(number: int) -> None:
        if number == 3:
            run.wait_for_segment(0)
            lease = run.dir / "lease.json"
            info = LeaseInfo.model_validate_json(lease.read_text())
            lease.write_text(info.model_copy(update={"token": "other"}).model_dump_json())

    assert run.train(lose) == EXIT_UNKNOWN
    assert run.error().kind == "LeaseLostError"
    assert run.segments() == [(0, 2, True)]
    assert run.checkpoints() == ["step-000002"]
    assert LeaseInfo.model_validate_json((run.dir / "lease.json").read_text()).token == "other"


def test_an_error_of_a_rank_is_the_report_and_the_exit_code(run: Run) -> None:
    def fail(number: int) -> None:
        if number == 4:
            raise DivergedError("the weights of step 4 are broken")

    assert run.train(fail) == EXIT_DIVERGED
    error = run.error()
    assert (error.kind, error.message) == ("DivergedError", "the weights of step 4 are broken")
    assert "raise DivergedError" in error.traceback
    assert run.segments() == [(0, 2, True)]
    assert not (run.dir / "lease.json").exists()


@pytest.mark.parametrize(
    ("action", "code", "segments", "kind"),
    [
        ("pause", EXIT_PAUSED, [(0, 2, True), (2, 3, False)], "HealthError"),
        ("rollback", EXIT_ROLLBACK, [(0, 2, True)], "RollbackError"),
    ],
)
def test_a_health_rule_ends_the_trainer_after_the_batch_that_broke_it(
    run: Run, action: str, code: int, segments: list[tuple[int, int, bool]], kind: str
) -> None:
    run.train()
    limit = run.metrics()[1][1]["loss/policy"]  # of step 2: the weights grow, and step 3 is above it
    again = Run(run.root / "again", run.monkeypatch)
    rules = [{"metric": "loss/policy", "above": limit, "action": action}]
    assert again.train(health=rules) == code
    assert again.segments() == segments
    assert again.error().kind == kind
    assert "step 3: loss/policy above" in again.error().message


def test_earlier_failures_change_rate_seed_and_token_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, changed = (Run(tmp_path / name, monkeypatch) for name in ("plain", "changed"))
    intervention = Intervention(step=2, learning_rate_factor=0.5, seed=9, rule="r")
    assert plain.train(training={"tokens_per_microbatch": 4096}) == EXIT_DONE
    adjustments = Adjustments(tokens_per_microbatch=4, interventions=(intervention,))
    assert changed.train(adjustments=adjustments, training={"tokens_per_microbatch": 4096}) == EXIT_DONE
    assert [metrics["optim/learning_rate"] for _, metrics in changed.metrics()] == pytest.approx(
        [0.01, 0.01, 0.005, 0.005, 0.005]
    )
    assert plain.rank.seeds[:8] == changed.rank.seeds[:8]
    assert not set(plain.rank.seeds[8:]) & set(changed.rank.seeds[8:])
    assert max(plain.rank.microbatches) < min(changed.rank.microbatches)


def test_the_command_line_takes_one_spec_and_exits_with_the_trainers_code(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exit_of(*arguments: str) -> object:
        monkeypatch.setattr(sys, "argv", ["python -m rlcore.jobs.segment", *arguments])
        with pytest.raises(SystemExit) as exited:
            runpy.run_module("rlcore.jobs.segment", run_name="__main__")
        return exited.value.code

    run.control.beat(99, stop=True)
    assert run.train() == EXIT_PREEMPTED
    spec = str(run.root / "spec.json")
    assert exit_of(spec) == EXIT_PREEMPTED
    for words in ((), (spec, "more")):
        assert exit_of(*words) == "usage: python -m rlcore.jobs.segment SPEC.json"


def test_progress_is_written_once_a_second_at_most(tmp_path: Path) -> None:
    now = [10.0]
    lease, control = Lease(tmp_path / "lease.json"), Control(tmp_path / "control.json")
    lease.acquire("t")
    control.beat(0)
    stop = StopRequest(lease, control, 60.0, now=lambda: now[0])

    def progress_after(seconds: float) -> int:
        now[0] += seconds
        stop.progress()
        info = lease.read()
        assert info is not None
        return info.progress

    assert [progress_after(seconds) for seconds in (0.0, 1.0, 0.125, 0.0, 1.0, 0.125)] == [0, 0, 1, 1, 1, 2]
    assert not stop.preempted()  # this is progress as well
    assert progress_after(1.0) == 3
    assert progress_after(0.125) == 4


@pytest.mark.parametrize("told", [True, False])
def test_a_trainer_waits_for_gpus_that_another_run_uses(run: Run, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """It can be told to stop meanwhile; otherwise it trains once they are free."""
    monkeypatch.setattr(gpus, "FOLDER", run.root / "gpus")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(gpus, "_POLL_SECONDS", 0.01)
    of_another: dict[str, int] = {}
    monkeypatch.setattr(gpus, "_claimed", of_another)
    gpus.claim_gpus(1)
    monkeypatch.setattr(gpus, "_claimed", {})
    with ThreadPoolExecutor() as thread:

        def end_the_wait() -> None:
            while not (run.dir / "lease.json").exists():
                time.sleep(0.01)
            assert not (run.dir / "journal.jsonl").exists()
            if told:
                run.control.beat(99, stop=True)
            else:
                os.close(of_another.popitem()[1])

        done = thread.submit(end_the_wait)
        code = run.train(resources={"device": "auto"})
        done.result()
    assert code == (EXIT_PREEMPTED if told else EXIT_DONE)
    assert (run.rank.calls == []) == told
    for file in (*of_another.values(), *gpus._claimed.values()):
        os.close(file)


def test_a_bit_that_flipped_in_the_newest_checkpoint_is_found_before_it_is_loaded(run: Run) -> None:
    assert run.train() == EXIT_DONE
    weights, metrics = run.weights(), run.metrics()
    file = run.dir / "checkpoints" / "step-000005" / "train_state" / "weights.json"
    content = file.read_text()
    file.write_text(content[:-1] + str((int(content[-1]) + 1) % 10))  # of the same size

    assert run.train() == EXIT_DONE
    assert "load step-000005" not in run.rank.calls
    assert "load step-000004" in run.rank.calls
    assert run.checkpoints() == [".damaged-step-000005-1", *weights]
    assert {name: weights_in(run.dir / "checkpoints" / name) for name in weights} == weights
    assert run.metrics() == metrics
