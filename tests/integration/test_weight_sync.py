"""Promise 3: the sampler holds the weights that the trainer says it holds, pictures included."""

from __future__ import annotations

import dataclasses
import traceback
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest


class Pictures:
    """Stands in for the image store: pictures drawn in memory."""

    def read(self, image: Any) -> Any:
        from tests.numerics import toy

        return toy.PICTURES[image.sha256]


def deltas(model: Path) -> dict[str, Any]:
    """|delta log-prob| between engine and policy, before and after every weight was changed, and what a sync that
    leaves a tensor out says."""
    from rlcore.rollout.vllm_sampler import VllmSampler, set_engine_environment

    set_engine_environment("cpu")
    import torch

    from rlcore.config import ModelConfig
    from rlcore.data.prompts import PromptBuilder, load_processor
    from rlcore.data.synthetic import draw_problem
    from rlcore.errors import SamplerError
    from rlcore.rollout.collect import sample_requests, to_sample
    from rlcore.types import ImageRef, Problem
    from tests.numerics import toy

    config = toy.config()
    processor = load_processor(ModelConfig(path=str(model)))
    prompts = PromptBuilder(processor, "tiny", config.data.min_pixels, config.data.max_pixels)
    pictures: Any = Pictures()
    sampler = VllmSampler(model, config, prompts=prompts, images=pictures, device="cpu", join_world=False)
    # the engine made a group of one, in which the policy can live as well
    policy = toy.policy(model, config)
    problems = []
    for index in range(4):
        drawn = draw_problem("train", index, 0)
        image = drawn.picture.convert("RGB")
        toy.PICTURES[drawn.problem_id] = image
        ref = ImageRef(drawn.problem_id, image.width, image.height)
        problems.append(Problem(drawn.problem_id, f"<image>{drawn.question}", (ref,), drawn.answer, "drawn"))
    problems.append(dataclasses.replace(problems[0], problem_id="text", question="How many?", images=()))

    def delta() -> float:
        groups = sampler.generate(sample_requests(problems, 2, seed=0, batch=0))
        samples = [to_sample(p, g, i) for p, g in zip(problems, groups, strict=True) for i in range(2)]
        found = policy.logprobs([samples])[0]
        return max(float(np.abs(a - s.sampler_logprobs).max()) for a, s in zip(found, samples, strict=True))

    sampler.load_weights(policy.full_weights(), 0)
    result: dict[str, Any] = {"before": delta()}
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    result["stale"] = delta()
    for missing in ("lm_head.weight", "model.visual.merger.mlp.0.weight"):
        try:
            sampler.load_weights(((n, v) for n, v in policy.full_weights() if n != missing), 1)
        except SamplerError as error:
            result[missing] = str(error)
    sampler.load_weights(policy.full_weights(), 1)
    result["after"] = delta()
    result["version"] = (
        sampler.generate(sample_requests(problems[:1], 1, seed=0, batch=0))[0].completions[0].policy_version
    )
    return result


def _child(model: Path, queue: Any) -> None:
    try:
        queue.put(deltas(model))
    except BaseException:  # noqa: BLE001 - handed to the test, which fails with it
        queue.put(traceback.format_exc())


@pytest.mark.slow
def test_a_sync_reaches_every_weight_and_every_cache(tiny_model: Path) -> None:
    context = get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_child, args=(tiny_model, queue))
    process.start()
    result = queue.get(timeout=240)
    process.kill()  # an engine takes its time to shut down, and nothing is left to learn from it
    process.join()
    assert isinstance(result, dict), result
    assert result["before"] < 1e-4
    assert result["stale"] > 1e-2  # the same pictures and prompts under old weights are told apart
    assert result["after"] < 1e-4  # so no cache kept features of the old vision tower
    assert result["version"] == 1
    assert "not every weight" in result["lm_head.weight"]
    assert "not every weight" in result["model.visual.merger.mlp.0.weight"]
