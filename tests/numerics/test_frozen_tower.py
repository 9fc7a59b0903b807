"""A vision tower that does not train embeds each image once; values and gradient are those of the tower run anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from rlcore.algorithms.loss import StepTotals
from rlcore.batch import ImageFeatures
from rlcore.config import ExperimentConfig
from rlcore.families.qwen2_vl import IMAGES
from rlcore.models.torch_policy import TorchPolicy
from rlcore.models.vision import FrozenTower
from rlcore.types import ImageRef
from tests.numerics import toy
from tests.ranks import on_ranks

KL = 0.1


def settings(*, freeze: bool, offload: bool = False) -> ExperimentConfig:
    base = toy.config(kl={"coefficient": KL})
    training = base.training.model_copy(update={"offload": offload})
    return base.model_copy(
        update={"model": base.model.model_copy(update={"freeze_vision_tower": freeze}), "training": training}
    )


def taken(policy: TorchPolicy, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Log-probs, both policies', and the decoder's gradient of one step that is not taken."""
    samples = [*toy.samples(8), *toy.samples(2, group=2, seed=5, text_only=True)]
    plan = toy.plan(samples, num_ranks=world, token_budget=400)[rank]
    mine = [[samples[i] for i in micro] for micro in plan]
    gradients = toy.keep_gradients(policy, then_step=False)
    scored = [policy.logprobs(mine, reference=reference) for reference in (False, True)]
    totals = StepTotals(sum(s.num_trained for s in samples), len(samples))
    loss = float(policy.update(mine, totals, 1e-3, KL).sums.totals["policy_loss"])
    values = [torch.cat([torch.from_numpy(one.logprobs) for m in part for one in m]) for part in scored]
    gradient = torch.cat([value.flatten() for name, value in gradients.items() if "visual" not in name])
    return {"loss": loss, "gradient": gradient, "values": values}


def counted_calls(policy: TorchPolicy) -> list[int]:
    calls: list[int] = []
    policy.model.hf.model.visual.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("offload", [False, True])
def test_the_step_equals_that_of_a_tower_that_runs_in_each_pass(each_model: Path, offload: bool):
    trained = taken(toy.policy(each_model, settings(freeze=False)))
    policy = toy.policy(each_model, settings(freeze=True, offload=offload))
    calls = counted_calls(policy)
    frozen = taken(policy)
    assert len(calls) == 2  # two pictures; policy, reference and update together
    assert frozen["loss"] == pytest.approx(trained["loss"], rel=1e-5, abs=1e-7)
    # clipped by the norm of what trains, which differs: the direction is the same
    a, b = frozen["gradient"], trained["gradient"]
    assert float((a / a.norm() - b / b.norm()).norm()) < 2e-6
    for one, other in zip(frozen["values"], trained["values"], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    policy.offload()
    again = taken(policy)
    assert len(calls) == 2
    assert again["gradient"].equal(frozen["gradient"])
    assert policy.reference.hf.model.visual is policy.model.hf.model.visual


class Doubling(nn.Module):
    """In a tower's place: the sum of each patch's pixels, twice over."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.config = toy_vision_config()
        self.dtypes: list[torch.dtype] = []

    def forward(self, pixels: Tensor, **_: object) -> Any:
        self.dtypes.append(self.weight.dtype)
        output = type("Output", (), {})()
        output.pooler_output = pixels.sum(-1, keepdim=True) * self.weight
        return output


def toy_vision_config() -> Any:
    from rlcore.models.attention import use_packed_attention
    from rlcore.models.tiny import build_model

    model = build_model(None, 0)
    use_packed_attention(model)
    return model.config.vision_config


def test_cached_features_are_limited_and_in_the_compute_dtype():
    read: list[str] = []

    def picture(image: ImageRef) -> ImageFeatures:
        read.append(image.sha256)
        return ImageFeatures(torch.full((4, 3), float(len(image.sha256))), (1, 2, 2))

    model = Doubling()
    kept = FrozenTower(
        model, IMAGES, picture, device=torch.device("cpu"), dtype=torch.bfloat16, kept_bytes=16
    )  # 8 each
    a, bb, ccc = (ImageRef(name, 28, 28) for name in ("a", "bb", "ccc"))
    assert kept.of(a).embedded.flatten().tolist() == [6.0] * 4
    assert kept.of(bb).embedded.dtype == torch.bfloat16
    assert kept.of(a).grid_thw == (1, 2, 2)
    assert read == ["a", "bb"]
    kept.of(ccc)  # takes the place of bb, which was asked for before a
    kept.of(a)
    kept.of(bb)
    assert read == ["a", "bb", "ccc", "bb"]
    assert model.dtypes == [torch.bfloat16] * 4
    assert model.weight.dtype == torch.float32


def _rank(rank: int, world: int, model: str, folder: str) -> None:
    policy = toy.policy(Path(model), settings(freeze=True), init_device_mesh("cpu", (world,)))
    found = taken(policy, rank, world)
    before = {name: value.clone() for name, value in policy.full_weights()}
    toy.save(policy, Path(folder) / "saved")
    with torch.no_grad():
        next(policy.model.hf.model.visual.merger.parameters()).zero_()
    policy.load(Path(folder) / "saved")
    restored = all(torch.equal(before[name], value) for name, value in policy.full_weights())
    if rank == 0:
        torch.save({"gradient": found["gradient"], "loss": found["loss"], "restored": restored}, f"{folder}/found.pt")


def test_a_frozen_tower_needs_no_collectives_and_is_saved_whole(each_model: Path, tmp_path: Path):
    """Two ranks with different pictures, and one microbatch without any."""
    on_ranks(2, _rank, str(each_model), str(tmp_path))
    two = torch.load(tmp_path / "found.pt", weights_only=True)
    one = taken(toy.policy(each_model, settings(freeze=True)))
    assert two["restored"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-7)
    assert float((two["gradient"] - one["gradient"]).norm() / one["gradient"].norm()) < 2e-6
