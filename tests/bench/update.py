"""How fast the update of one optimizer step is: ``python -m tests.bench.update`` prints one JSON object.

A random-init model of a real shape (text: Qwen2.5-1.5B, vl: Qwen2.5-VL-3B with its tower trained) takes one AdamW step
on groups of eight completions, everything at the cap (fixed) or with lengths of a geometric distribution cut at the
cap (ragged). Each variant adds one thing to the one before it; ``plain`` is the packed path without any of them, with a
prompt of its own for every sequence. Seconds are those of the whole update, packing, clipping and optimizer included,
between device synchronisations; medians over ``--repeats`` after one warm-up.

MFU counts what a microbatch needs computed (``rlcore.flops``): a shared prompt once, the head on trained
tokens, no recomputation. ``tokens_per_second`` counts every sequence whole, so that variants can be compared by it.

Under ``torchrun`` all ranks compute each row together (``training.sequence_parallel``), ``--budget`` tokens on each.

    python -m tests.bench.update --model text --lengths fixed ragged --variants plain shared --out update.json
    python -m tests.bench.update --tiny
    torchrun --nproc-per-node 2 -m tests.bench.update --variants kept
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rlcore.algorithms.loss import StepTotals
from rlcore.batch import ImageFeatures, prompt_key
from rlcore.config import ExperimentConfig, build_experiment
from rlcore.distributed.group import SequenceSize, microbatch_work, plan_microbatches
from rlcore.flops import NOTHING, utilisation
from rlcore.models.dtypes import weights_dtype
from rlcore.models.torch_policy import TorchPolicy
from rlcore.types import ImageRef, TrainingSample
from tests.bench.cases import SHAPES, Shape, build_model, shape_of, stop_chance, vision_tokens
from tests.bench.newer import NEWER, TINY_NEWER, build_newer
from tests.numerics.toy import emptied

GROUP = 8
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
MEAN_OF_CAP = 0.535  # ragged: mean completion length over the cap


@dataclass(frozen=True, slots=True)
class Variant:
    shared: bool = True
    checkpointing: str = "full"
    compiled: bool = False
    reshard: str = "auto"
    offload: bool = False
    frozen: bool = False  # the vision tower
    optimizer: str = "adamw"


VARIANTS: Mapping[str, Variant] = {
    "plain": Variant(shared=False, reshard="on"),
    "shared": Variant(),
    "compiled": Variant(compiled=True),
    "selective": Variant(checkpointing="selective", compiled=True),
    "kept": Variant(checkpointing="none", compiled=True),
    "kept_eager": Variant(checkpointing="none"),
    "offload": Variant(compiled=True, offload=True),
    "selective_bf16": Variant(checkpointing="selective", compiled=True, optimizer="adamw_bf16"),
    "eager_bf16": Variant(checkpointing="selective", optimizer="adamw_bf16"),
    "kept_bf16": Variant(checkpointing="none", compiled=True, reshard="on", optimizer="adamw_bf16"),
    "frozen": Variant(checkpointing="none", compiled=True, frozen=True),
}


def make_samples(
    shape: Shape, problems: int, lengths: str, shared: bool, seed: int = 0, tiny: bool = False
) -> list[TrainingSample]:
    """Groups of eight; without ``shared`` each sequence begins with words of its own, behind the group's image."""
    random = np.random.default_rng(seed)
    stop = stop_chance(MEAN_OF_CAP * shape.cap, shape.cap)
    start, end, image_token, _ = vision_tokens(tiny)
    words_known = 450 if tiny else 150_000
    found = []
    for problem in range(problems):
        image = ImageRef(f"{problem}", shape.side, shape.side) if shape.side else None
        tokens = (shape.side // (2 * shape.patch)) ** 2
        vision = [start, *[image_token] * tokens, end] if image else []
        words = random.integers(0, words_known, shape.prompt - len(vision))
        for member in range(GROUP):
            own = words.copy()
            own[0] = words[0] if shared else (words[0] + member) % words_known
            prompt = np.array([own[0], *vision, *own[1:]], np.int32)
            count = shape.cap if lengths == "fixed" else min(shape.cap, int(random.geometric(stop)))
            mask = np.arange(shape.prompt + count) >= shape.prompt
            found.append(
                TrainingSample(
                    token_ids=np.concatenate([prompt, random.integers(0, words_known, count).astype(np.int32)]),
                    loss_mask=mask,
                    sampler_logprobs=np.where(mask, -12.0, 0.0).astype(np.float32),
                    images=(image,) if image else (),
                    policy_version=0,
                    advantages=np.where(mask, random.normal(), 0.0).astype(np.float32),
                )
            )
    return found


def settings(shape: Shape, variant: Variant, budget: int) -> ExperimentConfig:
    return build_experiment(
        {
            "name": "update",
            "model": {"gradient_checkpointing": variant.checkpointing, "freeze_vision_tower": variant.frozen},
            "resources": {"workers": WORLD},
            "data": {"max_prompt_tokens": shape.prompt},
            "rollout": {"group_size": GROUP, "max_completion_tokens": shape.cap},
            "algorithm": {"aggregation": "token_mean", "kl": {"coefficient": 0.0}},
            "training": {
                "tokens_per_microbatch": budget,
                "optimizer": variant.optimizer,
                "compile_blocks": "on" if variant.compiled else "off",
                "reshard_after_forward": variant.reshard,
                "offload": variant.offload,
                "sequence_parallel": WORLD,
            },
        }
    )


def measure(
    kind: str,
    variant: Variant,
    regimes: list[str],
    *,
    tiny: bool,
    budget: int,
    problems: int,
    repeats: int,
    profile: Path | None,
) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu")
    newer = kind in NEWER
    shape = (TINY_NEWER if tiny else NEWER)[kind] if newer else shape_of(kind, tiny)
    start = time.perf_counter()
    # compiling takes minutes on a CPU, and a tiny run measures nothing
    config = settings(shape, replace(variant, compiled=False) if tiny else variant, budget)
    hf = (build_newer if newer else build_model)(kind, tiny, device, weights_dtype(config, device.type))
    policy = TorchPolicy(
        hf,
        config,
        weights=emptied(hf),
        mesh=init_device_mesh(device.type, (WORLD,)),
        banned_token_ids=vision_tokens(tiny),
        features=_features(shape),
    )
    found: dict[str, Any] = {"built_seconds": time.perf_counter() - start}
    for lengths in regimes:
        samples = make_samples(shape, problems, lengths, variant.shared, tiny=tiny)
        found[lengths] = _measure(policy, samples, budget, repeats, profile if lengths == regimes[0] else None)
    return found


def _features(shape: Shape) -> Callable[[ImageRef], ImageFeatures]:
    side = shape.side // shape.patch
    pixels = torch.randn(side * side, 3 * 2 * shape.patch**2, generator=torch.Generator().manual_seed(0))
    return lambda image: ImageFeatures(pixels, (1, side, side))


def _measure(
    policy: TorchPolicy, samples: list[TrainingSample], budget: int, repeats: int, profile: Path | None
) -> dict[str, Any]:
    plan = plan_microbatches(
        [SequenceSize(s.num_prompt, s.num_tokens - s.num_prompt) for s in samples],
        [prompt_key(s) for s in samples],
        num_ranks=1,
        token_budget=budget * WORLD,
        attention_weight=policy.model_shape().attention_weight,
    )
    microbatches = [[samples[i] for i in micro] for micro in plan[0]]
    work = sum((microbatch_work(policy.model_shape(), micro) for micro in microbatches), NOTHING)
    totals = StepTotals(tokens=sum(s.num_trained for s in samples), sequences=len(samples))
    cuda = policy.device.type == "cuda"
    seconds = []
    for _ in range(repeats + 1):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = policy.update(microbatches, totals, 1e-6, 0.0)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if profile is not None:
        with torch.profiler.profile() as kept:
            policy.update(microbatches[:1], totals, 1e-6, 0.0)
            if cuda:
                torch.cuda.synchronize()
        order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        profile.write_text(kept.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=110))
    middle = statistics.median(seconds[1:])
    real = sum(s.num_tokens for s in samples)
    return {
        "seconds": middle,
        "seconds_each": seconds[1:],
        "warm_up_seconds": seconds[0],
        "mfu": utilisation(work.forward_flops + work.backward_flops, middle, WORLD, policy.device_name()),
        "tokens_per_second": real / middle,
        "sequence_tokens": real,
        "computed_tokens": work.tokens,
        "prompt_tokens_shared": work.shared_tokens,
        "mean_completion": float(np.mean([s.num_trained for s in samples])),
        "microbatches": len(microbatches),
        "grad_norm": result.grad_norm,
        "loss": float(result.sums.totals["policy_loss"]),
        "entropy": float(result.sums.means["loss/entropy"]) / totals.tokens,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, *NEWER], nargs="+", default=list(SHAPES))
    parser.add_argument("--lengths", choices=["fixed", "ragged"], nargs="+", default=["fixed", "ragged"])
    parser.add_argument("--variants", choices=list(VARIANTS), nargs="+", default=list(VARIANTS))
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--budget", type=int, default=16_384, help="tokens of a microbatch")
    parser.add_argument("--tiny", action="store_true", help="a plumbing check on the CPU")
    parser.add_argument("--profile", type=Path, help="folder for a table of one microbatch's kernels, by variant")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.problems, args.repeats, args.budget = 2, 1, 256
    on_cpu = args.tiny or not torch.cuda.is_available()
    backend = "gloo" if on_cpu else "nccl"
    if not on_cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if WORLD > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "problems": args.problems,
        "budget": args.budget,
        "ranks": WORLD,
        "results": {},
    }
    for kind in args.model:
        for name in args.variants:
            options = {"tiny": args.tiny, "budget": args.budget, "problems": args.problems, "repeats": args.repeats}
            profile = args.profile / f"{kind}-{name}.txt" if args.profile else None
            try:
                found = measure(kind, VARIANTS[name], args.lengths, profile=profile, **options)
            except torch.OutOfMemoryError as error:
                found = {"out_of_memory": str(error)}
            report["results"].setdefault(kind, {})[name] = {"variant": asdict(VARIANTS[name]), **found}
            sys.stderr.write(json.dumps({kind: {name: found}}) + "\n")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if args.out and dist.get_rank() == 0:
                args.out.write_text(json.dumps(report, indent=1))
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(report) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
