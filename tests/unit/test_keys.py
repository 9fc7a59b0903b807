"""What the cached steps of a run depend on, and what not: two runs share a result by these keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlcore.artifacts import CheckpointRef, DatasetRef, ModelRef
from tasks import evaluate as evaluation
from tasks import merge as merging
from tasks import models
from tasks.experiments import load_experiment

EXPERIMENT = load_experiment("grpo-geo3k-tiny")
CHECKPOINT = CheckpointRef(path="/c", step=8, policy_version=8, manifest_sha256="m", run_id="run", segment=2)
BASE = ModelRef(path="/start", digest="start", source="tiny", num_parameters=1000)
DATASET = DatasetRef(
    path="/train", digest="train", source="files", num_problems=8, num_rejected=1, num_images=3, max_prompt_tokens=9
)
PARAMETERS = {
    "experiment": EXPERIMENT,
    "policy": CHECKPOINT,
    "checkpoint": CHECKPOINT,
    "base": BASE,
    "dataset": DATASET,
}


@pytest.fixture(autouse=True)
def _data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path))


def key(module: Any, **changes: object) -> str:
    found = module._key(None, PARAMETERS | changes)
    assert isinstance(found, str)
    return found


def changed(item: Any, **values: object) -> Any:
    return item.model_copy(update=values)


def test_an_evaluation_is_of_a_policy_a_base_a_dataset_and_its_settings() -> None:
    first = key(evaluation)
    assert first.startswith("evaluate-")
    assert key(evaluation, policy=changed(CHECKPOINT, path="/elsewhere", step=9)) == first
    others = [
        key(evaluation, policy=changed(CHECKPOINT, manifest_sha256="other")),
        key(evaluation, base=changed(BASE, digest="other")),
        key(evaluation, dataset=changed(DATASET, digest="other")),
        key(evaluation, experiment=changed(EXPERIMENT, seed=EXPERIMENT.seed + 1)),
        key(evaluation, policy=BASE),
    ]
    assert len({first, *others}) == 6


def test_the_code_of_a_users_reward_counts(tmp_path: Path) -> None:
    code = tmp_path / "reward.py"
    code.write_text("def reward(text, problem, num_tokens, finish_reason):\n    return 1.0\n")
    own = load_experiment("grpo-geo3k-tiny", [f'reward={{"name": "user", "file": "{code}"}}'])
    first = key(evaluation, experiment=own)
    assert key(evaluation, experiment=own) == first
    code.write_text(code.read_text().replace("1.0", "2.0"))
    assert key(evaluation, experiment=own) != first


def test_a_merged_model_is_of_a_checkpoint_and_its_place() -> None:
    first = key(merging)
    assert first.startswith("merge-")
    assert key(merging, dataset=changed(DATASET, digest="other")) == first
    others = [
        key(merging, checkpoint=changed(CHECKPOINT, manifest_sha256="other")),
        key(merging, checkpoint=changed(CHECKPOINT, path="/elsewhere")),
        key(merging, base=changed(BASE, digest="other")),
    ]
    assert len({first, *others}) == 4


def test_a_policy_is_of_its_settings_and_of_the_files_of_its_folder(tmp_path: Path) -> None:
    tiny = EXPERIMENT.model
    first = models._key(None, {"model": tiny})  # type: ignore[arg-type]
    assert first.startswith("model-")
    folder = tmp_path / "policy"
    own = changed(tiny, path=str(folder))
    keys = {first, models._key(None, {"model": own})}  # type: ignore[arg-type]
    folder.mkdir()
    weights = folder / "model.safetensors"
    for content, seconds in (("a", 1), ("b", 2), ("bb", 2)):
        weights.write_text(content)
        os.utime(weights, (seconds, seconds))
        keys.add(models._key(None, {"model": own}))  # type: ignore[arg-type]
    (folder / "config.json").touch()
    keys.add(models._key(None, {"model": own}))  # type: ignore[arg-type]
    weights.rename(folder / "other.safetensors")
    keys.add(models._key(None, {"model": own}))  # type: ignore[arg-type]
    assert len(keys) == 7


def test_a_result_says_where_it_lies_so_another_data_folder_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = key(merging)
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "other"))
    assert key(merging) != first
    assert key(merging)[:-9] == first[:-9]
