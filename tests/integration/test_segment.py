"""The trainer's own process, given damaged checkpoints: real Ray, FSDP2 and vLLM."""

from __future__ import annotations

from pathlib import Path

import torch

from rlcore.failures import EXIT_DONE
from rlcore.segment.journal import read_journal
from rlcore.segment.lease import Control
from tests.integration.tiny_run import experiment
from tests.integration.trainer_process import log_of, manifests, spec_of, start
from tests.train_states import load_full_weights


def test_five_kinds_of_damage_cost_their_steps_and_change_nothing(
    tiny_model: Path, dataset: Path, tmp_path: Path
) -> None:
    """Every checkpoint but the first is damaged, each in another way; the trainer finds its way back and trains those
    steps again, to the same weights."""
    reward = tmp_path / "letters.py"  # random weights are never right, but not all equally wordy
    reward.write_text(
        "def reward(text, problem, num_tokens, finish_reason):\n"
        "    return sum(map(str.isalpha, text)) / max(1, len(text))\n"
    )
    config = experiment(
        **{
            "training.steps": 6,
            "segment.steps": 1,
            "segment.keep_checkpoints": 6,
            "resources.workers": 1,
            "reward.name": "user",
            "reward.file": str(reward),
        }
    )
    spec = spec_of(tmp_path, tiny_model, dataset, config)
    Control(tmp_path / "control.json").beat(9)
    assert start(spec).wait(180) == EXIT_DONE, log_of(tmp_path)[-2000:]
    folders = [tmp_path / "checkpoints" / f"step-{step:06d}" for step in range(1, 7)]
    weights = load_full_weights(folders[5])
    rewards = [record.metrics["reward/mean"] for record in read_journal(tmp_path / "journal.jsonl")]
    committed = manifests(tmp_path)
    assert len(set(rewards)) == 6

    shard = Path("train_state") / "__0_0.distcp"
    whole = (folders[1] / shard).read_bytes()
    (folders[1] / shard).write_bytes(whole[:-1])
    (folders[2] / shard).write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    (folders[3] / "pass_rates.json").unlink()
    text = (folders[4] / "manifest.json").read_text()
    (folders[4] / "manifest.json").write_text(text[: len(text) // 2])
    (folders[5] / "manifest.json").unlink()

    Control(tmp_path / "control.json").beat(9)
    assert start(spec).wait(180) == EXIT_DONE, log_of(tmp_path)[-2000:]
    assert log_of(tmp_path).count("A DAMAGED CHECKPOINT IS MOVED ASIDE") == 5
    assert "run run from step 1" in log_of(tmp_path)
    again = manifests(tmp_path)
    assert [m.model_copy(update={"checkpoint": None}) for m in again] == [
        m.model_copy(update={"checkpoint": None}) for m in committed
    ]
    assert again[0] == committed[0]
    replayed = load_full_weights(folders[5])
    assert all(torch.equal(replayed[name], value) for name, value in weights.items())
    journal = read_journal(tmp_path / "journal.jsonl")
    assert [record.step for record in journal] == [1, 2, 3, 4, 5, 6]
    assert [record.metrics["reward/mean"] for record in journal] == rewards
    # first to the newest checkpoint whose files are there, then, once they are hashed, to the newest whole one
    assert [record.step for record in read_journal(tmp_path / "journal.cut-1.jsonl")] == [4, 5, 6]
    assert [record.step for record in read_journal(tmp_path / "journal.cut-2.jsonl")] == [2, 3]
