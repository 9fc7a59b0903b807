"""A run whose rewards a reward model gives, killed while it scores: the real trainer, and the model in its process."""

from __future__ import annotations

import os
import signal
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from rlcore.failures import EXIT_DONE
from rlcore.rewards.verdicts import VerdictJournal
from rlcore.segment.journal import read_journal
from rlcore.segment.lease import Control
from tests.integration.tiny_run import ALONE, experiment, numbers
from tests.integration.trainer_process import log_of, spec_of
from tests.long.graded_trainer import run_trainer
from tests.ranks import FORKED
from tests.reward_models import tiny_reward_model
from tests.train_states import load_full_weights

STEPS = 3


def trainer(spec: Path, kill_after: int | None) -> None:
    """
    Args:
        kill_after: scores of this process that are written to disk, and not used yet.
    """
    append, written = VerdictJournal.append, []

    def append_and_die(self: Any, verdicts: Any) -> None:
        append(self, verdicts)
        written.extend(verdicts)
        if len(written) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    VerdictJournal.append = append_and_die  # type: ignore[method-assign]
    run_trainer(spec)


def start(folder: Path, model: Path, dataset: Path, reward_model: Path, kill_after: int | None) -> ForkServerProcess:
    folder.mkdir(exist_ok=True)
    config = experiment(
        **ALONE,
        **{
            "training.steps": STEPS,
            "segment.steps": 1,
            "reward.name": "model",
            "reward.model.path": str(reward_model),
            "reward.model.scale": "sigmoid",
            "reward.model.format_weight": 0.1,
            "reward.model.batch_size": 1,  # so that no rounding depends on what waits
        },
    )
    (folder / "spec.json").write_text(spec_of(folder, model, dataset, config).model_dump_json())
    Control(folder / "control.json").beat(9)
    process = FORKED.Process(target=trainer, args=(folder / "spec.json", kill_after))
    process.start()
    process.join()
    return process


def learned(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in step.items() if not k.startswith("reward_model/")} for step in numbers(folder)]


def test_a_killed_run_equals_an_undisturbed_one(tiny_model: Path, dataset: Path, tmp_path: Path) -> None:
    """Killed in its first and in a later batch. The undisturbed run scores everything itself."""
    reward_model = tiny_reward_model(tmp_path / "reward")
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for kill_after in (5, 20):
        process = start(killed, tiny_model, dataset, reward_model, kill_after)
        assert process.exitcode == -signal.SIGKILL, log_of(killed)[-2000:]
    for folder in (killed, undisturbed):
        assert start(folder, tiny_model, dataset, reward_model, None).exitcode == EXIT_DONE, log_of(folder)[-2000:]
    assert len({step["reward/mean"] for step in learned(killed)}) == STEPS
    assert learned(undisturbed) == learned(killed)
    weights = [load_full_weights(run / "checkpoints" / f"step-{STEPS:06d}") for run in (killed, undisturbed)]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == value).all() for name, value in weights[1].items())
    journals = [VerdictJournal(folder / "verdicts").known for folder in (killed, undisturbed)]
    scores = [{key: verdict.score for key, verdict in journal.items()} for journal in journals]
    assert scores[0] == scores[1]
    scored = [
        sum(record.metrics["reward_model/scored"] for record in read_journal(f / "journal.jsonl"))
        for f in (killed, undisturbed)
    ]
    assert scored[1] == len(scores[1])
    assert scored[0] < scored[1]  # the rest was on disk
