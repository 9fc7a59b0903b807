"""A run whose rewards a judge gives, killed several times: the real trainer on the tiny policy, with FSDP2 and vLLM in
forked ranks, and a judge whose answers nobody can foresee."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcore.config import ExperimentConfig
from rlcore.failures import EXIT_BAD_CONFIG, EXIT_DONE
from rlcore.segment.journal import read_journal
from rlcore.segment.lease import Control
from rlcore.specs import JobError
from tests.integration.tiny_run import ALONE, experiment, numbers
from tests.integration.trainer_process import log_of, spec_of
from tests.judge_server import MODEL, Judge, judge_server
from tests.ranks import FORKED
from tests.train_states import load_full_weights

CONCURRENCY = 4
STEPS = 3
COMPLETIONS = 16  # of a step
KEY = "sk-0123456789abcdef"


def trainer(spec: Path) -> None:
    """In a process of its own: the trainer, with forked ranks in place of Ray's."""
    import rlcore.training.assemble as assemble
    from rlcore.jobs.segment import main
    from tests.integration.forked_ranks import ForkedRanks

    @contextmanager
    def graded_ranks(
        config: ExperimentConfig,
        make: Any,
        *,
        model: Path,
        dataset: Path,
        verdicts: Path,
        stacks: Path,
        on_progress: Callable[[], None],
        teacher: Path | None,
    ) -> Iterator[Any]:
        ranks = ForkedRanks(make, model=model, dataset=dataset, config=config, device="cpu")
        grader = assemble.make_grader(config, model, verdicts, on_progress)
        try:
            yield ranks, grader
        finally:
            grader.close()
            ranks.close()

    os.environ["MY_JUDGE_KEY"] = KEY
    log = (spec.parent / "trainer.log").open("ab")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    assemble.graded_ranks = graded_ranks
    sys.exit(main(spec))


def start(folder: Path, model: Path, dataset: Path, server: Judge, **settings: Any) -> Any:
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
    process = FORKED.Process(target=trainer, args=(folder / "spec.json",))
    process.start()
    return process


def kill_after(calls: int, process: Any, server: Judge) -> None:
    """Kill the trainer once the judge has answered that many calls of this test."""
    while sum(server.asked.values()) < calls:
        assert process.is_alive()
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def learned(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in step.items() if not k.startswith("judge/")} for step in numbers(folder)]


def test_a_killed_run_equals_an_undisturbed_one_although_the_judge_changes_its_mind(
    tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    """Killed in the middle of its first and second batch, and stopped by its budget in the third. An undisturbed run
    with the same verdicts, whose judge refuses to answer, has the same journal and the same weights."""
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    with judge_server() as server:
        server.seconds = 0.02  # so that a kill meets calls under way
        for calls in (9, 24):
            kill_after(calls, start(killed, tiny_model, dataset, server), server)
        spent = start(killed, tiny_model, dataset, server, **{"reward.judge.budget.calls": 38})
        spent.join()
        assert spent.exitcode == EXIT_BAD_CONFIG, log_of(killed)[-2000:]
        report = JobError.model_validate_json((killed / "trainer_error.json").read_text())
        assert report.kind == "BudgetSpentError"
        last = start(killed, tiny_model, dataset, server)
        last.join()
        assert last.exitcode == EXIT_DONE, log_of(killed)[-2000:]
        assert sum(server.asked.values()) - len(server.asked) <= 2 * CONCURRENCY  # only what a kill had cut off
        assert len(server.asked) > (STEPS - 1) * COMPLETIONS
        assert server.keys == {f"Bearer {KEY}"}

        asked = sum(server.asked.values())
        server.answer = lambda _: (401, {"error": "an undisturbed run needs no answer"})
        shutil.copytree(killed / "verdicts", undisturbed / "verdicts")
        replay = start(undisturbed, tiny_model, dataset, server)
        replay.join()
        assert replay.exitcode == EXIT_DONE, log_of(undisturbed)[-2000:]
        assert sum(server.asked.values()) == asked

    assert len({step["reward/mean"] for step in learned(killed)}) == STEPS
    assert learned(undisturbed) == learned(killed)
    weights = [load_full_weights(folder / "checkpoints" / f"step-{STEPS:06d}") for folder in (killed, undisturbed)]
    assert all((weights[0][name] == value).all() for name, value in weights[1].items())
    steps = [record.metrics for record in read_journal(undisturbed / "journal.jsonl")]
    assert [step["judge/calls"] for step in steps] == [0] * STEPS
    assert all(step["judge/replayed"] > COMPLETIONS / 2 for step in steps)  # the others are empty
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert holders == []
