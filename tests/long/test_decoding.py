"""Decoding several tokens per call of the scheduler samples the same as decoding token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlcore.config import build_experiment
from tests.integration.engine_bench import measured

CALLS = ((1, 0), (4, 0), (4, 3), (16, 2), (100, 12))  # tokens per call, and steps queued ahead


def samples_of(model: Path) -> dict[str, Any]:
    """The samples of 24 requests of 3 samples each, of which 20 run at a time: for each of ``CALLS`` and of vLLM's own
    loop."""
    from rlcore.sampler.decoding import decode
    from rlcore.sampler.engine import Engine, sampling_params
    from rlcore.sampler.start import set_engine_environment

    set_engine_environment("cpu")
    sizes = {"max_completion_tokens": 30, "max_sequences": 20, "kv_cache_mib": 8}
    config = build_experiment({"name": "toy", "seed": 0, "data": {"max_prompt_tokens": 34}, "rollout": sizes})
    engine = Engine(model, config, "cpu", join_world=False)
    llm = engine.llm
    random = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": random.integers(5, 40, size).tolist()} for size in range(4, 28)]
    often = {llm.get_tokenizer().eos_token_id: 3.0}  # ends some, not all, before the cap

    def params(**other: Any) -> list[Any]:
        base = {"n": 3, "temperature": 0.9, "top_p": 0.9, "max_tokens": 30, "logprobs": 0, "detokenize": False}
        return [sampling_params(**base, seed=100 * i, logit_bias=often, **other) for i in range(len(prompts))]

    result: dict[str, Any] = {}
    for tokens_per_call, ahead in CALLS:
        named = engine.enqueue(prompts, params(), None)
        ended = decode(engine.core, tokens_per_call, ahead)
        done = {request.request_id: request for some in ended for request in some}
        engine.forget_outputs()
        result[f"{tokens_per_call} + {ahead}"] = [
            (f.token_ids.tolist(), f.logprobs.tolist(), f.finish_reason)
            for f in (done[name] for names in named for name in names)
        ]
    core, outputs = engine.core, llm.llm_engine.output_processor
    result["left"] = len(core.scheduler.requests) + len(outputs.request_states) + len(outputs.parent_requests)
    core.scheduler.num_lookahead_tokens = 0
    plain = llm.generate(prompts, params(flat_logprobs=True), use_tqdm=False)
    result["vllm"] = [
        (list(s.token_ids), list(s.logprobs.logprobs), s.finish_reason)
        for output in plain
        for s in sorted(output.outputs, key=lambda s: s.index)
    ]
    return result


def test_several_tokens_per_call_give_the_samples_of_single_steps(tmp_path: Path) -> None:
    from rlcore.config import TinyModelConfig
    from rlcore.models.tiny import create_tiny_policy

    create_tiny_policy(tmp_path, TinyModelConfig(task="sums", warm_start_steps=0))
    result = measured(samples_of, tmp_path)
    plain = result["vllm"]
    reasons = [reason for _, _, reason in plain]
    assert {"stop", "length"} == set(reasons)
    assert len({len(tokens) for tokens, _, _ in plain}) > 5
    for tokens_per_call, ahead in CALLS:
        samples = result[f"{tokens_per_call} + {ahead}"]
        assert [tokens for tokens, _, _ in samples] == [tokens for tokens, _, _ in plain]
        assert [reason for _, _, reason in samples] == reasons
        for (_, here, _), (_, there, _) in zip(samples, plain, strict=True):
            np.testing.assert_allclose(here, there, atol=1e-5)  # batches of other sizes round in other ways
    assert result["left"] == 0
