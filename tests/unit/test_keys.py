"""What the cached steps of a run depend on, and what not: two runs share a result by these keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlcore.artifacts import CheckpointRef, DatasetRef, ModelRef
from tasks.evaluate import evaluation_content
from tasks.experiments import load_experiment
from tasks.models import bootstrap_key, merge_key, teacher_key
from tasks.store.made import content_key

EXPERIMENT = load_experiment("grpo-geo3k-tiny")
CHECKPOINT = CheckpointRef(path="/c", step=8, policy_version=8, manifest_sha256="m", run_id="run", segment=2)
BASE = ModelRef(path="/start", digest="start", source="tiny", num_parameters=1000)
DATASET = DatasetRef(
    path="/train", digest="train", source="files", num_problems=8, num_rejected=1, num_images=3, max_prompt_tokens=9
)
PARAMETERS = {"experiment": EXPERIMENT, "policy": CHECKPOINT, "base": BASE, "dataset": DATASET}


def key(**changes: Any) -> str:
    return content_key("evaluate", evaluation_content(**(PARAMETERS | changes)))


def changed(item: Any, **values: object) -> Any:
    return item.model_copy(update=values)


def test_an_evaluation_is_of_a_policy_a_base_a_dataset_and_its_settings() -> None:
    first = key()
    assert first.startswith("evaluate-")
    assert key(policy=changed(CHECKPOINT, path="/elsewhere", step=9)) == first
    others = [
        key(policy=changed(CHECKPOINT, manifest_sha256="other")),
        key(base=changed(BASE, digest="other")),
        key(dataset=changed(DATASET, digest="other")),
        key(experiment=changed(EXPERIMENT, seed=EXPERIMENT.seed + 1)),
        key(policy=BASE),
    ]
    assert len({first, *others}) == 6


def test_the_code_of_a_users_reward_counts(tmp_path: Path) -> None:
    code = tmp_path / "reward.py"
    code.write_text("def reward(text, problem, num_tokens, finish_reason):\n    return 1.0\n")
    own = load_experiment("grpo-geo3k-tiny", [f'reward={{"name": "user", "file": "{code}"}}'])
    first = key(experiment=own)
    assert key(experiment=own) == first
    code.write_text(code.read_text().replace("1.0", "2.0"))
    assert key(experiment=own) != first


def test_a_merged_model_is_of_a_checkpoint_and_its_place() -> None:
    first = merge_key(CHECKPOINT, BASE)
    assert first.startswith("merge-")
    others = [
        merge_key(changed(CHECKPOINT, manifest_sha256="other"), BASE),
        merge_key(changed(CHECKPOINT, path="/elsewhere"), BASE),
        merge_key(CHECKPOINT, changed(BASE, digest="other")),
    ]
    assert len({first, *others}) == 4


def test_a_teacher_is_of_its_settings_and_of_the_policy_that_it_was_compared_with() -> None:
    first = teacher_key(EXPERIMENT.model, BASE)
    assert first != bootstrap_key(EXPERIMENT.model)
    others = [teacher_key(changed(EXPERIMENT.model, path="/other"), BASE)]
    others.append(teacher_key(EXPERIMENT.model, changed(BASE, digest="other")))
    assert len({first, *others}) == 3


def test_a_policy_is_of_its_settings_and_of_the_files_of_its_folder(tmp_path: Path) -> None:
    tiny = EXPERIMENT.model
    first = bootstrap_key(tiny)
    assert first.startswith("model-")
    folder = tmp_path / "policy"
    own = changed(tiny, path=str(folder))
    keys = {first, bootstrap_key(own)}
    folder.mkdir()
    weights = folder / "model.safetensors"
    for content, seconds in (("a", 1), ("b", 2), ("bb", 2)):
        weights.write_text(content)
        os.utime(weights, (seconds, seconds))
        keys.add(bootstrap_key(own))
    (folder / "config.json").touch()
    keys.add(bootstrap_key(own))
    weights.rename(folder / "other.safetensors")
    keys.add(bootstrap_key(own))
    assert len(keys) == 7
