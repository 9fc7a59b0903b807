"""EasyR1's and verl's configurations as experiments of ours: nothing of them is dropped in silence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlcore.config import build_experiment
from rlcore.errors import ConfigError
from rlcore.migrate.easyr1 import from_easyr1
from rlcore.migrate.foreign import Ledger, Translation, read_foreign
from rlcore.migrate.verl import from_verl
from tasks.experiments import load_experiment

ROOT = Path(__file__).resolve().parents[2]
EASYR1: dict[str, Any] = {
    "data": {
        "train_files": "hiyouga/geometry3k@train", "val_files": "hiyouga/geometry3k@test", "prompt_key": "problem",
        "answer_key": "answer", "image_key": "images", "video_key": "videos", "image_dir": None, "video_fps": 2.0,
        "max_prompt_length": 2048, "max_response_length": 2048, "rollout_batch_size": 512,
        "mini_rollout_batch_size": None, "val_batch_size": 1024, "format_prompt": "./prompts/math.jinja",
        "override_chat_template": None, "shuffle": True, "seed": 1, "min_pixels": 262144, "max_pixels": 4194304,
        "filter_overlong_prompts": True, "filter_overlong_prompts_workers": 16,
    },
    "algorithm": {
        "adv_estimator": "grpo", "disable_kl": False, "use_kl_loss": True, "kl_penalty": "low_var_kl",
        "kl_coef": "1e-2", "kl_type": "fixed", "online_filtering": False, "filter_key": "overall", "filter_low": 0.01,
        "filter_high": 0.99,
    },
    "worker": {
        "actor": {
            "global_batch_size": 128, "micro_batch_size_per_device_for_update": 4,
            "micro_batch_size_per_device_for_experience": 16, "max_grad_norm": 1.0, "padding_free": True,
            "dynamic_batching": True, "ulysses_size": 1, "ppo_epochs": 1,
            "model": {
                "model_path": "Qwen/Qwen2.5-VL-7B-Instruct", "enable_gradient_checkpointing": True,
                "trust_remote_code": False, "freeze_vision_tower": False, "lora": {"rank": 0, "alpha": 64},
            },
            "optim": {"lr": "1.0e-6", "weight_decay": "1.0e-2", "strategy": "adamw", "lr_warmup_ratio": 0.0},
            "fsdp": {"enable_full_shard": True, "enable_cpu_offload": False, "enable_rank0_init": True},
            "offload": {"offload_params": False, "offload_optimizer": False},
        },
        "rollout": {
            "n": 5, "temperature": 1.0, "top_p": 1.0, "limit_images": 0, "gpu_memory_utilization": 0.6,
            "enforce_eager": False, "enable_chunked_prefill": False, "tensor_parallel_size": 2, "disable_tqdm": False,
            "val_override_config": {"temperature": 0.6, "top_p": 0.95, "n": 1},
        },
        "ref": {"fsdp": {"enable_full_shard": True, "enable_cpu_offload": True}, "offload": {"offload_params": False}},
        "reward": {"reward_function": "./rewards/math.py:compute_score"},
    },
    "trainer": {
        "total_epochs": 15, "max_steps": None, "project_name": "somebody", "experiment_name": "Qwen2.5 VL 7B GRPO",
        "logger": ["file", "wandb"], "nnodes": 1, "n_gpus_per_node": 8, "max_try_make_batch": 20, "val_freq": 5,
        "val_before_train": True, "val_only": False, "val_generations_to_log": 3, "save_freq": 5, "save_limit": 3,
        "save_model_only": False, "save_checkpoint_path": None, "load_checkpoint_path": None,
        "find_last_checkpoint": True, "colour": "blue",
    },
}  # fmt: skip
VERL = [
    "algorithm.adv_estimator=grpo", "data.train_files=/data/gsm8k/train.parquet",
    "data.val_files=/data/gsm8k/test.parquet", "data.train_batch_size=1024", "data.max_prompt_length=512",
    "data.max_response_length=1024", "data.filter_overlong_prompts=True", "data.truncation=error",
    "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct", "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.use_remove_padding=True", "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10", "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001", "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff=0", "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False", "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40", "actor_rollout_ref.rollout.n=5",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6", "algorithm.use_kl_in_reward=False",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2", "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "trainer.critic_warmup=0", 'trainer.logger=["console","wandb"]', "trainer.n_gpus_per_node=8", "trainer.nnodes=1",
    "trainer.experiment_name=qwen2_7b", "trainer.save_freq=5", "trainer.test_freq=5", "trainer.total_epochs=15",
    "+trainer.unheard_of=1",
]  # fmt: skip


@pytest.fixture
def easyr1(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(EASYR1))
    return path


def differences(ours: Any, name: str) -> dict[str, tuple[Any, Any]]:
    flat, wanted = ours.flat(), load_experiment(name).flat()
    keys = sorted(flat.keys() | wanted.keys())
    return {key: (flat.get(key), wanted.get(key)) for key in keys if flat.get(key) != wanted.get(key)}


def test_easyr1s_geometry_run_is_grpo_geo3k(easyr1: Path) -> None:
    found = from_easyr1(read_foreign(easyr1, []))
    assert found.experiment.name == "qwen2-5-vl-7b-grpo"
    different = differences(found.experiment, "grpo-geo3k")
    health = {key for key in different if key.startswith("health")}
    assert {key: value for key, value in different.items() if key not in health} == {
        "name": ("qwen2-5-vl-7b-grpo", "grpo-geo3k"),
        "seed": (1, 0),
        "data.shuffle_seed": (1, 0),
        "algorithm.loss.dual_clip": (3.0, None),  # EasyR1 has it on
        "rollout.tensor_parallel": (2, 1),
    }


@pytest.mark.parametrize(("frequency", "every"), [(5, "segment"), (3, 12), (-1, "segment")])
def test_validation_comes_as_often(easyr1: Path, frequency: int, every: int | str) -> None:
    """Theirs counts rollout batches of four optimizer steps, and a checkpoint comes every five."""
    found = from_easyr1(read_foreign(easyr1, [f"trainer.val_freq={frequency}"]))
    assert found.experiment.evaluation.every_steps == every
    assert ("trainer.val_freq" in {note.key for note in found.having("listed")}) == (frequency < 0)


def test_every_key_is_accounted_for_once(easyr1: Path) -> None:
    given = read_foreign(easyr1, [])
    notes = from_easyr1(given).notes
    assert sorted(note.key for note in notes) == sorted(given)
    given = read_foreign(None, VERL)
    assert sorted(note.key for note in from_verl(given, rows=7473).notes) == sorted(given)


def test_what_has_no_equivalent_is_said(easyr1: Path) -> None:
    listed = {note.key: note.text for note in from_easyr1(read_foreign(easyr1, [])).having("listed")}
    assert listed["trainer.colour"] == "unknown to this translation"
    assert "RLFLOW_TRACKERS" in listed["trainer.logger"]


def test_dotted_arguments_count_over_the_file_and_bring_every_choice(easyr1: Path) -> None:
    words = [
        "algorithm.disable_kl=true", "algorithm.online_filtering=true", "worker.actor.loss_type=cispo",
        "worker.actor.clip_ratio_high=4.0", "worker.actor.loss_avg_mode=seq", "worker.actor.model.lora.rank=16",
        "worker.rollout.val_override_config.temperature=0", "worker.actor.optim.lr_warmup_steps=3",
        "trainer.max_steps=10", "worker.reward.reward_function=./dapo.py:compute_score",
        "worker.reward.reward_function_kwargs={overlong_buffer_length: 512, overlong_penalty_factor: 0.5}",
    ]  # fmt: skip
    found = from_easyr1(read_foreign(easyr1, words)).experiment
    assert found.algorithm.kl.coefficient == 0
    assert found.algorithm.dynamic_sampling is not None
    assert found.algorithm.dynamic_sampling.max_rounds == 20
    assert found.algorithm.loss.model_dump() == {"name": "cispo", "level": "token", "max_ratio": 5.0}
    assert found.algorithm.aggregation == "sequence_mean_token_mean"
    assert found.model.lora is not None
    assert (found.model.lora.rank, found.model.lora.alpha) == (16, 64)
    assert found.rollout.tensor_parallel == 1, "an engine of its own for each worker, with adapters"
    assert (found.training.steps, found.training.warmup_steps) == (40, 12)  # four updates a batch
    assert (found.evaluation.temperature, found.evaluation.samples) == (0, 1)
    assert found.reward.name == "dapo"
    assert found.reward.overlong is not None
    assert (found.reward.overlong.buffer_tokens, found.reward.overlong.penalty) == (512, 0.5)


@pytest.mark.parametrize(
    ("read", "given"),
    [
        (from_easyr1, ["worker.rollout.n=5", "worker.actor.model.model_path=policy"]),
        (from_verl, ["actor_rollout_ref.rollout.n=5", "actor_rollout_ref.model.path=policy"]),
    ],
)
def test_the_engines_dtype(read: Callable[..., Translation], given: list[str]) -> None:
    key = given[0].replace("n=5", "dtype")

    def of(value: str) -> tuple[str, list[str]]:
        found = read(read_foreign(None, [*given, f"{key}={value}"]))
        return found.experiment.rollout.dtype, [note.text for note in found.having("listed") if note.key == key]

    assert of("fp16") == of("half") == ("float16", [])
    assert of("float32") == ("float32", [])
    assert of("bf16") == of("bfloat16") == ("auto", []), "as an engine on a GPU does"
    dtype, (told,) = of("fp8")
    assert dtype == "auto"
    assert "float16" in told


def test_verls_gsm8k_script_is_grpo_gsm8k() -> None:
    found = from_verl(read_foreign(None, VERL), rows=7473).experiment
    different = differences(found, "grpo-gsm8k")
    assert {key for key in different if not key.startswith(("data.", "segment.", "health"))} == {
        "name", "algorithm.loss.dual_clip", "training.tokens_per_microbatch", "rollout.tensor_parallel",
    }  # fmt: skip
    assert found.data.answer_column == "reward_model.ground_truth"
    assert found.training.steps == 15 * 7 * 4


def test_verls_arguments_of_the_chat_template() -> None:
    """Its system messages and turns of examples are in its files, and reach the prompt from there."""
    given = {
        "data.train_files": "gsm8k/train.parquet",
        "actor_rollout_ref.rollout.n": 4,
        "data.apply_chat_template_kwargs.enable_thinking": False,
        "data.apply_chat_template_kwargs.documents_of": ["a"],
    }
    translation = from_verl(given, rows=7473)
    assert translation.experiment.data.chat_template_arguments == {"enable_thinking": False}
    verdicts = {note.key.rpartition(".")[2]: note.verdict for note in translation.notes}
    assert (verdicts["enable_thinking"], verdicts["documents_of"]) == ("translated", "listed")
    empty = {"data.apply_chat_template_kwargs": {}, "actor_rollout_ref.rollout.n": 4}
    assert not from_verl(empty, rows=9).experiment.data.chat_template_arguments


def test_several_files_become_a_mixture() -> None:
    given = {
        "data.train_files": ["/d/gsm8k/train.parquet", "/d/geo3k/train.parquet"],
        "data.val_files": ["/d/gsm8k/test.parquet", "/d/geo3k/test.parquet"],
        "actor_rollout_ref.rollout.n": 4,
    }
    translation = from_verl(given, rows=7473)
    mixture = translation.experiment.data.mixture
    assert {name: (item.source, item.validation, item.weight) for name, item in mixture.items()} == {
        "gsm8k": ("/d/gsm8k/train.parquet", "/d/gsm8k/test.parquet", 1.0),
        "geo3k": ("/d/geo3k/train.parquet", "/d/geo3k/test.parquet", 1.0),
    }
    assert {name: reward.name for name, reward in translation.experiment.rewards.items()} == {
        "gsm8k": "gsm8k",
        "geo3k": "math",
    }
    notes = {note.key: note.text for note in translation.having("translated")}
    assert "set each weight to the number of the source's problems" in notes["data.train_files"]
    assert build_experiment({"name": "x", **translation.values}).data == translation.experiment.data

    held_out = from_verl({**given, "data.val_files": "/d/aime.parquet"}, rows=9).experiment.data
    assert (held_out.validation, held_out.sources("validation")) == ("/d/aime.parquet", {})
    alike = from_verl({**given, "data.train_files": ["/a/rows.parquet", "/b/rows.parquet"]}, rows=9)
    assert (alike.experiment.data.train, alike.experiment.data.mixture) == ("/a/rows.parquet", {})
    assert "the first of 2 files" in {note.key: note.text for note in alike.notes}["data.train_files"]


def test_epochs_of_unknown_data_ask_for_the_number_of_rows(easyr1: Path) -> None:
    found = from_easyr1(read_foreign(easyr1, ["data.train_files=my.parquet"]))
    (note,) = [note for note in found.having("listed") if note.key == "trainer.total_epochs"]
    assert "--rows" in note.text


def test_the_command_prints_yaml_that_is_an_experiment(easyr1: Path) -> None:
    command = [sys.executable, "-m", "tasks.cli", "migrate", "easyr1", str(easyr1), "worker.rollout.n=6"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    tree = yaml.safe_load(answer.stdout)
    (deployment,) = tree.pop("deployments")
    ((name, values),) = tree.items()
    assert deployment["parameters"] == {"experiment": name}
    built = build_experiment({"name": name, **values})
    expected = from_easyr1(read_foreign(easyr1, ["worker.rollout.n=6"])).experiment
    assert built == expected
    assert built.rollout.group_size == 6
    assert '#   trainer.colour: "blue": unknown to this translation' in answer.stdout


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        read_foreign(tmp_path / "nothing.yaml", [])
    with pytest.raises(ConfigError, match="is not key=value"):
        read_foreign(None, ["algorithm"])
    (tmp_path / "list.yaml").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="holds list"):
        read_foreign(tmp_path / "list.yaml", [])


def test_a_key_that_nobody_reads_is_unknown() -> None:
    ledger = Ledger({"a": 1, "b.c": 2}, {})
    ledger.same("a")
    notes = ledger.translation({"b.": "no b here"}).notes
    assert [(note.key, note.verdict, note.text) for note in notes] == [
        ("a", "same", ""), ("b.c", "listed", "no b here"),
    ]  # fmt: skip
