"""What is missing for the model types that are refused, measured, so that a new version that has it is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoProcessor

from rlcore.errors import ModelError
from rlcore.families import FAMILIES as TABLE
from rlcore.families import REFUSED, qwen2
from tests.checking import REFUSED as MODELS
from tests.checking import checked, make_model
from tests.integration.engine_bench import measured


@pytest.mark.parametrize("model_type", REFUSED)
def test_check_model_refuses_it_with_what_is_missing(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"model_type '{model_type}', which is refused: "):
        checked(make_model(tmp_path / "model", model_type), with_engine=False)


def test_every_refused_model_type_has_a_model() -> None:
    assert REFUSED.keys() == MODELS.keys()


def test_the_packed_attention_has_no_sinks(tmp_path: Path) -> None:
    with mock.patch.dict(TABLE, {"gpt_oss": qwen2.FAMILY}), pytest.raises(ModelError, match="attention with s_aux"):
        checked(make_model(tmp_path / "model", "gpt_oss"), with_engine=False)


def test_transformers_does_not_know_kimi_vl() -> None:
    assert "kimi_vl" not in CONFIG_MAPPING


def _logprobs(model: Any, token_ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        values = model(input_ids=token_ids, **inputs).logits[0].log_softmax(-1)
    return values[:-1].gather(1, token_ids[0, 1:, None])[:, 0]


def of_gemma3(folder: Path) -> dict[str, Any]:
    """Largest differences of a token's log-prob, in nats, and vLLM's error with transformers' names."""
    from rlcore.sampler import engine

    engine.set_engine_environment("cpu")
    model_folder = make_model(folder / "model", "gemma3")
    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(model_folder)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (56, 56, 3), dtype=np.uint8))
    text = "<start_of_image>What is this? It is a picture."
    inputs = processor(text=[text], images=[[picture]], return_tensors="pt")
    token_ids, pixels = inputs["input_ids"], inputs["pixel_values"]
    both_ways = _logprobs(model, token_ids, pixel_values=pixels, token_type_ids=inputs["token_type_ids"])
    causal = _logprobs(model, token_ids, pixel_values=pixels)
    engine._world_of_one()
    from vllm import LLM, SamplingParams

    def start() -> LLM:
        return LLM(
            model=str(model_folder),
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            enable_chunked_prefill=False,
            skip_mm_profiling=True,
            limit_mm_per_prompt={"image": 1},
            distributed_executor_backend="external_launcher",
        )

    try:
        start()
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    _rename_tower(model_folder / "model.safetensors")
    prompt = {
        "prompt_token_ids": processor.tokenizer.encode(text, add_special_tokens=False),
        "multi_modal_data": {"image": [picture]},
    }
    options = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    (output,) = start().generate([prompt], options, use_tqdm=False)
    found = torch.tensor(
        [output.prompt_logprobs[t][token].logprob for t, token in enumerate(output.prompt_token_ids) if t]
    )
    return {
        "refusal": refusal,
        "same_tokens": list(output.prompt_token_ids) == token_ids[0].tolist(),
        "both_ways": float((found - both_ways).abs().max()),
        "causal": float((found - causal).abs().max()),
    }


def _rename_tower(file: Path) -> None:
    """To the names of published files, which vLLM knows."""
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): value.clone()
        for name, value in load_file(file).items()
    }
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})


def test_vllm_on_a_cpu_attends_causally_within_a_picture_and_knows_other_names(tmp_path: Path) -> None:
    result = measured(of_gemma3, tmp_path)
    assert "no module or parameter named 'vision_tower.embeddings'" in result["refusal"]
    assert result["same_tokens"]
    assert result["causal"] < 1e-4
    assert result["both_ways"] > 0.1
