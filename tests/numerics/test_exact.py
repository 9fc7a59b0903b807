"""The forward pass of ``rollout.exact``: with plain kernels it is the model's own, and its values get that gradient.

That vLLM's kernels give the sampler's bits is a test on a GPU (tests/gpu/test_exact.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlcore.algorithms.loss import StepTotals
from rlcore.config import ExperimentConfig
from rlcore.errors import ModelError
from rlcore.models.exact import require_exact, with_value
from rlcore.models.flash import Sequences, Triple
from rlcore.models.torch_policy import TorchPolicy
from rlcore.types import TrainingSample
from tests.numerics import toy

VOCABULARY = 300


class PlainKernels:
    """Implements ``SamplerKernels`` with torch's functions, one sequence at a time."""

    def __init__(self, theta: float) -> None:
        self.theta = theta

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(inputs, weight, bias)

    def norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return rms_norm(hidden, weight.shape, weight, epsilon)

    norm_of_sum = norm

    def gated(self, gate_and_up: Tensor) -> Tensor:
        gate, up = gate_and_up.chunk(2, dim=-1)
        return silu(gate) * up

    def turned(self, positions: Tensor, query: Tensor, key: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
        angles = positions[:, None] / self.theta ** (torch.arange(0, head_size, 2) / head_size)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def turn(x: Tensor) -> Tensor:
            first, second = x.unflatten(-1, (-1, head_size)).chunk(2, dim=-1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(1)

        return turn(query), turn(key)

    def attention(self, inputs: Triple, where: Sequences, scale: float) -> Tensor:
        out = []
        for n in range(len(where.bounds) - 1):
            own, keys = (slice(int(b[n]), int(b[n + 1])) for b in (where.bounds, where.key_bounds))
            q, k, v = (x[rows].transpose(0, 1) for x, rows in zip(inputs, (own, keys, keys), strict=True))
            earlier = k.shape[1] - q.shape[1]
            mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(earlier)
            out.append(scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(0, 1))
        return torch.cat(out)

    def logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            tie_word_embeddings=False,
        )
    )


def policy(*, exact: bool, banned: list[int]) -> TorchPolicy:
    hf = model()
    for parameter in hf.parameters():
        if parameter.ndim == 1:  # biases are 0 and norms 1 otherwise
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    values = toy.config().model_dump()
    values["rollout"]["temperature"] = 1.0
    return TorchPolicy(
        hf,
        ExperimentConfig.model_validate(values),
        weights=toy.emptied(hf),
        mesh=toy.one_rank_mesh(),
        banned_token_ids=banned,
        features=None,
        kernels=PlainKernels(100.0) if exact else None,
    )


def samples() -> list[TrainingSample]:
    drawn = toy.samples(8, text_only=True)
    return [replace(sample, token_ids=sample.token_ids % (VOCABULARY - 2)) for sample in drawn]


def logprobs(of: TorchPolicy) -> np.ndarray:
    return np.concatenate([scored.logprobs for scored in of.logprobs([samples()])[0]])


@pytest.mark.parametrize("banned", [[], [VOCABULARY - 1, VOCABULARY - 2]])
def test_the_pass_computes_the_model(banned: list[int]) -> None:
    usual, exact = (logprobs(policy(exact=exact, banned=banned)) for exact in (False, True))
    assert np.abs(usual - exact).max() < 2e-5
    assert (usual != exact).any()  # another order of sums: the values are those of the kernels


def test_an_update_has_the_usual_gradient() -> None:
    drawn = samples()
    totals = StepTotals(sum(sample.num_trained for sample in drawn), len(drawn))
    gradients = []
    for exact in (False, True):
        of = policy(exact=exact, banned=[])
        kept = toy.keep_gradients(of, then_step=False)
        of.update([drawn], totals, 1e-3, kl_coefficient=0.0)
        gradients.append(toy.in_one_vector(of, kept))
    usual, exact_ones = gradients
    assert (usual - exact_ones).norm() < 1e-4 * usual.norm()


def test_a_value_has_the_gradient_of_another() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    value = with_value(3 * x, torch.tensor([5.0, 7.0]))
    assert value.tolist() == [5.0, 7.0]
    value.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(("field", "value"), [("model_type", "llama"), ("use_sliding_window", True)])
def test_other_models_are_refused(field: str, value: object) -> None:
    config = model().config
    require_exact(config, "cuda")
    with pytest.raises(ModelError, match="the device is 'cpu'"):
        require_exact(config, "cpu")
    config.update({field: value})
    with pytest.raises(ModelError, match=f"the {field} is"):
        require_exact(config, "cuda")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"temperature": 0.9}, "rollout.temperature is 0.9"),
        ({"top_p": 0.9}, "rollout.top_p is 0.9"),
        ({"top_k": 5}, "rollout.top_k is 5"),
        ({"quantization": "fp8"}, "rollout.quantization is fp8"),
    ],
)
def test_what_does_not_go_with_exact_log_probs(change: dict[str, object], says: str) -> None:
    values = toy.config(correction={"name": "truncate"}).model_dump()
    values["rollout"] |= {"exact": True, "temperature": 1.0}
    ExperimentConfig.model_validate(values)
    values["rollout"] |= change
    with pytest.raises(ValueError, match=says):
        ExperimentConfig.model_validate(values)
