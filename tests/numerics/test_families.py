"""Text models of other families through the packed forward pass, against transformers' own attention."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from rlcore.batch import pack
from rlcore.errors import ModelError
from rlcore.models.packed import PackedModel
from rlcore.types import TrainingSample

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}


def sample(prompt: int, completion: int, seed: int) -> TrainingSample:
    mask = np.arange(prompt + completion) >= prompt
    tokens = np.random.default_rng(seed).integers(1, 50, len(mask)).astype(np.int32)
    zeros = np.zeros(len(mask), np.float32)
    return TrainingSample(
        token_ids=tokens, loss_mask=mask, sampler_logprobs=zeros, advantages=zeros, images=(), policy_version=0
    )


def logprobs(config: Any, samples: list[TrainingSample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the trained tokens, packed and by transformers one sequence after the other."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = []
    with torch.no_grad():
        for item in samples:
            tokens = torch.from_numpy(item.token_ids).long()
            values = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
            expected.append(values[torch.from_numpy(item.loss_mask[1:])])
        packed = PackedModel(copy.deepcopy(model), temperature=1.0, banned_token_ids=())
        found, _, _ = packed(pack(samples, layout=None, features=None))
    return found, torch.cat(expected)


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SMALL),
        Qwen2Config(**SMALL, **WINDOWS),
        Qwen3Config(**SMALL, head_dim=16),
        LlamaConfig(**SMALL),
        MistralConfig(**SMALL, sliding_window=9),
        Phi3Config(**SMALL),
    ],
    ids=["qwen2", "qwen2 with windows", "qwen3", "llama", "mistral", "phi3"],
)
def test_the_packed_pass_is_transformers_own(config: Any) -> None:
    """Nine tokens at most, so that windows of nine do not bind."""
    assert_close(*logprobs(config, [sample(4, 5, 0), sample(2, 3, 1)]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "keyword"),
    [
        (Qwen2Config(**SMALL, **WINDOWS), "sliding_window"),
        (MistralConfig(**SMALL, sliding_window=9), "sliding_window"),
        (Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=None), "softcap"),
    ],
)
def test_what_attention_would_leave_out_is_refused_in_the_forward_pass_too(config: Any, keyword: str) -> None:
    with pytest.raises(ModelError, match=f"Attention wants attention with .*{keyword}"):
        logprobs(config, [sample(5, 5, 0)])
