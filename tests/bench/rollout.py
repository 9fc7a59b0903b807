"""How fast the sampler samples, takes weights, sleeps and wakes.

``python -m tests.bench.rollout [--kind vl] [--tiny] [--out FILE]`` samples ``--problems`` x ``--group`` completions of
``--cap`` tokens each (none ends before), once by vLLM's own loop and with each of ``--steps-per-call``; then it times
weight syncs from a second copy of the model, and sleep and wake. Prints JSON: tokens/s and seconds, and where the time
between tokens goes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.bench.cases import common_arguments, experiment, random_case, shape_of, write


@contextmanager
def timed(into: dict[str, float], places: dict[str, tuple[Any, str]]) -> Iterator[None]:
    """Adds up the seconds inside each ``owner.method`` while the block runs."""

    def wrapped(label: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                into[label] += time.perf_counter() - start

        return call

    for label, (owner, method) in places.items():
        setattr(owner, method, wrapped(label, getattr(owner, method)))
    try:
        yield
    finally:
        for owner, method in places.values():
            delattr(owner, method)  # the wrapper on the object; the class has its own


def median_seconds(work: Callable[[], object], times: int, settle: Callable[[], None]) -> dict[str, float]:
    seconds = []
    for _ in range(times):
        settle()
        start = time.perf_counter()
        work()
        settle()
        seconds.append(time.perf_counter() - start)
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "times": times}


def kernels(work: Callable[[], object], most: int = 30) -> list[dict[str, Any]]:
    """The kernels that took most of the device's time, with their milliseconds and calls."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    events = sorted(profiler.key_averages(), key=lambda e: e.self_device_time_total, reverse=True)
    return [{"name": e.key[:120], "ms": e.self_device_time_total / 1e3, "calls": e.count} for e in events[:most]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("text", "vl", "text-7b"), default="text")
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, help="default: 256, or 431 with a picture")
    parser.add_argument("--cap", type=int, default=512)
    parser.add_argument("--steps-per-call", default="1,16,32,64", help="values of rollout.scheduler_steps_per_call")
    parser.add_argument("--own-loop-only", action="store_true", help="leave vLLM's own loop out")
    parser.add_argument("--profile", action="store_true", help="tell which kernels take the time")
    common_arguments(parser, "/tmp/rollout-bench")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.problems, arguments.group, arguments.cap = 4, 2, 12
    measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    import torch

    from rlcore.sampler.engine import Engine, engine_prompt, sampling_params
    from rlcore.sampler.start import set_engine_environment

    device = "cuda" if torch.cuda.is_available() else "cpu"
    set_engine_environment(device)
    from rlcore.data.pixels import ImageStore
    from rlcore.data.processor import load_processor
    from rlcore.data.prompts import PromptBuilder
    from rlcore.models.loading import load_hf_model
    from rlcore.rollout.groups import in_order
    from rlcore.sampler.vllm_sampler import VllmSampler
    from tests.sampling import sample_requests

    arguments.folder.mkdir(parents=True, exist_ok=True)
    shape = shape_of(arguments.kind, arguments.tiny)
    arguments.prompt_tokens = arguments.prompt_tokens or shape.prompt
    case = random_case(
        arguments.kind,
        arguments.folder,
        problems=arguments.problems,
        prompt_tokens=arguments.prompt_tokens,
        side=shape.side,
        tiny=arguments.tiny,
    )
    caps = [f"rollout.group_size={arguments.group}", f"rollout.max_completion_tokens={arguments.cap}"]
    config = experiment(case, [*caps, "rollout.sleep=always", *arguments.set])
    prompts = PromptBuilder(load_processor(config.model), config.data)
    started = time.perf_counter()
    images = ImageStore(case.dataset)
    engine = Engine(case.model, config, device, join_world=False)
    sampler = VllmSampler(engine, prompts=prompts, images=images)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    settings = {key: value for key, value in vars(arguments).items() if not isinstance(value, Path)}
    result |= {"settings": settings, "start": time.perf_counter() - started}
    sampler._params["ignore_eos"] = True  # a fixed amount of work; no experiment has a setting for it
    sampler.keep_loaded_weights(0)
    core = engine.core
    places = {
        "schedule": (core.scheduler, "schedule"),
        "update": (core.scheduler, "update_from_output"),
        "execute": (core.model_executor, "execute_model"),
        "sample": (core.model_executor, "sample_tokens"),
    }

    def sample(steps_per_call: int, seed: int) -> dict[str, Any]:
        sampler._tokens_per_call = steps_per_call
        sampler._queued_ahead = min(4, steps_per_call // 2) if device == "cuda" else 0
        engine.llm.reset_prefix_cache()
        inside: defaultdict[str, float] = defaultdict(float)
        requests = sample_requests(case.problems, arguments.group, seed=seed, batch="0")
        start = time.perf_counter()
        with timed(inside, places):
            groups = in_order(sampler.generate(requests))
        seconds = time.perf_counter() - start
        tokens = sum(len(c.token_ids) for g in groups for c in g.completions)
        logprob = sum(float(c.logprobs.sum()) for g in groups for c in g.completions) / tokens
        row = {"steps_per_call": steps_per_call, "seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}
        return row | {"inside": dict(inside), "mean_logprob": logprob, "crc": _crc(groups)}

    def own_loop() -> dict[str, Any]:
        engine.llm.reset_prefix_cache()
        requests = sample_requests(case.problems, arguments.group, seed=1, batch="0")
        params = [sampling_params(n=r.count, seed=r.seed, flat_logprobs=True, **sampler._params) for r in requests]
        made = [
            engine_prompt(
                prompts.unexpanded_tokens(r.problem.question, len(r.problem.images)).tolist(), r.problem.images, images
            )
            for r in requests
        ]
        start = time.perf_counter()
        outputs = engine.llm.generate(made, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(c.token_ids) for o in outputs for c in o.outputs)
        return {"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}

    sample(32, 0)  # kernels that compile on first use
    result["by_steps_per_call"] = [sample(int(steps), 1) for steps in arguments.steps_per_call.split(",")]
    core.scheduler.num_lookahead_tokens = 0
    result["vllm_own_loop"] = None if arguments.own_loop_only else own_loop()
    if arguments.profile and device == "cuda":
        sampler._params["max_tokens"] = 64
        result["profile"] = kernels(lambda: sample(32, 2))
        sampler._params["max_tokens"] = arguments.cap
    write(arguments.out, result)

    settle = torch.cuda.synchronize if device == "cuda" else lambda: None
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weights = load_hf_model(case.model, dtype).to(device).state_dict()
    versions = iter(range(1, 1000))
    sampler.load_weights(weights.items(), 0)
    result["sync"] = median_seconds(lambda: sampler.load_weights(weights.items(), next(versions)), 8, settle)
    result["sync_tensors"] = len(weights)
    if arguments.profile and device == "cuda":
        inside: defaultdict[str, float] = defaultdict(float)
        with timed(inside, {"load": (sampler._loader, "load"), "caches": (engine.llm, "reset_prefix_cache")}):
            sampler.load_weights(weights.items(), next(versions))
        result["sync_inside"] = dict(inside)
    if device == "cuda":
        memory, slept, woken = sampler.memory, [], []
        for _ in range(4):
            slept.append(median_seconds(memory.sleep, 1, settle)["median"])
            woken.append(median_seconds(lambda: (memory.wake_weights(), memory.wake_cache()), 1, settle)["median"])
        result["sleep"], result["wake"] = slept, woken
        sampler.load_weights(weights.items(), next(versions))
        result["after_waking"] = sample(32, 1)
    write(arguments.out, result)


def _crc(groups: Any) -> int:
    """Of all sampled tokens, to see whether two ways sample the same."""
    import zlib

    value = 0
    for group in groups:
        for completion in group.completions:
            value = zlib.crc32(completion.token_ids.tobytes(), value)
    return value


if __name__ == "__main__":
    main()
