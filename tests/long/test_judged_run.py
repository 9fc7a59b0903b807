"""A run whose rewards a judge gives, killed and stopped: the real trainer on the tiny policy, with FSDP2 and vLLM in
forked ranks, and a judge whose answers nobody can foresee."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Literal

from rlcore.failures import EXIT_BAD_CONFIG, EXIT_DONE, EXIT_PREEMPTED
from rlcore.rewards.verdicts import VerdictJournal
from rlcore.segment.journal import read_journal
from rlcore.segment.lease import Control
from rlcore.specs import JobError
from tests.integration.tiny_run import ALONE, experiment, numbers
from tests.integration.trainer_process import log_of, manifests, spec_of
from tests.judge_server import MODEL, Judge, judge_server
from tests.long.graded_trainer import run_trainer
from tests.ranks import FORKED
from tests.train_states import load_full_weights

CONCURRENCY = 4
STEPS = 6
COMPLETIONS = 16  # of a step
OUTAGE_SECONDS = 120
KEY = "sk-0123456789abcdef"
Kill = Literal["sampling", "outstanding", "journaled", "committing", "committed"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_itself(when: Kill) -> None:
    """From now on this process kills itself at that moment."""
    from rlcore.distributed.group import WorkerGroup
    from rlcore.rewards.judge import JudgeGrader
    from rlcore.rewards.verdicts import VerdictJournal
    from rlcore.segment.checkpointing import Checkpointer

    match when:
        case "sampling":
            generate = WorkerGroup.generate

            def cut_off(self: Any, requests: Any) -> Iterator[Any]:
                answers = generate(self, requests)
                yield next(answers)
                die()

            WorkerGroup.generate = cut_off
        case "outstanding":
            pay, paid = JudgeGrader._pay, []

            def pay_once(self: Any, *arguments: Any) -> None:
                pay(self, *arguments)
                paid.append(self._in_flight)
                if len(paid) >= 5 and self._in_flight > 1:  # this call and others
                    die()

            JudgeGrader._pay = pay_once
        case "journaled":
            append, written = VerdictJournal.append, []

            def append_and_die(self: Any, verdicts: Any) -> None:
                append(self, verdicts)
                written.extend(verdicts)
                if len(written) >= 3:
                    die()

            VerdictJournal.append = append_and_die
        case "committing":
            rename = Path.rename

            def die_instead(self: Path, target: Any) -> Any:
                if self.name.startswith(".staging-"):
                    die()
                return rename(self, target)

            Path.rename = die_instead
        case "committed":
            Checkpointer._end_segment = lambda *_: die()  # its checkpoint has its name, its segment has no manifest


def trainer(spec: Path, kill: Kill | None) -> None:
    os.environ["MY_JUDGE_KEY"] = KEY
    if kill is not None:
        kill_itself(kill)
    run_trainer(spec)


def start(
    folder: Path, model: Path, dataset: Path, server: Judge, kill: Kill | None = None, **settings: Any
) -> ForkServerProcess:
    folder.mkdir(exist_ok=True)
    config = experiment(
        **ALONE,
        **{
            "training.steps": STEPS,
            "segment.steps": 1,
            "segment.keep_checkpoints": STEPS,
            "reward.name": "judge",
            "reward.judge.url": server.url,
            "reward.judge.model": MODEL,
            "reward.judge.concurrency": CONCURRENCY,
            "reward.judge.key_variable": "MY_JUDGE_KEY",
            **settings,
        },
    )
    (folder / "spec.json").write_text(spec_of(folder, model, dataset, config).model_dump_json())
    Control(folder / "control.json").beat(9)
    process = FORKED.Process(target=trainer, args=(folder / "spec.json", kill))
    process.start()
    return process


def wait_for_calls(calls: int, process: ForkServerProcess, server: Judge) -> None:
    """Until the judge has answered that many calls of this test."""
    while sum(server.asked.values()) < calls:
        assert process.is_alive()
        time.sleep(0.002)


def ended(process: ForkServerProcess, folder: Path, code: int) -> None:
    process.join()
    assert process.exitcode == code, log_of(folder)[-2000:]


def learned(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in step.items() if not k.startswith("judge/")} for step in numbers(folder)]


def judged(folder: Path, name: str) -> list[float]:
    return [record.metrics[f"judge/{name}"] for record in read_journal(folder / "journal.jsonl")]


def committed(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def require_equal_to_an_undisturbed_run(folder: Path, model: Path, dataset: Path, server: Judge) -> None:
    """A run with the same verdicts, whose judge refuses to answer, has the same journal and the same weights."""
    undisturbed = folder.with_name("undisturbed")
    undisturbed.mkdir()
    asked = sum(server.asked.values())
    server.answer = lambda _: (401, {"error": "an undisturbed run needs no answer"})
    shutil.copytree(folder / "verdicts", undisturbed / "verdicts")
    ended(start(undisturbed, model, dataset, server), undisturbed, EXIT_DONE)
    assert sum(server.asked.values()) == asked
    assert len({step["reward/mean"] for step in learned(folder)}) == STEPS
    assert learned(undisturbed) == learned(folder)
    weights = [load_full_weights(run / "checkpoints" / f"step-{STEPS:06d}") for run in (folder, undisturbed)]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == value).all() for name, value in weights[1].items())
    assert judged(undisturbed, "calls") == [0] * STEPS
    assert all(replayed > COMPLETIONS / 2 for replayed in judged(undisturbed, "replayed"))  # the others are empty


def test_a_run_killed_five_times_equals_an_undisturbed_one_although_the_judge_changes_its_mind(
    tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    """Killed at five moments, stopped by its budget, and kept waiting for two minutes by a judge that is away."""
    folder = tmp_path / "killed"
    kills: tuple[Kill, ...] = ("outstanding", "committed", "journaled", "committing", "sampling")
    after: list[tuple[list[str], int]] = []  # each kill: the checkpoints, and the verdicts on disk
    with judge_server() as server:
        server.seconds = 0.02  # so that a kill meets calls under way
        for kill in kills:
            ended(start(folder, tiny_model, dataset, server, kill), folder, -signal.SIGKILL)
            after.append((committed(folder), len(VerdictJournal(folder / "verdicts").known)))
        steps = [names[-1:] for names, _ in after]
        assert steps == [[], *[["step-000001"]] * 4]
        verdicts = [count for _, count in after]
        assert verdicts[0] < verdicts[1] < verdicts[2] <= verdicts[3] <= verdicts[4]
        assert sum(server.asked.values()) - len(server.asked) <= len(kills) * CONCURRENCY  # what a kill had cut off

        asked = sum(server.asked.values())
        allowed = VerdictJournal(folder / "verdicts").calls + 6
        spent = start(folder, tiny_model, dataset, server, **{"reward.judge.budget.calls": allowed})
        ended(spent, folder, EXIT_BAD_CONFIG)
        report = JobError.model_validate_json((folder / "trainer_error.json").read_text())
        assert report.kind == "BudgetSpentError"
        assert sum(server.asked.values()) == asked + 6

        last = start(folder, tiny_model, dataset, server)
        wait_for_calls(asked + 10, last, server)
        server.away.set()
        for _ in range(OUTAGE_SECONDS):
            time.sleep(1)
            assert last.is_alive(), log_of(folder)[-2000:]
            Control(folder / "control.json").beat(9)  # as a driver
        server.away.clear()
        ended(last, folder, EXIT_DONE)
        assert sum(judged(folder, "outage_seconds")) >= OUTAGE_SECONDS - 1
        assert server.keys == {f"Bearer {KEY}"}
        require_equal_to_an_undisturbed_run(folder, tiny_model, dataset, server)
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert holders == []


def test_a_trainer_that_waits_for_its_judge_stops_when_asked(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    """In its second batch. Once the judge is away, and once it holds each call without an answer. The trainer commits
    the last batch, and the run equals one that was never stopped."""
    folder = tmp_path / "stopped"
    with judge_server() as server:
        for calls, settings in ((COMPLETIONS + 4, {}), (2 * COMPLETIONS, {"reward.judge.timeout_seconds": 3.0})):
            process = start(folder, tiny_model, dataset, server, **settings)
            wait_for_calls(calls, process, server)
            if settings:
                server.holds.set()
            else:
                server.away.set()
            deadline = time.monotonic() + 60
            while "has not answered for" not in log_of(folder).rpartition("from step")[2]:
                assert time.monotonic() < deadline, log_of(folder)[-2000:]
                time.sleep(0.05)
            started = time.monotonic()
            os.kill(process.pid or 0, signal.SIGTERM)
            ended(process, folder, EXIT_PREEMPTED)
            assert time.monotonic() - started < 60  # without the request it would wait for reward.judge.outage_minutes
            assert committed(folder)
            assert manifests(folder)[-1].last_step == len(read_journal(folder / "journal.jsonl"))
            server.away.clear()
            server.holds.clear()
        ended(start(folder, tiny_model, dataset, server), folder, EXIT_DONE)
        require_equal_to_an_undisturbed_run(folder, tiny_model, dataset, server)
