"""Which problems an optimizer step was trained on, out of its batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.config import TrainingConfig
from rlcore.errors import StorageError
from rlcore.segment.batch_log import trained_problems, write_trained


def test_each_update_has_its_share_and_each_pass_all_of_them(tmp_path: Path) -> None:
    training = TrainingConfig(problems_per_batch=4, mini_batches=2, ppo_epochs=2, steps=8)
    write_trained(tmp_path, 4, ["a", "b", "c", "d"])
    write_trained(tmp_path, 8, ["e", "f", "g", "h"])
    found = ["".join(trained_problems(tmp_path, step, training)) for step in range(1, 9)]
    assert found == ["ab", "cd", "ab", "cd", "ef", "gh", "ef", "gh"]


def test_an_unknown_step_is_named(tmp_path: Path) -> None:
    training = TrainingConfig(problems_per_batch=4)
    with pytest.raises(StorageError, match="no batch is noted"):
        trained_problems(tmp_path, 1, training)
    write_trained(tmp_path, 1, ["a"])
    for step in (0, 2):
        with pytest.raises(StorageError, match="batches up to step 1 are noted"):
            trained_problems(tmp_path, step, training)
