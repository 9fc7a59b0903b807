"""Rows in 8-bit floats, by hand and by the properties of their rounding; and what does not go with them."""

import pytest
import torch

from rlcore.config import ExperimentConfig
from rlcore.sampler.quantised import FP8, fp8_rows
from rlcore.sampler.weights import bit_sum


def test_a_row_is_scaled_by_its_largest_value() -> None:
    # e4m3 has 448 = 1.75 * 2^8 and, next to it, 416; below 2 the steps are 1/8
    weight = torch.tensor([[448.0, -1.0, 1.07, 0.0], [-0.5, 0.25, 0.1, 0.0]])
    quantised, scale = fp8_rows(weight)
    assert scale.tolist() == [[1.0], [torch.tensor(0.5).div(448).item()]]
    assert quantised.float().tolist() == [
        [448.0, -1.0, 1.125, 0.0],
        [-448.0, 224.0, 88.0, 0.0],
    ]


def test_a_row_of_zeros_stays_zero() -> None:
    quantised, scale = fp8_rows(torch.zeros(2, 8, dtype=torch.bfloat16))
    assert not quantised.float().any()
    assert scale.isfinite().all()
    assert (scale > 0).all()


def test_values_are_off_by_at_most_a_sixteenth() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 1000, dtype=torch.bfloat16)
    quantised, scale = fp8_rows(weight)
    assert quantised.dtype == FP8
    off = (quantised.float() * scale - weight.float()).abs()
    smallest_step = scale * 2**-9  # of e4m3's subnormal numbers
    assert (off <= torch.maximum(weight.float().abs() / 16, smallest_step / 2) * 1.001).all()


def test_the_checksum_of_fused_rows_is_that_of_their_parts() -> None:
    torch.manual_seed(0)
    parts = [torch.randn(n, 32, dtype=torch.bfloat16) for n in (7, 3, 5)]
    whole = [bit_sum(part) for part in fp8_rows(torch.cat(parts))]
    assert sum(map(int, whole)) == sum(int(bit_sum(x)) for part in parts for x in fp8_rows(part))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"algorithm": {"correction": None}}, "algorithm.correction null"),
        ({"model": {"lora": {"rank": 4}}}, "adapters on quantised weights"),
        ({"rollout": {"tensor_parallel": 2, "quantization": "fp8"}, "resources": {"workers": 2}}, "tensor_parallel 2"),
    ],
)
def test_what_does_not_go_with_quantised_rollouts(change: dict[str, dict[str, object]], says: str) -> None:
    values: dict[str, object] = {
        "name": "fp8", "rollout": {"quantization": "fp8"}, "algorithm": {"correction": {"name": "truncate"}}
    }  # fmt: skip
    ExperimentConfig.model_validate(values)
    with pytest.raises(ValueError, match=says):
        ExperimentConfig.model_validate(values | change)
