"""verl's GRPO configuration (0.7 to 0.9: Hydra's dotted arguments, or their YAML) as an experiment of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import rlcore.migrate.foreign as foreign
from rlcore.migrate.foreign import OWN_REWARD, PASS_THROUGH, Ledger, Translation

DEFAULTS: Mapping[str, Any] = {
    "data.prompt_key": "prompt", "data.image_key": "images", "data.video_key": "videos", "data.max_prompt_length": 512,
    "data.max_response_length": 512, "data.train_batch_size": 1024,
    "actor_rollout_ref.model.path": "", "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.model.trust_remote_code": False, "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16, "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_epochs": 1, "actor_rollout_ref.actor.use_dynamic_bsz": False,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384, "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.clip_ratio": 0.2, "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean", "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001, "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1, "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01, "actor_rollout_ref.actor.optim.betas": [0.9, 0.999],
    "actor_rollout_ref.actor.optim.lr_warmup_steps": -1, "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.temperature": 1.0, "actor_rollout_ref.rollout.top_p": 1.0,
    "actor_rollout_ref.rollout.top_k": -1, "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "actor_rollout_ref.rollout.enforce_eager": False, "actor_rollout_ref.rollout.max_num_seqs": 1024,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0, "actor_rollout_ref.rollout.val_kwargs.top_p": 1.0,
    "actor_rollout_ref.rollout.val_kwargs.n": 1,
    "algorithm.adv_estimator": "gae", "algorithm.norm_adv_by_std_in_grpo": True, "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.type": "fixed", "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10_000, "algorithm.kl_ctrl.target_kl": 0.1, "algorithm.filter_groups.enable": False,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "trainer.experiment_name": "gsm8k", "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
}  # fmt: skip
"""What verl takes for a key that is not given, for the keys that an experiment of ours depends on."""

_ADVANTAGES = {
    "grpo": "grpo", "rloo": "rloo", "remax": "remax", "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}  # fmt: skip
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum", "seq-mean-token-sum-norm": "constant",
}  # fmt: skip
_LOSSES = {"vanilla": "ppo_clip", "gspo": "gspo", "sapo": "sapo", "cispo": "cispo"}
_REWARDS = {"gsm8k": "gsm8k", "geo3k": "math", "geometry3k": "math", "dapo": "dapo", "math": "math"}
_BY_ITSELF = "chosen by rlflow itself"
_UNUSED = {
    "critic.": "there is no critic; only verl's gae has one",
    "actor_rollout_ref.ref.": "the reference policy is sharded, batched and offloaded with the policy",
    "actor_rollout_ref.rollout.log_prob_": "log-probs use training.tokens_per_microbatch",
    "actor_rollout_ref.actor.fsdp_config.": "FSDP2 has no such setting",
    "actor_rollout_ref.rollout.engine_kwargs": _BY_ITSELF,
    "reward_model.": "rewards are functions: reward.name",
    "ray_init.": "RLFLOW_RAY_ADDRESS",
    "ray_kwargs.": "RLFLOW_RAY_ADDRESS",
}
_A, _M, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."

_TAKEN = {
    f"{_M}path": "model.path",
    f"{_A}grad_clip": "training.max_grad_norm", f"{_A}ulysses_sequence_parallel_size": "training.sequence_parallel",
}  # fmt: skip
"""Keys whose values are also those of a key of ours."""


def from_verl(given: Mapping[str, Any], rows: int | None = None) -> Translation:
    """As ``easyr1.from_easyr1``."""
    ledger = Ledger(given, DEFAULTS)
    ledger.take(_TAKEN)
    foreign.data(ledger)
    _data(ledger)
    foreign.batches(ledger, "data.train_batch_size", f"{_A}ppo_mini_batch_size", f"{_A}ppo_epochs")
    foreign.steps(ledger, rows, "trainer.total_training_steps")
    foreign.model(ledger, _M)
    foreign.lora(ledger, f"{_M}lora_rank", f"{_M}lora_alpha", f"{_M}target_modules")
    foreign.optimizer(ledger, "verl", f"{_A}optim.", f"{_A}optim.lr_warmup_steps_ratio")
    foreign.rollout(ledger, _R, f"{_R}tensor_model_parallel_size")
    foreign.run(ledger)
    _algorithm(ledger)
    _actor(ledger)
    _rollout(ledger)
    _trainer(ledger)
    return ledger.translation(_UNUSED)


def _data(ledger: Ledger) -> None:
    names = foreign.sources(ledger)
    ledger.put("data.answer_column", "reward_model.ground_truth")  # where verl's files have it
    ledger.put("data.template", PASS_THROUGH)  # verl's files hold the whole prompt
    _chat_template_arguments(ledger)
    ledger.same_if("data.truncation", "error", otherwise="longer prompts are always set aside, never cut")
    ledger.same("data.seed", "data.val_batch_size", "data.filter_overlong_prompts_workers",
                "data.dataloader_num_workers", text=_BY_ITSELF)  # fmt: skip
    own = "custom_reward_function.path"
    rewards = {part: _reward_of(ledger.out[f"data.mixture.{part}.source"]) for part in names}
    if names and None not in rewards.values() and not ledger.get(own):
        ledger.out |= {f"data.mixture.{part}.reward.name": reward for part, reward in rewards.items()}
        name = rewards[names[0]]
    else:
        name = None if names else _reward_of(ledger.out["data.train"])
    if ledger.get(own) or name is None:
        ledger.listed(own, text=OWN_REWARD)
        ledger.listed("custom_reward_function.name", text="reward.function")
    else:
        ledger.put("reward.name", name)
        ledger.same(own, "custom_reward_function.name", text="none")
    ledger.same_if("reward_model.enable", False, otherwise="rewards are functions: reward.name")


def _reward_of(file: str) -> str | None:
    """The reward that verl has for the data of this name."""
    return next((ours for word, ours in _REWARDS.items() if word in file.lower()), None)


def _chat_template_arguments(ledger: Ledger) -> None:
    prefix = "data.apply_chat_template_kwargs"
    ledger.same_if(prefix, None, {}, otherwise="no mapping of names to values")
    for key in [key for key in ledger.given if key.startswith(f"{prefix}.")]:
        value = ledger.given[key]
        if isinstance(value, bool | int | float | str):
            ledger.put(f"data.chat_template_arguments{key.removeprefix(prefix)}", value, key)
        else:
            ledger.listed(key, text="data.chat_template_arguments takes texts, numbers, true and false")


def _algorithm(ledger: Ledger) -> None:
    get, top = ledger.get, "algorithm."
    estimator = get(f"{top}adv_estimator")
    name = _ADVANTAGES.get(estimator)
    if name == "grpo" and not get(f"{top}norm_adv_by_std_in_grpo"):
        name = "dr_grpo"
    if name is None:
        ledger.listed(f"{top}adv_estimator", text=f"allowed are {', '.join(_ADVANTAGES)}. grpo is used")
    else:
        keys = [f"{top}adv_estimator", *([f"{top}norm_adv_by_std_in_grpo"] if name == "dr_grpo" else [])]
        ledger.put("algorithm.advantage.name", name, *keys)
    ledger.same(f"{top}norm_adv_by_std_in_grpo")
    for key in ("gamma", "lam"):
        ledger.same_if(f"{top}{key}", 1, otherwise="rewards are not discounted")
    _kl(ledger)
    if get(f"{top}filter_groups.enable"):
        ledger.put("algorithm.dynamic_sampling.max_rounds", int(get(f"{top}filter_groups.max_num_gen_batches")) or 10,
                   f"{top}filter_groups.enable", f"{top}filter_groups.max_num_gen_batches")  # fmt: skip
        ledger.put("algorithm.dynamic_sampling.if_short", "fail")
        ledger.same_if(f"{top}filter_groups.metric", None, "acc", "score", "seq_reward", "seq_final_reward",
                       otherwise="groups go where their rewards do not differ")  # fmt: skip
    ledger.same(*(f"{top}filter_groups.{key}" for key in ("enable", "max_num_gen_batches", "metric")), text="none")
    _loss(ledger)


def _kl(ledger: Ledger) -> None:
    get, control = ledger.get, "algorithm.kl_ctrl."
    in_loss = ("use_kl_loss", "kl_loss_coef", "kl_loss_type")
    in_reward = ("algorithm.use_kl_in_reward", "algorithm.kl_penalty", f"{control}type", f"{control}kl_coef",
                 f"{control}horizon", f"{control}target_kl")  # fmt: skip
    if get("algorithm.use_kl_in_reward"):
        ledger.put("algorithm.kl.place", "reward", "algorithm.use_kl_in_reward")
        ledger.take({f"{control}kl_coef": "algorithm.kl.coefficient"})
        _estimator(ledger, "algorithm.kl_penalty", ("k1", "k2", "k3"))
        if get(f"{control}type") == "adaptive":
            foreign.adaptive_kl(ledger, f"{control}type", f"{control}horizon", f"{control}target_kl")
        if get(f"{_A}use_kl_loss"):
            ledger.listed(*(f"{_A}{key}" for key in in_loss), text="the KL is in the reward already, never in both")
    elif get(f"{_A}use_kl_loss"):
        ledger.put("algorithm.kl.place", "loss", f"{_A}use_kl_loss")
        ledger.put("algorithm.kl.coefficient", get(f"{_A}kl_loss_coef"), f"{_A}kl_loss_coef")
        _estimator(ledger, f"{_A}kl_loss_type", ("k2", "k3"))
    else:
        ledger.put("algorithm.kl.coefficient", 0.0, f"{_A}use_kl_loss", "algorithm.use_kl_in_reward")
    ledger.same(*in_reward, *(f"{_A}{key}" for key in in_loss), text="not in use")


def _estimator(ledger: Ledger, key: str, allowed: tuple[str, ...]) -> None:
    estimators = {name: ours for name, ours in _ESTIMATORS.items() if ours in allowed}
    otherwise = f"allowed here are {', '.join(allowed)} and straight_through. k3 is used"
    ledger.choose("algorithm.kl.estimator", key, estimators, otherwise)


def _loss(ledger: Ledger) -> None:
    get = ledger.get
    otherwise = f"allowed are {', '.join(_LOSSES)}. ppo_clip is used"
    name = ledger.choose("algorithm.loss.name", f"{_A}policy_loss.loss_mode", _LOSSES, otherwise) or "ppo_clip"
    low, high = (
        get(f"{_A}clip_ratio") if get(f"{_A}clip_ratio_{side}") is None else get(f"{_A}clip_ratio_{side}")
        for side in ("low", "high")
    )
    sides = (f"{_A}clip_ratio_low", f"{_A}clip_ratio_high")
    if name in ("ppo_clip", "gspo"):
        ledger.put(
            "algorithm.loss.clip_low", low, sides[0], *([] if get(sides[0]) is not None else [f"{_A}clip_ratio"])
        )
        ledger.put("algorithm.loss.clip_high", high, sides[1])
    if name == "ppo_clip":
        ledger.take({f"{_A}clip_ratio_c": "algorithm.loss.dual_clip"})
    if name == "cispo":
        ledger.put("algorithm.loss.max_ratio", 1 + float(high), sides[1])
        ledger.listed(sides[0], text="the ratio is cut from above only")
    ledger.same(*sides, f"{_A}clip_ratio", f"{_A}clip_ratio_c", text="not in use")
    otherwise = f"allowed are {', '.join(_AGGREGATIONS)}. token-mean is used"
    ledger.choose("algorithm.aggregation", f"{_A}loss_agg_mode", _AGGREGATIONS, otherwise)
    ledger.same_if(f"{_A}entropy_coeff", 0, otherwise="there is no entropy bonus")


def _actor(ledger: Ledger) -> None:
    get = ledger.get
    ledger.same_if(f"{_M}use_remove_padding", True, otherwise="sequences are always packed")
    ledger.same_if(f"{_A}strategy", "fsdp", "fsdp2", otherwise="FSDP2 is all there is")
    longest = ledger.longest_sequence
    micro, tokens = f"{_A}ppo_micro_batch_size_per_gpu", f"{_A}ppo_max_token_len_per_gpu"
    if get(f"{_A}use_dynamic_bsz") or get(micro) is None:
        ledger.put("training.tokens_per_microbatch", max(longest, int(get(tokens))), tokens)
    else:
        ledger.put("training.tokens_per_microbatch", longest * int(get(micro)), micro, text="of the longest sequences")
    ledger.same(micro, tokens, f"{_A}use_dynamic_bsz", text="microbatches are filled by tokens")
    for key in ("warmup_style", "lr_scheduler_type"):
        ledger.same_if(f"{_A}optim.{key}", None, "constant", otherwise="after warm-up the rate is constant")
    offload = (f"{_A}fsdp_config.param_offload", f"{_A}fsdp_config.optimizer_offload")
    ledger.put("training.offload", any(map(get, offload)), *offload)


def _rollout(ledger: Ledger) -> None:
    get = ledger.get
    ledger.put("rollout.max_sequences", int(get(f"{_R}max_num_seqs")), f"{_R}max_num_seqs")
    ledger.same(*(f"{_R}{key}" for key in ("enable_chunked_prefill", "free_cache_engine", "max_num_batched_tokens",
                  "disable_log_stats", "disable_mm_preprocessor_cache", "load_format", "layered_summon",
                  "mode", "max_model_len")), text=_BY_ITSELF)  # fmt: skip
    values = f"{_R}val_kwargs."
    greedy = (
        not get(f"{values}do_sample") if get(f"{values}do_sample") is not None else get(f"{values}temperature") == 0
    )
    ledger.put("evaluation.temperature", 0 if greedy else get(f"{values}temperature"), f"{values}temperature",
               f"{values}do_sample")  # fmt: skip
    ledger.put("evaluation.top_p", get(f"{values}top_p"), f"{values}top_p")
    ledger.put("evaluation.samples", 1 if greedy else int(get(f"{values}n")), f"{values}n")
    ledger.same_if(f"{values}top_k", None, -1, otherwise="evaluation keeps the whole vocabulary")


def _trainer(ledger: Ledger) -> None:
    get = ledger.get
    keep = get("trainer.max_actor_ckpt_to_keep")
    if keep is not None:
        ledger.put("segment.keep_checkpoints", int(keep), "trainer.max_actor_ckpt_to_keep")
    ledger.same("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep", text="no critic")
    foreign.validation(ledger, "trainer.test_freq")
    ledger.same_if("trainer.balance_batch", True, otherwise="microbatches are always balanced over the workers")
    ledger.same_if("trainer.resume_mode", None, "auto", otherwise="--run-id continues a run from its newest checkpoint")
    ledger.same_if("trainer.default_local_dir", None, otherwise="RLFLOW_DATA_DIR; a run has its folder there")
