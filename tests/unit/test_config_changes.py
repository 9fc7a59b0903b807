"""Settings that may change during a run, and the digest of all others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from rlcore.ablation.plan import Point
from rlcore.config import ExperimentConfig, build_experiment, changes, read_experiment
from rlcore.config.experiment import FREE_SETTINGS, STEPS
from rlcore.config.run import SegmentConfig
from rlcore.errors import ConfigError

BASE = {
    "name": "toy",
    "training": {"steps": 40, "problems_per_batch": 4},
    "reward": {"name": "math"},
}


def changed(*overrides: str) -> ExperimentConfig:
    return build_experiment(BASE, overrides)


@pytest.mark.parametrize(
    "override",
    [
        "resources.workers=2",
        "resources.device=cpu",
        "resources.rollout_workers=2",
        "training.tokens_per_microbatch=9000",
        "training.offload=true",
        "training.steps=60",
        "segment.steps=10",
        "segment.keep_best=2",
        "evaluation.samples=4",
        "rollout.gpu_memory_utilization=0.5",
        "rollout.kv_cache_mib=32",
        "rollout.max_sequences=64",
        "rollout.enforce_eager=true",
        "rollout.compile_engine=false",
    ],
)
def test_settings_that_do_not_affect_results(override: str) -> None:
    (change,) = changes(changed(), changed(override))
    assert change.key == override.split("=")[0]
    assert not change.affects_results
    assert changed().results_digest() == changed(override).results_digest()
    assert changed().digest() != changed(override).digest()


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "training.learning_rate=1e-5",
        "training.problems_per_batch=8",
        "rollout.temperature=0.9",
        "rollout.group_size=4",
        "data.shuffle_seed=1",
        "algorithm.kl.coefficient=0.1",
        "model.compute_dtype=bfloat16",
    ],
)
def test_what_does(override: str) -> None:
    (change,) = changes(changed(), changed(override))
    assert change.affects_results
    assert changed().results_digest() != changed(override).results_digest()


def test_fewer_steps_are_another_experiment() -> None:
    (change,) = changes(changed(), changed("training.steps=20"))
    assert change.affects_results
    assert str(change) == "training.steps: was 40, now 20"


def test_another_choice_of_a_union_lists_keys_of_both() -> None:
    before = changed("algorithm.loss.name=ppo_clip", "algorithm.loss.clip_low=0.1")
    found = {change.key: change for change in changes(before, changed("algorithm.loss.name=sapo"))}
    assert found["algorithm.loss.name"].now == "sapo"
    assert found["algorithm.loss.clip_low"].was == 0.1
    assert found["algorithm.loss.clip_low"].now is None


def test_how_many_checkpoints_stay() -> None:
    assert SegmentConfig(keep_checkpoints=2).max_kept(30) == 2
    assert SegmentConfig(keep_checkpoints=2).max_kept(1) == 1
    assert SegmentConfig(keep_checkpoints=2, keep_every=10, keep_best=3).max_kept(35) == 8


@pytest.mark.parametrize(
    "override",
    ["data.train=s3://key:geheim12@bucket/x", "model.path=hf_geheim12geheim12geheim12", "s3://key:geheim12@bucket"],
)
def test_a_secret_is_refused_by_its_key_and_not_repeated(override: str) -> None:
    with pytest.raises(ConfigError, match="holds a password or a token") as caught:
        changed(override)
    assert "geheim12" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"data\.train holds a password") as caught:
        build_experiment({**BASE, "data": {"train": "https://me:geheim12@host/x.parquet"}})
    assert "geheim12" not in str(caught.value)


def _fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields, of whatever union member they belong to; a section's name ends in a dot."""
    for name, field in model.model_fields.items():
        members = [member for member in _types(field.annotation) if issubclass(member, BaseModel)]
        if members:
            yield f"{prefix}{name}."
        else:
            yield f"{prefix}{name}"
        for member in members:
            yield from _fields(member, f"{prefix}{name}.")


def _types(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for part in get_args(annotation):
        yield from _types(part)


def test_what_may_change_is_named_by_whole_fields_and_sections() -> None:
    """Each entry is compared as the beginning of a key: it must be a field or a section, and begin no other field."""
    known = set(_fields(ExperimentConfig))
    assert {"training.steps", "segment.", "algorithm.kl.adaptive.target", "reward.processes"} <= known
    for entry in (*FREE_SETTINGS, STEPS):
        assert entry in known or f"{entry}." in known, entry
        others = {name for name in known if name.startswith(entry.rstrip("."))} - {entry}
        assert all(name.startswith(f"{entry.rstrip('.')}.") for name in others), entry


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("training.problems_per_step=8", r"It is now training\.problems_per_batch\."),
        ("training.updates_per_batch=2", r"It is now training\.mini_batches\."),
        ("training.passes_per_batch=2", r"It is now training\.ppo_epochs\."),
        ("rollout.tokens_per_burst=8", r"It is now rollout\.scheduler_steps_per_call\."),
        ("rollout.partial.one_ahead=true", r"It is now rollout\.partial\.prefetch\."),
        (
            "algorithm.dynamic_sampling.max_staleness=4",
            r"It is now algorithm\.dynamic_sampling\.surplus_staleness\. It counts policy versions .*: divide the old",
        ),
    ],
)
def test_a_renamed_setting_answers_with_its_new_name(override: str, answer: str) -> None:
    values = {**BASE, "rollout": {"partial": {"tokens_per_round": 64}}, "algorithm": {"dynamic_sampling": {}}}
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}: unknown key. {answer}"):
        build_experiment(values, [override])


def test_an_experiment_that_an_older_version_stored_is_read_with_the_new_names(tmp_path: Path) -> None:
    stored = {
        "name": "toy",
        "training": {"steps": 60, "problems_per_step": 8, "updates_per_batch": 2, "passes_per_batch": 3},
        "rollout": {"tokens_per_burst": 4, "partial": None},
        "segment": {"steps": 30},
        "algorithm": {"dynamic_sampling": {"max_staleness": 13}},
    }
    (tmp_path / "experiment.json").write_text(json.dumps(stored))
    experiment = read_experiment(tmp_path / "experiment.json")
    training, dynamic = experiment.training, experiment.algorithm.dynamic_sampling
    assert (training.problems_per_batch, training.mini_batches, training.ppo_epochs) == (8, 2, 3)
    assert experiment.rollout.scheduler_steps_per_call == 4
    assert dynamic is not None
    assert dynamic.surplus_staleness == 2  # 13 optimizer steps, 6 of them per rollout batch
    assert read_experiment(_written(tmp_path, experiment)) == experiment


def test_an_ablation_point_that_an_older_version_stored_is_read_with_the_new_names() -> None:
    stored = {
        "name": "base",
        "label": "",
        "overrides": [],
        "experiment": {**BASE, "training": {"problems_per_step": 8}},
    }
    assert Point.model_validate_json(json.dumps(stored)).experiment.training.problems_per_batch == 8


def _written(folder: Path, experiment: ExperimentConfig) -> Path:
    path = folder / "now.json"
    path.write_text(experiment.model_dump_json())
    return path
