"""EasyR1's configuration (0.3, its YAML with dotted arguments over it) as an experiment of ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from rlcore.migrate.foreign import PASS_THROUGH, Ledger, Translation, engine_dtype_of, engine_of, slug, steps_of

DEFAULTS: Mapping[str, Any] = {
    "data.train_files": "", "data.val_files": "", "data.prompt_key": "prompt", "data.answer_key": "answer",
    "data.image_key": "images", "data.video_key": "videos", "data.max_prompt_length": 512,
    "data.max_response_length": 512, "data.rollout_batch_size": 512, "data.shuffle": True, "data.seed": 1,
    "data.min_pixels": 262144, "data.max_pixels": 4194304, "data.filter_overlong_prompts": True,
    "algorithm.gamma": 1.0, "algorithm.lam": 1.0, "algorithm.adv_estimator": "grpo", "algorithm.disable_kl": False,
    "algorithm.use_kl_loss": False, "algorithm.kl_penalty": "kl", "algorithm.kl_coef": 1e-3,
    "algorithm.kl_type": "fixed", "algorithm.kl_horizon": 10_000, "algorithm.kl_target": 0.1,
    "algorithm.online_filtering": False, "algorithm.filter_key": "overall", "algorithm.filter_low": 0.01,
    "algorithm.filter_high": 0.99,
    "worker.hybrid_engine": True, "worker.actor.strategy": "fsdp", "worker.actor.global_batch_size": 256,
    "worker.actor.micro_batch_size_per_device_for_update": 4, "worker.actor.max_grad_norm": 1.0,
    "worker.actor.clip_ratio_low": 0.2, "worker.actor.clip_ratio_high": 0.3, "worker.actor.clip_ratio_dual": 3.0,
    "worker.actor.loss_avg_mode": "token", "worker.actor.loss_type": "default", "worker.actor.ppo_epochs": 1,
    "worker.actor.padding_free": True, "worker.actor.dynamic_batching": True, "worker.actor.ulysses_size": 1,
    "worker.actor.use_torch_compile": True, "worker.actor.tau_positive": 1.0, "worker.actor.tau_negative": 1.05,
    "worker.actor.model.override_config": {}, "worker.actor.model.enable_gradient_checkpointing": True,
    "worker.actor.model.trust_remote_code": True, "worker.actor.model.freeze_vision_tower": False,
    "worker.actor.model.lora.rank": 0, "worker.actor.model.lora.alpha": 64,
    "worker.actor.model.lora.target_modules": "all-linear",
    "worker.actor.optim.lr": 1e-6, "worker.actor.optim.betas": [0.9, 0.999], "worker.actor.optim.weight_decay": 0.01,
    "worker.actor.optim.strategy": "adamw", "worker.actor.optim.lr_warmup_ratio": 0.0,
    "worker.actor.optim.lr_scheduler_type": "constant",
    "worker.actor.fsdp.enable_full_shard": True, "worker.actor.fsdp.enable_cpu_offload": False,
    "worker.actor.fsdp.fsdp_size": -1, "worker.actor.fsdp.mp_param_dtype": "bf16",
    "worker.actor.fsdp.mp_reduce_dtype": "fp32", "worker.actor.offload.offload_params": False,
    "worker.actor.offload.offload_optimizer": False,
    "worker.rollout.name": "vllm", "worker.rollout.n": 1, "worker.rollout.temperature": 1.0,
    "worker.rollout.top_p": 1.0, "worker.rollout.top_k": -1, "worker.rollout.seed": 1,
    "worker.rollout.limit_images": 0, "worker.rollout.dtype": "bf16", "worker.rollout.gpu_memory_utilization": 0.6,
    "worker.rollout.ignore_eos": False, "worker.rollout.enforce_eager": False,
    "worker.rollout.tensor_parallel_size": 2,
    "worker.reward.reward_function_kwargs": {}, "worker.reward.skip_special_tokens": True, "worker.reward.num_cpus": 1,
    "trainer.total_epochs": 15, "trainer.experiment_name": "demo", "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8, "trainer.max_try_make_batch": 20, "trainer.critic_warmup": 0, "trainer.val_freq": -1,
    "trainer.val_before_train": True, "trainer.val_only": False, "trainer.save_freq": -1, "trainer.save_limit": -1,
    "trainer.save_model_only": False, "trainer.find_last_checkpoint": True,
}  # fmt: skip
"""What EasyR1 takes for a key that is not given, for the keys that an experiment of ours depends on."""

_ADVANTAGES = {"grpo": "grpo", "rloo": "rloo", "remax": "remax", "reinforce_plus_plus": "reinforce_plus_plus"}
_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
_REWARDS = ("math", "r1v", "dapo")
_TEMPLATES = ("math", "r1v", "dapo")
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
    ledger = Ledger(given, DEFAULTS)
    train = _data(ledger)
    per_batch = _batches(ledger)
    _algorithm(ledger)
    _actor(ledger, per_batch)
    _rollout(ledger)
    _reward(ledger)
    _trainer(ledger, train, per_batch, rows)
    ledger.close(_UNUSED, "unknown to this translation")
    return ledger.translation(slug(ledger.get("trainer.experiment_name")))


def _data(ledger: Ledger) -> str:
    get = ledger.get
    for theirs, ours in (
        ("train_files", "train"), ("val_files", "validation"), ("prompt_key", "problem_column"),
        ("answer_key", "answer_column"), ("image_key", "images_column"), ("video_key", "videos_column"),
        ("max_prompt_length", "max_prompt_tokens"), ("min_pixels", "min_pixels"), ("max_pixels", "max_pixels"),
        ("seed", "shuffle_seed"),
    ):  # fmt: skip
        ledger.put(f"data.{ours}", get(f"data.{theirs}"), f"data.{theirs}")
    ledger.put("rollout.max_completion_tokens", get("data.max_response_length"), "data.max_response_length")
    template = get("data.format_prompt")
    stem = PurePath(template).stem if template else None
    ours = PASS_THROUGH if template is None else stem if stem in _TEMPLATES else template
    ledger.put(
        "data.template", ours, "data.format_prompt", text="" if stem in (None, *_TEMPLATES) else "a file of yours"
    )
    ledger.same_if("data.shuffle", True, otherwise="problems are always shuffled, by data.shuffle_seed")
    ledger.same_if("data.filter_overlong_prompts", True, otherwise="longer prompts are always set aside, never cut")
    ledger.same_if("data.image_dir", None, otherwise="write absolute paths, or paths relative to the data file")
    ledger.same_if("data.mini_rollout_batch_size", None, otherwise="a round of dynamic sampling is a whole batch")
    ledger.same_if("data.override_chat_template", None, otherwise="put the chat template into the model's folder")
    ledger.listed("data.video_fps", text="videos come as lists of frames")
    ledger.same("data.filter_overlong_prompts_workers", "data.val_batch_size", text="found by itself")
    return str(get("data.train_files"))


def _batches(ledger: Ledger) -> int:
    """Optimizer steps per rollout batch."""
    get = ledger.get
    batch, mini, epochs = (
        int(get(key))
        for key in ("data.rollout_batch_size", "worker.actor.global_batch_size", "worker.actor.ppo_epochs")
    )
    ledger.put("training.problems_per_batch", batch, "data.rollout_batch_size")
    ledger.put("training.mini_batches", max(1, batch // mini), "worker.actor.global_batch_size")
    ledger.put("training.ppo_epochs", epochs, "worker.actor.ppo_epochs")
    longest = int(get("data.max_prompt_length")) + int(get("data.max_response_length"))
    key = "worker.actor.micro_batch_size_per_device_for_update"
    ledger.put("training.tokens_per_microbatch", int(get(key)) * longest, key, text="of the longest sequences")
    ledger.same(
        "worker.actor.micro_batch_size_per_device_for_experience", text="log-probs use training.tokens_per_microbatch"
    )
    return max(1, batch // mini) * epochs


def _algorithm(ledger: Ledger) -> None:
    get = ledger.get
    estimator = get("algorithm.adv_estimator")
    if estimator in _ADVANTAGES:
        ledger.put("algorithm.advantage.name", _ADVANTAGES[estimator], "algorithm.adv_estimator")
    else:
        ledger.listed("algorithm.adv_estimator", text="allowed are grpo, rloo, remax, reinforce_plus_plus; pass_at_k "
                      "is another formula than grpo_passk. grpo is used")  # fmt: skip
    for key in ("algorithm.gamma", "algorithm.lam"):
        ledger.same_if(key, 1, otherwise="rewards are not discounted")
    _kl(ledger)
    _filtering(ledger)
    _loss(ledger)


def _kl(ledger: Ledger) -> None:
    get = ledger.get
    rest = [
        f"algorithm.{key}" for key in ("kl_type", "kl_horizon", "kl_target", "kl_penalty", "use_kl_loss", "kl_coef")
    ]
    if get("algorithm.disable_kl"):
        ledger.put("algorithm.kl.coefficient", 0.0, "algorithm.disable_kl")
        ledger.same(*rest, text="no KL")
        return
    ledger.same("algorithm.disable_kl")
    ledger.put("algorithm.kl.coefficient", get("algorithm.kl_coef"), "algorithm.kl_coef")
    place = "loss" if get("algorithm.use_kl_loss") else "reward"
    ledger.put("algorithm.kl.place", place, "algorithm.use_kl_loss")
    estimator = _ESTIMATORS.get(get("algorithm.kl_penalty"))
    if estimator is None or (place == "loss" and estimator == "k1"):
        ledger.listed("algorithm.kl_penalty", text="allowed are low_var_kl, mse and, in the reward, kl. k3 is used")
    else:
        ledger.put("algorithm.kl.estimator", estimator, "algorithm.kl_penalty")
    if get("algorithm.kl_type") == "adaptive" and place == "reward":
        ledger.put(
            "algorithm.kl.adaptive.target", get("algorithm.kl_target"), "algorithm.kl_target", "algorithm.kl_type"
        )
        ledger.put("algorithm.kl.adaptive.horizon", int(get("algorithm.kl_horizon")), "algorithm.kl_horizon")
    else:
        ledger.same(
            "algorithm.kl_type", "algorithm.kl_horizon", "algorithm.kl_target", text="fixed, as EasyR1 in the loss"
        )


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
        ledger.put("algorithm.loss.clip_low", get(low), low)
        ledger.put("algorithm.loss.clip_high", get(high), high)
    if name == "ppo_clip":
        ledger.put("algorithm.loss.dual_clip", get(dual), dual)
    elif name == "cispo":
        ledger.put("algorithm.loss.max_ratio", 1 + float(get(high)), high)
        ledger.listed(low, text="the ratio is cut from above only")
    elif name == "sapo":
        ledger.put("algorithm.loss.tau_positive", get(taus[0]), taus[0])
        ledger.put("algorithm.loss.tau_negative", get(taus[1]), taus[1])
    ledger.same(low, high, dual, *taus, text=f"{name} has none")
    mean = {"token": "token_mean", "seq": "sequence_mean_token_mean"}.get(get("worker.actor.loss_avg_mode"))
    if mean is None:
        ledger.listed("worker.actor.loss_avg_mode", text="allowed are token and seq. token is used")
    else:
        ledger.put("algorithm.aggregation", mean, "worker.actor.loss_avg_mode")


def _actor(ledger: Ledger, per_batch: int) -> None:
    get = ledger.get
    model, optim, fsdp = "worker.actor.model.", "worker.actor.optim.", "worker.actor.fsdp."
    ledger.put("model.path", get(f"{model}model_path"), f"{model}model_path")
    ledger.same_if(f"{model}tokenizer_path", None, get(f"{model}model_path"), otherwise="it is the model folder's")
    ledger.same_if(f"{model}override_config", None, {}, otherwise="edit config.json in the model's folder")
    kept = "full" if get(f"{model}enable_gradient_checkpointing") else "none"
    ledger.put("model.gradient_checkpointing", kept, f"{model}enable_gradient_checkpointing")
    ledger.put("model.trust_remote_code", get(f"{model}trust_remote_code"), f"{model}trust_remote_code")
    ledger.put("model.freeze_vision_tower", get(f"{model}freeze_vision_tower"), f"{model}freeze_vision_tower")
    _lora(ledger, f"{model}lora.")
    ledger.put("training.max_grad_norm", get("worker.actor.max_grad_norm"), "worker.actor.max_grad_norm")
    ledger.put("training.learning_rate", get(f"{optim}lr"), f"{optim}lr")
    ledger.put("training.weight_decay", get(f"{optim}weight_decay"), f"{optim}weight_decay")
    betas = [float(beta) for beta in get(f"{optim}betas")]
    ledger.put("training.beta1", betas[0], f"{optim}betas")
    ledger.put("training.beta2", betas[1])
    ledger.put("training.optimizer", get(f"{optim}strategy"), f"{optim}strategy")
    ledger.same_if(f"{optim}lr_scheduler_type", "constant", otherwise="after warm-up the rate is constant")
    ledger.same_if(f"{optim}min_lr_ratio", None, otherwise="after warm-up the rate is constant")
    if get(f"{optim}lr_warmup_steps") is not None:
        warmup = int(get(f"{optim}lr_warmup_steps")) * per_batch
        ledger.put("training.warmup_steps", warmup, f"{optim}lr_warmup_steps", text="EasyR1 counts rollout batches")
        ledger.same(f"{optim}lr_warmup_ratio", text="lr_warmup_steps decides")
    else:
        ledger.same_if(f"{optim}lr_warmup_ratio", 0, otherwise="set training.warmup_steps in optimizer steps")
        ledger.same(f"{optim}lr_warmup_steps")
    ledger.same_if("worker.actor.strategy", "fsdp", otherwise="FSDP2 is all there is", text="FSDP2")
    ledger.same_if("worker.actor.padding_free", True, otherwise="sequences are always packed")
    ledger.same_if("worker.actor.dynamic_batching", True, otherwise="microbatches are always filled by tokens")
    ledger.put("training.sequence_parallel", get("worker.actor.ulysses_size"), "worker.actor.ulysses_size")
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


def _lora(ledger: Ledger, lora: str) -> None:
    rank = int(ledger.get(f"{lora}rank"))
    if rank == 0:
        ledger.same(
            *(f"{lora}{name}" for name in ("rank", "alpha", "target_modules", "exclude_modules")), text="no LoRA"
        )
        return
    ledger.put("model.lora.rank", rank, f"{lora}rank")
    ledger.put("model.lora.alpha", float(ledger.get(f"{lora}alpha")), f"{lora}alpha")
    ledger.same_if(f"{lora}target_modules", "all-linear", otherwise="adapters are on every linear layer")
    ledger.same_if(f"{lora}exclude_modules", None, ".*visual.*", otherwise="see model.lora.vision_tower")


def _rollout(ledger: Ledger) -> None:
    get, top = ledger.get, "worker.rollout."
    ledger.put("rollout.group_size", get(f"{top}n"), f"{top}n")
    for name in ("temperature", "top_p", "gpu_memory_utilization", "enforce_eager"):
        ledger.put(f"rollout.{name}", get(f"{top}{name}"), f"{top}{name}")
    ledger.put("rollout.top_k", max(0, int(get(f"{top}top_k"))), f"{top}top_k")
    ledger.put("seed", get(f"{top}seed"), f"{top}seed")
    if get(f"{top}limit_images"):
        ledger.put("data.max_images", get(f"{top}limit_images"), f"{top}limit_images")
    ledger.same(f"{top}limit_images")
    ledger.same_if(f"{top}name", "vllm", otherwise="vLLM samples")
    engine_dtype_of(ledger, f"{top}dtype")
    ledger.same_if(f"{top}ignore_eos", False, otherwise="a completion ends at its end token")
    engine_of(ledger, f"{top}tensor_parallel_size")
    longest = get("data.max_prompt_length") + get("data.max_response_length")
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
    if name in _REWARDS:
        ledger.put("reward.name", name, f"{top}reward_function")
    else:
        ledger.listed(f"{top}reward_function", text="its signature is another one: write reward(text, problem, "
                      "num_tokens, finish_reason), set reward.name=user and reward.file. math is used")  # fmt: skip
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


def _trainer(ledger: Ledger, train: str, per_batch: int, rows: int | None) -> None:
    get = ledger.get
    batch = int(get("data.rollout_batch_size"))
    steps_of(ledger, train, batch, per_batch, rows, "trainer.total_epochs", "trainer.max_steps")
    workers = int(get("trainer.nnodes")) * int(get("trainer.n_gpus_per_node"))
    ledger.put("resources.workers", workers, "trainer.nnodes", "trainer.n_gpus_per_node")
    ledger.put("resources.device", "cuda")
    if int(get("trainer.save_freq")) > 0:
        ledger.put("segment.steps", int(get("trainer.save_freq")) * per_batch, "trainer.save_freq")
    else:
        ledger.listed("trainer.save_freq", text="each segment ends in a checkpoint: segment.steps")
        ledger.put("segment.steps", 5 * per_batch)
    if int(get("trainer.save_limit")) > 0:
        ledger.put("segment.keep_checkpoints", int(get("trainer.save_limit")), "trainer.save_limit")
    else:
        ledger.listed("trainer.save_limit", text="the latest segment.keep_checkpoints are kept; keep_every keeps more")
    ledger.same("trainer.experiment_name", text="the experiment's name")
    ledger.listed("trainer.project_name", text="MLflow's experiment has the experiment's name")
    ledger.listed("trainer.logger", text="MLflow always; RLFLOW_TRACKERS=tensorboard,wandb,swanlab for others")
    ledger.same_if("trainer.critic_warmup", 0, otherwise="there is no critic")
    ledger.listed("trainer.val_freq", text="evaluated before and after; the deployment evaluate-latest does the rest")
    ledger.same_if("trainer.val_before_train", True, otherwise="evaluation comes first, always")
    ledger.same_if("trainer.val_only", False, otherwise="rlflow evaluate RUN")
    ledger.same("trainer.val_generations_to_log", text="completions of every batch are kept and shown")
    ledger.same_if("trainer.save_model_only", False, otherwise="a checkpoint holds all that a resume needs")
    ledger.same_if("trainer.find_last_checkpoint", True, otherwise="a run goes on from its newest whole checkpoint")
    ledger.same_if("trainer.save_checkpoint_path", None, otherwise="RLFLOW_DATA_DIR; a run has its folder there")
    ledger.same_if("trainer.load_checkpoint_path", None, otherwise="--run-id continues a run")
    ledger.same_if("trainer.ray_timeline", None, otherwise="touch profile_step in the run's folder for a trace")
