"""A merged model is held to what vLLM itself says of it: the right folder is accepted, another one refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlcore.config import ExperimentConfig, TinyModelConfig
from rlcore.data.probe import ProbeSequence, read_probe
from rlcore.errors import ModelError
from rlcore.jobs.merge import verify_merged
from tests.integration.engine_bench import measured


def probe_of(model: Path) -> Path:
    """What transformers says of two completions, row by row: the row of token t - 1 holds log p(token t)."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sequences = []
    for tokens, start in (([5, 9, 13, 7, 20, 6], 3), ([8, 11, 6, 30, 12, 9, 10, 14], 5)):
        with torch.no_grad():
            rows = policy(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        logprobs = [float(rows[t - 1, tokens[t]]) for t in range(start, len(tokens))]
        sequences.append(ProbeSequence(token_ids=tokens, completion_start=start, images=(), logprobs=logprobs))
    path = model / "canary.json"
    path.write_text(json.dumps({"sequences": [sequence.model_dump(mode="json") for sequence in sequences]}))
    return path


def verified(folder: Path) -> dict[str, Any]:
    """One engine, which loads ``merged``; both folders are then held to its log-probs."""
    from rlcore.sampler.engine import vllm_sequence_logprobs
    from rlcore.sampler.start import set_engine_environment
    from tests.numerics import toy

    set_engine_environment("cpu")
    merged, other = folder / "merged", folder / "other"
    said = vllm_sequence_logprobs(merged, read_probe(probe_of(merged)), folder, toy.config(), "cpu")
    values = toy.config().model_dump()
    values["rollout"]["tensor_parallel"] = values["resources"]["workers"] = 2
    together = ExperimentConfig.model_validate(values)
    by_two = vllm_sequence_logprobs(merged, read_probe(merged / "canary.json"), folder, together, "cpu")
    result: dict[str, Any] = {
        "of two processes": max(
            abs(a - b) for one, two in zip(said, by_two, strict=True) for a, b in zip(one, two, strict=True)
        )
    }
    for name, model in (("merged", merged), ("other", other)):
        probe = probe_of(model)
        try:
            report = verify_merged(
                model,
                probe,
                log_prob_with_vllm=lambda *_: said,
                read_image=lambda image: None,
                min_pixels=1,
                max_pixels=1,
            )
            result[name] = report.vllm_max_delta
        except ModelError as error:
            result[name] = str(error)
    return result


def tiny_policy(folder: Path) -> str:
    """Make a merged model in ``folder``; return the name of one of its tensors."""
    from rlcore.models.tiny import create_tiny_policy

    create_tiny_policy(folder, TinyModelConfig(task="sums", warm_start_steps=0))
    return "model.layers.0.mlp.down_proj.weight"


def experts_after_a_step(folder: Path) -> str:
    """The same from the checkpoint of a policy with experts."""
    from rlcore.algorithms.loss import StepTotals
    from rlcore.jobs.merge import merge_checkpoint
    from tests.checking import make_model
    from tests.numerics import toy

    base = make_model(folder.parent / "base", "qwen3_moe", num_key_value_heads=2)
    policy, samples = toy.policy(base, toy.config()), toy.samples(4, text_only=True)
    policy.update([samples], StepTotals(sum(s.num_trained for s in samples), len(samples)), 1e-2, 0.0)
    toy.save(policy, folder.parent / "checkpoint")
    merge_checkpoint(folder.parent / "checkpoint", base, folder)
    stored, before = load_file(folder / "model.safetensors"), load_file(base / "model.safetensors")
    assert stored.keys() == before.keys()
    trained = dict(policy.full_weights())["model.layers.2.mlp.experts.gate_up_proj"]
    halves = (stored[f"model.layers.2.mlp.experts.5.{half}_proj.weight"] for half in ("gate", "up"))
    assert torch.equal(torch.cat(list(halves)), trained[5])
    name = "model.layers.0.mlp.experts.3.down_proj.weight"
    assert not torch.equal(stored[name], before[name])
    return name


@pytest.mark.parametrize("make", [tiny_policy, experts_after_a_step])
def test_vllm_accepts_the_merged_model_and_refuses_one_with_another_layer(
    tmp_path: Path, make: Callable[[Path], str]
) -> None:
    changed = make(tmp_path / "merged")
    shutil.copytree(tmp_path / "merged", tmp_path / "other")
    weights = load_file(tmp_path / "other" / "model.safetensors")
    weights[changed] = weights[changed] * 1.5
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    result = measured(verified, tmp_path)
    assert isinstance(result["merged"], float), result
    assert result["of two processes"] < 1e-4
    assert result["merged"] < 1e-4
    assert "those of vLLM differ by" in str(result["other"])


def verified_in_bfloat16(folder: Path) -> dict[str, Any]:
    """An engine in the dtype of ``rollout.dtype``; the trainer computed in float32."""
    from rlcore.sampler.engine import vllm_sequence_logprobs
    from rlcore.sampler.start import set_engine_environment
    from tests.checking import make_model
    from tests.numerics import toy

    set_engine_environment("cpu")
    model = make_model(folder / "merged", "qwen3_5_text")
    values = toy.config().model_dump()
    values["rollout"]["dtype"] = "bfloat16"
    probe = probe_of(model)
    said = vllm_sequence_logprobs(model, read_probe(probe), folder, ExperimentConfig.model_validate(values), "cpu")
    options: dict[str, Any] = {"read_image": lambda image: None, "min_pixels": 1, "max_pixels": 1}
    report = verify_merged(model, probe, log_prob_with_vllm=lambda *_: said, vllm_dtype=torch.bfloat16, **options)
    result = {"trainer": report.transformers_max_delta, "vllm": report.vllm_max_delta, "allowed": report.allowed_max}
    try:
        verify_merged(model, probe, log_prob_with_vllm=lambda *_: said, **options)
    except ModelError as error:
        result["in float32"] = str(error)
    return result


def test_vllm_is_held_to_the_dtype_that_it_computes_in(tmp_path: Path) -> None:
    result = measured(verified_in_bfloat16, tmp_path)
    assert result["trainer"] < 1e-4
    assert 1e-3 < result["vllm"] <= result["allowed"] < 0.5
    assert "those of vLLM differ by" in result["in float32"]
