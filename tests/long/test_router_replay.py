"""The experts that the engine records are those that transformers chooses, and with them trainer and sampler agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rlcore.config import build_experiment
from tests.checking import make_model
from tests.integration.engine_bench import Bench, measured
from tests.integration.tiny_run import ALONE, CORRECTED, PARTIAL, experiment, numbers, prepared, run

STEPS = ((1, 0), (4, 0), (16, 3))  # scheduler steps per call, and steps queued ahead
CLEAR = 1e-4  # a router's last chosen expert leads the next one by at least as much probability, or nothing is compared


def recorded(model: Path) -> dict[str, Any]:
    """Six prompts with four samples each, of which the cache cannot hold all at once."""
    from rlcore.sampler.decoding import decode
    from rlcore.sampler.engine import Engine, sampling_params
    from rlcore.sampler.routes import RouteRecorder
    from rlcore.sampler.start import set_engine_environment

    set_engine_environment("cpu")
    computed = [0]
    record = RouteRecorder._record

    def counted(self: RouteRecorder, layer: int, experts: torch.Tensor) -> None:
        computed[0] += len(experts) if layer == 0 else 0
        record(self, layer, experts)

    RouteRecorder._record = counted  # type: ignore[method-assign]
    sizes = {"max_completion_tokens": 40, "max_sequences": 24, "kv_cache_mib": 1, "replay_routes": True}
    config = build_experiment({"name": "toy", "seed": 0, "data": {"max_prompt_tokens": 400}, "rollout": sizes})
    engine = Engine(model, config, "cpu", join_world=False)
    scheduler = engine.core.scheduler
    preempted, preempt = [0], scheduler._preempt_request

    def counted_preempt(*arguments: Any, **named: Any) -> Any:
        preempted[0] += 1
        return preempt(*arguments, **named)

    scheduler._preempt_request = counted_preempt
    random = np.random.default_rng(0)
    start = random.integers(5, 40, 140).tolist()  # more than a block
    prompts = [
        {"prompt_token_ids": start + random.integers(5, 40, size).tolist()} for size in (1, 30, 116, 117, 118, 9)
    ]
    base = {"n": 4, "temperature": 0.9, "max_tokens": 40, "logprobs": 0, "detokenize": False}
    params = [sampling_params(**base, seed=100 * i) for i in range(len(prompts))]
    found = []
    for steps, ahead in STEPS:
        before = computed[0]
        named = engine.enqueue(prompts, params, None)
        ended = decode(engine.core, steps, ahead, engine.read_routes)
        done = {one.request_id: one for some in ended for one in some}
        engine.forget_outputs()
        sequences = [
            ([*prompt["prompt_token_ids"], *done[name].token_ids.tolist()], done[name].routes)
            for prompt, names in zip(prompts, named, strict=True)
            for name in names
        ]
        found.append({"sequences": sequences, "computed": computed[0] - before})
    return {"runs": found, "preempted": preempted[0]}


def choices(model: Any, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """transformers' own experts [L - 1, E, k] for one sequence, sorted, and how clear each choice is [L - 1, E]."""
    routers = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    seen: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, out: seen.append(out[0].softmax(-1))) for router in routers]
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens[:-1]]))
    for hook in hooks:
        hook.remove()
    probabilities, experts = torch.stack(seen, 1).sort(-1, descending=True)
    k = routers[0].top_k
    margin = probabilities[..., k - 1] - probabilities[..., k]
    return experts[..., :k].sort(-1).values.numpy(), margin.numpy()


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_moe, a layer without experts"])
def test_the_engine_records_the_experts_that_transformers_chooses(tmp_path: Path, kind: str) -> None:
    from rlcore.models.loading import load_hf_model

    folder = make_model(tmp_path / "model", kind)
    result = measured(recorded, folder)
    model = load_hf_model(folder, torch.float32, attn_implementation="eager", experts_implementation="eager")
    assert result["preempted"] > 0
    compared = total = 0
    for found in result["runs"]:
        assert found["computed"] < sum(
            len(tokens) - 1 for tokens, _ in found["sequences"]
        )  # the prefix cache has the rest
        for tokens, routes in found["sequences"]:
            expected, margin = choices(model, tokens)
            assert routes.dtype == np.uint8
            assert routes.shape == expected.shape
            clear = margin > CLEAR
            np.testing.assert_array_equal(np.sort(routes, -1)[clear], expected[clear])
            compared, total = compared + int(clear.sum()), total + clear.size
    assert compared > 0.99 * total


def apart(folder: Path, dtype: str) -> dict[str, Any]:
    """The distance between trainer (float32) and engine, with and without replay, and how many choices differ."""
    from rlcore.models import replay
    from rlcore.rollout.groups import in_order, to_sample
    from tests.sampling import sample_requests

    bench = Bench(folder, None, dtype=dtype, replay_routes=True)
    bench.sampler.load_weights(bench.policy.full_weights(), 0)
    groups = in_order(bench.sampler.generate(sample_requests(bench.problems, 16, seed=0, batch="0")))
    samples = [
        to_sample(p, g.prompt_token_ids, c) for p, g in zip(bench.problems, groups, strict=True) for c in g.completions
    ]

    def distances(of: list[Any]) -> np.ndarray:
        found = bench.policy.logprobs([of])[0]
        deltas = [np.abs(f.logprobs - s.sampler_logprobs)[s.loss_mask] for f, s in zip(found, of, strict=True)]
        return np.concatenate(deltas)

    replayed = distances(samples)
    differ = torch.stack(replay._DIFFERING).float().mean().item()
    free = distances([replace(sample, routes=None) for sample in samples])
    result = {"tokens": len(free), "differ": differ, "max": float(replayed.max()), "mean": float(replayed.mean())}
    return result | {"max without": float(free.max()), "mean without": float(free.mean())}


def in_float32(folder: Path) -> dict[str, Any]:
    return apart(folder, "float32")


def in_bfloat16(folder: Path) -> dict[str, Any]:
    return apart(folder, "bfloat16")


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_vl_moe"])
def test_in_float32_trainer_and_sampler_choose_the_same(tmp_path: Path, kind: str) -> None:
    result = measured(in_float32, make_model(tmp_path / "model", kind))
    assert result["differ"] < 1e-3  # of all tokens, those of pictures as well
    assert result["max"] < 1e-4


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_vl_moe"])
def test_with_replay_a_sampler_in_bfloat16_is_nearer(tmp_path: Path, kind: str) -> None:
    result = measured(in_bfloat16, make_model(tmp_path / "model", kind))
    assert result["differ"] > 1e-3
    assert result["mean"] < 0.8 * result["mean without"]
    assert result["max"] < result["max without"]


def test_a_cut_run_equals_the_whole(experts_model: Path, tmp_path: Path) -> None:
    """Groups wait in the checkpoint with their routes: begun by an older policy, or sampled ahead."""
    replayed = {"rollout.replay_routes": True, "rollout.dtype": "bfloat16", "algorithm.recompute_old_logprobs": True}
    config = experiment(**ALONE, **PARTIAL, **CORRECTED | replayed)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(experts_model)})})
    (tmp_path / "data").mkdir()
    options: dict[str, Any] = {"model": experts_model, "dataset": prepared(tmp_path / "data", config, None)}
    whole = run(tmp_path / "whole", config=config, until=4, cut=2, **options)
    rest = run(tmp_path / "rest", config=config, until=4, resume=tmp_path / "whole" / "cut", **options)
    assert rest["weights"] == whole["weights"]
    assert numbers(tmp_path / "rest") == numbers(tmp_path / "whole")[2:]
    for metrics in numbers(tmp_path / "whole"):
        assert 0 < metrics["rollout/routes_differ"] < 0.2
        assert metrics["loss/ratio_max"] == 1  # old log-probs have the same experts
    groups = pq.read_table(tmp_path / "whole" / "cut" / "groups.parquet").to_pylist()
    begun = [(group, c) for group in groups for c in group["completions"] if c["turns"][0]["token_ids"]]
    assert begun
    for group, completion in begun:
        length = len(group["prompt_token_ids"]) + len(completion["turns"][0]["token_ids"])
        assert completion["routes"]["shape"] == [length - 1, 3, 2]
