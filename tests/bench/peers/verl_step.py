"""Whole GRPO steps of verl 0.9.1 on the GPUs of one host, with the model, prompts and pictures of ``tests.bench.step``.

``python -m tests.bench.peers.verl_step --kind text [--counted 6] [--tiny] --folder FOLDER --out FILE`` makes what
``tests.bench.step`` makes in FOLDER, writes a parquet file of it, and runs ``verl.trainer.main_ppo`` in a process of
its own, in verl's best setting for one GPU (README.md in this folder says which, and why). Both regimes follow each
other in one run: ``fixed`` (no completion ends before the cap), then ``ragged`` (a bias on the end of the turn).

Seconds are verl's own metrics (``timing_s/*``). Token counts come from the rollouts' lengths; ``update_mfu`` is
``cases.trl_flops`` over them by ``timing_s/update_actor`` and 989 TFLOP/s a GPU, as for the other sides; ``verl_mfu``
is verl's own figure. Tokens per second are those of all GPUs together. If verl still runs ``--max-seconds`` after this
script started, the script ends verl's processes and writes the steps until then to ``--out``.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.bench.cases import (
    Case,
    build_model,
    common_arguments,
    end_bias,
    random_case,
    shape_of,
    trl_flops,
    write,
)
from tests.bench.step import PEAK, regimes_of

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
PACKAGES = ("verl", "torch", "transformers", "vllm", "ray", "tensordict", "TransferQueue", "triton", "liger-kernel")
PR_SET_CHILD_SUBREAPER = 36
# Tokens of a microbatch that fit into 139 GiB with all activations kept, next to a sampler that keeps its memory (text)
# or sleeps (pictures).
TOKENS = {"text": 12_288, "vl": 5_120}
SLEEPS = {"text": False, "vl": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("text", "vl"), default="text")
    parser.add_argument("--regimes", choices=("fixed", "ragged", "fixed,ragged"), default="fixed,ragged")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=2, help="uncounted steps of the first regime, one of the next")
    parser.add_argument("--counted", type=int, default=6)
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, help="default: 256, or 431 with a picture")
    parser.add_argument("--cap", type=int, help="default: 1024, or 512 with pictures")
    parser.add_argument("--side-pixels", type=int, default=512, help="width and height of the pictures")
    parser.add_argument("--eos-bias", type=float, help="of the ragged regime; default: computed")
    parser.add_argument("--tokens", type=int, help="of a microbatch; default: 12,288, or 5,120 with pictures")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in the backward pass")
    parser.add_argument("--fused", choices=("triton", "torch", "liger", "none"), default="triton", help="LM head")
    parser.add_argument("--liger", action="store_true", help="Liger's norms, rotations and SwiGLU")
    parser.add_argument("--vllm-memory", type=float, help="share of the device; default: 0.25, asleep 0.4")
    parser.add_argument("--sleep", action=argparse.BooleanOptionalAction, help="default: with pictures")
    parser.add_argument("--old-logprobs", action="store_true", help="a pass for old log-probs, truncated weights")
    parser.add_argument("--attention", default="flash_attention_2")
    parser.add_argument("--workers", type=int, help="agent and reward processes of each kind; default: 8, tiny 1")
    parser.add_argument("--max-seconds", type=float, default=540)
    common_arguments(parser, "/tmp/step-bench")
    arguments = parser.parse_args()
    shape = shape_of(arguments.kind, arguments.tiny)
    if arguments.tiny:
        arguments.problems, arguments.group, arguments.side_pixels = 2, 4, shape.side
    arguments.prompt_tokens = arguments.prompt_tokens or shape.prompt
    arguments.cap = arguments.cap or shape.cap
    arguments.tokens = arguments.tokens or TOKENS[arguments.kind]
    arguments.sleep = SLEEPS[arguments.kind] if arguments.sleep is None else arguments.sleep
    arguments.vllm_memory = arguments.vllm_memory or (0.4 if arguments.sleep else 0.25)
    arguments.workers = arguments.workers or (1 if arguments.tiny else 8)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    bench(arguments)


def bench(arguments: argparse.Namespace) -> None:
    started = time.perf_counter()
    plan = plan_of(arguments)
    case = random_case(
        arguments.kind,
        arguments.folder,
        problems=arguments.problems * len(plan),
        prompt_tokens=arguments.prompt_tokens,
        side=arguments.side_pixels,
        tiny=arguments.tiny,
    )
    work = arguments.folder / f"verl-{arguments.kind}"
    work.mkdir(parents=True, exist_ok=True)
    metrics, lengths = work / "metrics.jsonl", work / "lengths.jsonl"
    for old in (metrics, lengths):
        old.unlink(missing_ok=True)
    model, flops = counter(arguments)
    bias = arguments.eos_bias
    if bias is None:  # logits of a random model have the variance width x 0.02^2, so a mean one is below 1 / size
        bias = end_bias(arguments.cap // 2, arguments.cap, case) + 2e-4 * model.config.get_text_config().hidden_size
    fixed = sum(regime == "fixed" for regime, _ in plan)
    write_agent(work / "agent.yaml", fixed, case.end_of_turn, bias)
    write_data(work / "train.parquet", case)
    overrides = [*settings(arguments, case, work, len(plan)), *arguments.set]
    code = run(overrides, work, metrics, lengths, started + arguments.max_seconds - time.perf_counter())
    rows = list(rows_of(metrics, lengths, plan, flops, arguments.gpus)) if metrics.exists() else []
    result = {
        "side": "verl",
        "exit": code,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": dict(versions()),
        "device": device(),
        "eos_bias": bias,
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()},
        "overrides": [text.replace(f"{REPOSITORY}/", "") for text in overrides],
        "regimes": {name: sides["ours"] for name, sides in regimes_of({"ours": [{"steps": rows}]}).items()},
        "steps": rows,
        "log": str(work / "log.txt"),
    }
    write(arguments.out, result)
    if code != 0:
        sys.stderr.write("".join((work / "log.txt").read_text(errors="replace").splitlines(keepends=True)[-60:]))
        sys.exit(1)


def plan_of(arguments: argparse.Namespace) -> list[tuple[str, bool]]:
    """Of each step the regime, and whether it counts."""
    plan: list[tuple[str, bool]] = []
    for index, regime in enumerate(arguments.regimes.split(",")):
        warmup = arguments.warmup if index == 0 else min(1, arguments.warmup)
        plan += [(regime, False)] * warmup + [(regime, True)] * arguments.counted
    return plan


# ---- what verl gets ------------------------------------------------------------------------------------------------


def write_agent(path: Path, fixed_steps: int, end: int, bias: float) -> None:
    agent = {"name": "bench", "_target_": "tests.bench.peers.verl_agent.BenchAgentLoop"}
    path.write_text(json.dumps([{**agent, "fixed_steps": fixed_steps, "end": end, "bias": bias}]))  # YAML too


def write_data(path: Path, case: Case) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "data_source": problem.source,
            "prompt": [{"role": "user", "content": problem.question}],
            "images": [str(case.dataset / "images" / f"{image.sha256}.png") for image in problem.images],
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": index},
            "agent_name": "bench",
        }
        for index, problem in enumerate(case.problems)
    ]
    if not case.problems[0].images:
        for row in rows:
            del row["images"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def settings(arguments: argparse.Namespace, case: Case, work: Path, steps: int) -> list[str]:
    """verl's options, all of them public."""
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    length = arguments.prompt_tokens + arguments.cap
    tokens = max(arguments.tokens, length)
    data = work / "train.parquet"
    options: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": not arguments.old_logprobs,
        "algorithm.rollout_correction.rollout_is": "token" if arguments.old_logprobs else "null",
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": arguments.problems,
        "data.max_prompt_length": arguments.prompt_tokens,
        "data.max_response_length": arguments.cap,
        "data.shuffle": False,
        "data.filter_overlong_prompts": False,
        "data.dataloader_num_workers": 0,
        f"{model}.path": case.model,
        f"{model}.external_lib": "tests.bench.peers.verl_patches",
        f"+{model}.override_config.attn_implementation": arguments.attention,
        f"{model}.use_remove_padding": True,
        f"{model}.use_fused_kernels": arguments.fused != "none",
        f"{model}.fused_kernel_options.impl_backend": "torch" if arguments.fused == "none" else arguments.fused,
        f"{model}.use_liger": arguments.liger,
        f"{model}.enable_gradient_checkpointing": arguments.checkpointing,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.reshard_after_forward": False,
        f"{actor}.optim.lr": 1e-6,
        f"{actor}.optim.weight_decay": 0.0,
        f"+{actor}.optim.override_optimizer_config.fused": True,
        f"{actor}.ppo_mini_batch_size": arguments.problems,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": tokens,
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        f"{actor}.clip_ratio_low": 0.2,
        f"{actor}.clip_ratio_high": 0.28,
        f"{actor}.loss_agg_mode": "token-mean",
        f"{rollout}.name": "vllm",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.n": arguments.group,
        f"{rollout}.temperature": 1.0,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.gpu_memory_utilization": arguments.vllm_memory,
        f"{rollout}.enforce_eager": False,
        f"{rollout}.free_cache_engine": arguments.sleep,
        f"+{rollout}.enable_sleep_mode": arguments.sleep,
        f"{rollout}.max_model_len": length + 16,
        f"{rollout}.max_num_seqs": arguments.problems * arguments.group // arguments.gpus,
        f"{rollout}.max_num_batched_tokens": max(16_384, length + 16),
        f"{rollout}.log_prob_max_token_len_per_gpu": tokens,
        f"{rollout}.agent.num_workers": arguments.workers,
        f"{rollout}.agent.default_agent_loop": "bench",
        f"{rollout}.agent.agent_loop_config_path": work / "agent.yaml",
        "reward.num_workers": arguments.workers,
        "reward.custom_reward_function.path": HERE / "verl_agent.py",
        "reward.custom_reward_function.name": "compute_score",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": arguments.workers,
        "trainer.logger": "[console,file]",
        "trainer.n_gpus_per_node": arguments.gpus,
        "trainer.nnodes": 1,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": work / "checkpoints",
        "ray_kwargs.ray_init.num_cpus": 64,  # so many processes wait for each other; Ray's count is only a label
        "+ray_kwargs.ray_init.include_dashboard": False,
        "hydra.run.dir": work / "hydra",
        "hydra.output_subdir": "null",
    }
    if arguments.kind == "vl":
        options |= {f"+{rollout}.limit_images": 1, f"+{rollout}.engine_kwargs.vllm.skip_mm_profiling": True}
        # verl's default, "dummy", also replaces the values with which vLLM 0.32 normalises pictures
        options[f"{rollout}.load_format"] = "safetensors"
    return [f"{key}={value}" for key, value in options.items()]


# ---- the run -------------------------------------------------------------------------------------------------------


def run(overrides: Sequence[str], work: Path, metrics: Path, lengths: Path, seconds: float) -> int:
    """The exit status of verl's process; 124: out of time. Ends every process that it leaves."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "VERL_BENCH_LENGTHS": str(lengths),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0"),
        "HYDRA_FULL_ERROR": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become ours
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    with (work / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=work, env=environment, stdout=log, stderr=log)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            end_descendants()


def end_descendants() -> None:
    """Terminate, then kill; again for those that come to us when their parents end."""
    import psutil

    for _ in range(10):
        left = psutil.Process().children(recursive=True)
        if not left:
            return
        for process in left:
            try:
                process.terminate()
            except psutil.NoSuchProcess:
                continue
        for process in psutil.wait_procs(left, timeout=3)[1]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=3)


# ---- what it measured ----------------------------------------------------------------------------------------------


def counter(arguments: argparse.Namespace) -> tuple[Any, Any]:
    import torch

    model = build_model(arguments.kind, arguments.tiny, torch.device("meta"), torch.bfloat16)
    return model, trl_flops(model, arguments.side_pixels // 28 * 28)


def rows_of(
    metrics: Path, lengths: Path, plan: Sequence[tuple[str, bool]], flops: Any, gpus: int
) -> Iterator[dict[str, Any]]:
    rollouts = [json.loads(line) for line in lengths.read_text().splitlines()]
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        step, data = record["step"], record["data"]
        if not 1 <= step <= len(plan) or "timing_s/step" not in data:
            continue
        pairs = [(prompt, answer) for at, prompt, answer in rollouts if at == step]
        yield row_of(step, plan[step - 1], data, pairs, flops, gpus)


def row_of(
    step: int,
    planned: tuple[str, bool],
    data: Mapping[str, Any],
    pairs: Sequence[tuple[int, int]],
    flops: Any,
    gpus: int,
) -> dict[str, Any]:
    tokens = {
        "rollouts": len(pairs),
        "prompt": sum(prompt for prompt, _ in pairs),
        "completion": sum(answer for _, answer in pairs),
        "sum_sq": sum((prompt + answer) ** 2 for prompt, answer in pairs),
    }
    seconds = {key.removeprefix("timing_s/"): value for key, value in data.items() if key.startswith("timing_s/")}
    real, whole, update = tokens["prompt"] + tokens["completion"], seconds.pop("step"), seconds["update_actor"]
    row = {"step": step, "regime": planned[0], "counted": planned[1], "seconds": whole, **seconds, **tokens}
    row |= {
        "tokens_per_s": real / whole,
        "generate_tokens_per_s": tokens["completion"] / seconds["gen"],
        "update_tokens_per_s": real / update,
        "update_mfu": flops(tokens) / update / PEAK / gpus,
        "verl_mfu": data.get("perf/mfu/actor", 0.0),
        "verl_total_tokens": data.get("perf/total_num_tokens", 0),
        "peak_memory_gib": data.get("actor/perf/max_memory_allocated_gb", 0.0),
        "reserved_memory_gib": data.get("actor/perf/max_memory_reserved_gb", 0.0),
        "grad_norm": data.get("actor/grad_norm", 0.0),
        "ppo_kl": data.get("actor/ppo_kl", 0.0),
        "mean_length": tokens["completion"] / max(1, len(pairs)),
    }
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}


def versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
