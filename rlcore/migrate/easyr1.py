"""EasyR1's configuration (0.3, its YAML with dotted arguments over it) as an experiment of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import rlcore.migrate.foreign as foreign
from rlcore.migrate.foreign import OWN_REWARD, PASS_THROUGH, Ledger, Translation

DEFAULTS: Mapping[str, Any] = {
    "data.train_files": "", "data.val_files": "", "data.prompt_key": "prompt", "data.answer_key": "answer",
    "data.image_key": "images", "data.video_key": "videos", "data.max_prompt_length": 512,
    "data.max_response_length": 512, "data.rollout_batch_size": 512, "data.seed": 1, "data.min_pixels": 262144,
    "data.max_pixels": 4194304,
    "algorithm.adv_estimator": "grpo", "algorithm.disable_kl": False, "algorithm.use_kl_loss": False,
    "algorithm.kl_penalty": "kl", "algorithm.kl_coef": 1e-3, "algorithm.kl_type": "fixed",
    "algorithm.kl_horizon": 10_000, "algorithm.kl_target": 0.1, "algorithm.online_filtering": False,
    "worker.actor.global_batch_size": 256, "worker.actor.micro_batch_size_per_device_for_update": 4,
    "worker.actor.max_grad_norm": 1.0, "worker.actor.clip_ratio_low": 0.2, "worker.actor.clip_ratio_high": 0.3,
    "worker.actor.clip_ratio_dual": 3.0, "worker.actor.loss_avg_mode": "token", "worker.actor.loss_type": "default",
    "worker.actor.ppo_epochs": 1, "worker.actor.ulysses_size": 1, "worker.actor.use_torch_compile": True,
    "worker.actor.tau_positive": 1.0, "worker.actor.tau_negative": 1.05,
    "worker.actor.model.enable_gradient_checkpointing": True, "worker.actor.model.trust_remote_code": True,
    "worker.actor.model.freeze_vision_tower": False, "worker.actor.model.lora.rank": 0,
    "worker.actor.model.lora.alpha": 64, "worker.actor.optim.lr": 1e-6, "worker.actor.optim.betas": [0.9, 0.999],
    "worker.actor.optim.weight_decay": 0.01, "worker.actor.optim.strategy": "adamw",
    "worker.actor.offload.offload_params": False, "worker.actor.offload.offload_optimizer": False,
    "worker.rollout.n": 1, "worker.rollout.temperature": 1.0, "worker.rollout.top_p": 1.0, "worker.rollout.top_k": -1,
    "worker.rollout.seed": 1, "worker.rollout.limit_images": 0, "worker.rollout.gpu_memory_utilization": 0.6,
    "worker.rollout.enforce_eager": False,
    "worker.reward.num_cpus": 1,
    "trainer.total_epochs": 15, "trainer.experiment_name": "demo", "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8,
    "trainer.max_try_make_batch": 20, "trainer.save_freq": -1, "trainer.save_limit": -1,
}  # fmt: skip
"""What EasyR1 takes for a key that is not given, for the keys that an experiment of ours depends on."""

_TAKEN = {
    "data.answer_key": "data.answer_column",
    "data.min_pixels": "data.min_pixels", "data.max_pixels": "data.max_pixels",
    "worker.actor.model.model_path": "model.path",
    "worker.actor.model.freeze_vision_tower": "model.freeze_vision_tower",
    "worker.actor.max_grad_norm": "training.max_grad_norm", "worker.actor.optim.strategy": "training.optimizer",
    "worker.actor.ulysses_size": "training.sequence_parallel", "worker.rollout.seed": "seed",
}  # fmt: skip
"""Keys whose values are also those of a key of ours."""
_ADVANTAGES = {"grpo": "grpo", "rloo": "rloo", "remax": "remax", "reinforce_plus_plus": "reinforce_plus_plus"}
_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
_AGGREGATIONS = {"token": "token_mean", "seq": "sequence_mean_token_mean"}
_KNOWN_FILES = ("math", "r1v", "dapo")  # of its templates and of its rewards
_UNUSED = {
    "worker.critic.": "there is no critic; only EasyR1's gae has one",
    "worker.ref.": "the reference policy is sharded, batched and offloaded with the policy",
    "worker.actor.fsdp.": "FSDP2 has no such setting",
    "worker.actor.optim.training_steps": "EasyR1 sets it by itself",
}


def from_easyr1(given: Mapping[str, Any], rows: int | None = None) -> Translation:
    """
    Args:
        given: dotted keys, as ``foreign.read_foreign`` gives them.
        rows: training problems, for trainer.total_epochs.

    Raises:
        ConfigError: what the keys say together is no experiment of ours.
    """
    ledger, lora, optim = Ledger(given, DEFAULTS), "worker.actor.model.lora.", "worker.actor.optim."
    ledger.take(_TAKEN)
    foreign.sources(ledger)
    foreign.data(ledger)
    foreign.batches(ledger, "data.rollout_batch_size", "worker.actor.global_batch_size", "worker.actor.ppo_epochs")
    foreign.steps(ledger, rows, "trainer.max_steps")
    foreign.model(ledger, "worker.actor.model.")
    foreign.lora(ledger, f"{lora}rank", f"{lora}alpha", f"{lora}target_modules")
    foreign.optimizer(ledger, "EasyR1", optim, f"{optim}lr_warmup_ratio")
    foreign.rollout(ledger, "worker.rollout.", "worker.rollout.tensor_parallel_size")
    foreign.run(ledger)
    _data(ledger)
    _algorithm(ledger)
    _actor(ledger)
    _rollout(ledger)
    _reward(ledger)
    _trainer(ledger)
    return ledger.translation(_UNUSED)


def _data(ledger: Ledger) -> None:
    template = ledger.get("data.format_prompt")
    stem = PurePath(template).stem if template else None
    if stem in (None, *_KNOWN_FILES):
        ledger.put("data.template", PASS_THROUGH if template is None else stem or template, "data.format_prompt")
    else:
        ledger.put("data.template", template, "data.format_prompt", text="a file of yours")
    ledger.same_if("data.image_dir", None, otherwise="write absolute paths, or paths relative to the data file")
    ledger.same_if("data.mini_rollout_batch_size", None, otherwise="a round of dynamic sampling is a whole batch")
    ledger.same_if("data.override_chat_template", None, otherwise="put the chat template into the model's folder")
    ledger.put("data.video_fps", ledger.get("data.video_fps") or 2.0, "data.video_fps")
    ledger.same("data.filter_overlong_prompts_workers", "data.val_batch_size", text="found by itself")


def _algorithm(ledger: Ledger) -> None:
    otherwise = f"allowed are {', '.join(_ADVANTAGES)}; pass_at_k is another formula than grpo_passk. grpo is used"
    ledger.choose("algorithm.advantage.name", "algorithm.adv_estimator", _ADVANTAGES, otherwise)
    for key in ("algorithm.gamma", "algorithm.lam"):
        ledger.same_if(key, 1, otherwise="rewards are not discounted")
    _kl(ledger)
    _filtering(ledger)
    _loss(ledger)


def _kl(ledger: Ledger) -> None:
    get = ledger.get
    adaptive = ("algorithm.kl_type", "algorithm.kl_horizon", "algorithm.kl_target")
    if get("algorithm.disable_kl"):
        ledger.put("algorithm.kl.coefficient", 0.0, "algorithm.disable_kl")
        ledger.same(*adaptive, "algorithm.kl_penalty", "algorithm.use_kl_loss", "algorithm.kl_coef", text="no KL")
        return
    ledger.same("algorithm.disable_kl")
    ledger.take({"algorithm.kl_coef": "algorithm.kl.coefficient"})
    place = "loss" if get("algorithm.use_kl_loss") else "reward"
    ledger.put("algorithm.kl.place", place, "algorithm.use_kl_loss")
    estimators = {name: ours for name, ours in _ESTIMATORS.items() if place == "reward" or ours != "k1"}
    otherwise = "allowed are low_var_kl, mse and, in the reward, kl. k3 is used"
    ledger.choose("algorithm.kl.estimator", "algorithm.kl_penalty", estimators, otherwise)
    if get("algorithm.kl_type") == "adaptive" and place == "reward":
        foreign.adaptive_kl(ledger, *adaptive)
    else:
        ledger.same(*adaptive, text="fixed, as EasyR1 in the loss")


def _filtering(ledger: Ledger) -> None:
    get = ledger.get
    bounds = ("algorithm.filter_key", "algorithm.filter_low", "algorithm.filter_high")
    if not get("algorithm.online_filtering"):
        ledger.same("algorithm.online_filtering", *bounds, "trainer.max_try_make_batch", text="no filtering")
        return
    rounds = int(get("trainer.max_try_make_batch"))
    ledger.put(
        "algorithm.dynamic_sampling.max_rounds", rounds, "algorithm.online_filtering", "trainer.max_try_make_batch"
    )
    ledger.put("algorithm.dynamic_sampling.if_short", "fail")
    ledger.listed(*bounds, text="groups go where their rewards do not differ, whatever their mean is")


def _loss(ledger: Ledger) -> None:
    get = ledger.get
    low, high, dual = (f"worker.actor.clip_ratio_{name}" for name in ("low", "high", "dual"))
    taus = ("worker.actor.tau_positive", "worker.actor.tau_negative")
    kind = get("worker.actor.loss_type")
    name = "ppo_clip" if kind == "default" else kind
    ledger.put("algorithm.loss.name", name, "worker.actor.loss_type")
    if name in ("ppo_clip", "gspo", "gspo_token"):
        ledger.take({low: "algorithm.loss.clip_low", high: "algorithm.loss.clip_high"})
    if name == "ppo_clip":
        ledger.take({dual: "algorithm.loss.dual_clip"})
    elif name == "cispo":
        ledger.put("algorithm.loss.max_ratio", 1 + float(get(high)), high)
        ledger.listed(low, text="the ratio is cut from above only")
    elif name == "sapo":
        ledger.take({taus[0]: "algorithm.loss.tau_positive", taus[1]: "algorithm.loss.tau_negative"})
    ledger.same(low, high, dual, *taus, text=f"{name} has none")
    otherwise = "allowed are token and seq. token is used"
    ledger.choose("algorithm.aggregation", "worker.actor.loss_avg_mode", _AGGREGATIONS, otherwise)


def _actor(ledger: Ledger) -> None:
    get = ledger.get
    model, optim, fsdp = "worker.actor.model.", "worker.actor.optim.", "worker.actor.fsdp."
    ledger.same_if(f"{model}tokenizer_path", None, get(f"{model}model_path"), otherwise="it is the model folder's")
    ledger.same_if(f"{model}override_config", None, {}, otherwise="edit config.json in the model's folder")
    if "model.lora.rank" in ledger.out:
        ledger.same_if(f"{model}lora.exclude_modules", None, ".*visual.*", otherwise="see model.lora.vision_tower")
    ledger.same(f"{model}lora.exclude_modules", text="no LoRA")
    ledger.same_if(f"{optim}lr_scheduler_type", "constant", otherwise="after warm-up the rate is constant")
    ledger.same_if(f"{optim}min_lr_ratio", None, otherwise="after warm-up the rate is constant")
    micro = "worker.actor.micro_batch_size_per_device_for_update"
    tokens = int(get(micro)) * ledger.longest_sequence
    ledger.put("training.tokens_per_microbatch", tokens, micro, text="of the longest sequences")
    ledger.same(
        "worker.actor.micro_batch_size_per_device_for_experience", text="log-probs use training.tokens_per_microbatch"
    )
    ledger.same_if("worker.actor.strategy", "fsdp", otherwise="FSDP2 is all there is", text="FSDP2")
    ledger.same_if("worker.actor.padding_free", True, otherwise="sequences are always packed")
    ledger.same_if("worker.actor.dynamic_batching", True, otherwise="microbatches are always filled by tokens")
    compiled = "auto" if get("worker.actor.use_torch_compile") else "off"
    ledger.put("training.compile_blocks", compiled, "worker.actor.use_torch_compile")
    offload = ("worker.actor.offload.offload_params", "worker.actor.offload.offload_optimizer")
    ledger.put("training.offload", any(map(get, offload)), *offload)
    ledger.same_if(f"{fsdp}enable_full_shard", True, otherwise="weights are always sharded over all workers")
    ledger.same_if(f"{fsdp}enable_cpu_offload", False, otherwise="see training.offload")
    ledger.same_if(f"{fsdp}torch_dtype", None, "fp32", otherwise="bfloat16 weights: training.optimizer=adamw_bf16")
    ledger.same_if(f"{fsdp}fsdp_size", -1, otherwise="weights are always sharded over all workers")
    ledger.same_if(f"{fsdp}mp_param_dtype", "bf16", otherwise="see model.compute_dtype")
    for key in ("mp_reduce_dtype", "mp_buffer_dtype"):
        ledger.same_if(f"{fsdp}{key}", None, "fp32", otherwise="gradients are reduced in float32")
    ledger.same(f"{fsdp}enable_rank0_init", f"{fsdp}use_orig_params", text="found by itself")
    ledger.same_if("worker.hybrid_engine", None, True, otherwise="see resources.rollout_workers")


def _rollout(ledger: Ledger) -> None:
    get, top = ledger.get, "worker.rollout."
    if get(f"{top}limit_images"):
        ledger.put("data.max_images", get(f"{top}limit_images"), f"{top}limit_images")
    ledger.same(f"{top}limit_images")
    longest = ledger.longest_sequence
    ledger.same_if(f"{top}max_model_len", None, longest, otherwise="it is the longest prompt and completion together")
    ledger.same(
        *(f"{top}{name}" for name in ("enable_chunked_prefill", "max_num_batched_tokens", "disable_log_stats",
                                      "disable_tqdm")), text="chosen for the engine by itself",
    )  # fmt: skip
    sampling = f"{top}val_override_config."
    for theirs, ours in (("temperature", "temperature"), ("top_p", "top_p"), ("n", "samples")):
        value = get(f"{sampling}{theirs}")
        value = (1 if theirs == "n" else get(f"{top}{theirs}")) if value is None else value
        ledger.put(f"evaluation.{ours}", value, f"{sampling}{theirs}")
    if ledger.out["evaluation.temperature"] == 0:
        ledger.put("evaluation.samples", 1, text="greedy")
    ledger.same_if(f"{top}val_override_config", None, {}, otherwise="see evaluation")


def _reward(ledger: Ledger) -> None:
    get, top = ledger.get, "worker.reward."
    function = get(f"{top}reward_function")
    name = PurePath(str(function).partition(":")[0]).stem if function else "math"
    if name in _KNOWN_FILES:
        ledger.put("reward.name", name, f"{top}reward_function")
    else:
        ledger.listed(f"{top}reward_function", text=OWN_REWARD)
    arguments = f"{top}reward_function_kwargs"
    ledger.same_if(arguments, None, {}, otherwise="see the settings of the reward")
    weight, buffer = get(f"{arguments}.format_weight"), get(f"{arguments}.overlong_buffer_length")
    if weight is not None and name in ("math", "r1v"):
        ledger.put("reward.format_weight", weight, f"{arguments}.format_weight")
    if buffer is not None and name == "dapo":
        ledger.put("reward.overlong.buffer_tokens", int(buffer), f"{arguments}.overlong_buffer_length")
        penalty = get(f"{arguments}.overlong_penalty_factor")
        ledger.put(
            "reward.overlong.penalty", 1.0 if penalty is None else penalty, f"{arguments}.overlong_penalty_factor"
        )
        ledger.same_if(f"{arguments}.max_response_length", None, get("data.max_response_length"),
                       otherwise="it is rollout.max_completion_tokens")  # fmt: skip
    ledger.same_if(f"{top}skip_special_tokens", True, otherwise="rewards never see special tokens")
    ledger.same_if(f"{top}reward_type", None, "batch", "sequential", otherwise="unknown")
    ledger.put("reward.processes", int(get(f"{top}num_cpus")), f"{top}num_cpus")


def _trainer(ledger: Ledger) -> None:
    get = ledger.get
    if int(get("trainer.save_limit")) > 0:
        ledger.put("segment.keep_checkpoints", int(get("trainer.save_limit")), "trainer.save_limit")
    else:
        ledger.listed("trainer.save_limit", text="the latest segment.keep_checkpoints are kept; keep_every keeps more")
    foreign.validation(ledger, "trainer.val_freq")
    ledger.same_if("trainer.val_only", False, otherwise="rlflow evaluate RUN")
    ledger.same("trainer.val_generations_to_log", text="completions of every batch are kept and shown")
    ledger.same_if("trainer.save_model_only", False, otherwise="a checkpoint holds all that a resume needs")
    ledger.same_if("trainer.find_last_checkpoint", True, otherwise="a run goes on from its newest whole checkpoint")
    ledger.same_if("trainer.save_checkpoint_path", None, otherwise="RLFLOW_DATA_DIR; a run has its folder there")
    ledger.same_if("trainer.load_checkpoint_path", None, otherwise="--run-id continues a run")
    ledger.same_if("trainer.ray_timeline", None, otherwise="touch profile_step in the run's folder for a trace")
