"""The experts that the engine records are those that transformers chooses, and with them trainer and sampler agree."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.config import build_experiment
from tests.checking import make_model
from tests.integration.engine_bench import Bench, measured

STEPS = ((1, 0), (4, 0), (16, 3))  # scheduler steps per call, and steps queued ahead
CLEAR = 1e-4  # a router's last chosen expert leads the next one by at least as much probability, or nothing is compared


def recorded(model: Path) -> dict[str, Any]:
    """Six prompts with four samples each, of which the cache cannot hold all at once."""
    from rlcore.sampler.decoding import decode
    from rlcore.sampler.engine import Engine, sampling_params, set_engine_environment
    from rlcore.sampler.routes import RouteRecorder

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
    prompts = [{"prompt_token_ids": start + random.integers(5, 40, size).tolist()} for size in (1, 30, 116, 117, 118, 9)]
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
    for run in result["runs"]:
        assert run["computed"] < sum(len(tokens) - 1 for tokens, _ in run["sequences"])  # the prefix cache has the rest
        for tokens, routes in run["sequences"]:
            expected, margin = choices(model, tokens)
            assert routes.dtype == np.uint8
            assert routes.shape == expected.shape
            clear = margin > CLEAR
            np.testing.assert_array_equal(np.sort(routes, -1)[clear], expected[clear])
            compared, total = compared + int(clear.sum()), total + clear.size
    assert compared > 0.99 * total
