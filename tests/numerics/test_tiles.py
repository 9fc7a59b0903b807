"""Vision towers that take tiles, and whose projector stands next to them: frozen, over ranks, and with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from rlcore.algorithms.loss import StepTotals
from rlcore.config import ExperimentConfig
from rlcore.models.torch_policy import TorchPolicy
from rlcore.types import TrainingSample
from tests.checking import make_model
from tests.numerics import toy
from tests.ranks import on_ranks

KL = 0.1
# by model type: the tower and its projector, and the tiles of the pictures: one, or several and one for the whole
PARTS = {
    "internvl": ("vision_tower", "multi_modal_projector"),
    "idefics3": ("vision_model", "connector"),
    "gemma3": ("vision_tower", "multi_modal_projector"),
}
GRIDS = {
    "internvl": {(5, 28, 28), (7, 28, 28), (10, 28, 28)},
    "idefics3": {(7, 28, 28), (10, 28, 28)},
    "gemma3": {(1, 84, 84)},
}


@pytest.fixture(scope="module", params=PARTS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiles") / kind, kind)


def settings(*, degree: int = 1, **model: Any) -> ExperimentConfig:
    base = toy.config(kl={"coefficient": KL})
    training = base.training.model_copy(update={"sequence_parallel": degree})
    own = type(base.model).model_validate({**base.model.model_dump(), **model})
    return base.model_copy(update={"training": training, "model": own})


def samples(kind: str) -> list[TrainingSample]:
    """Pictures of several numbers of tiles, and texts."""
    return [
        *toy.samples(6, group=2, model_type=kind),
        *toy.samples(2, group=2, seed=5, text_only=True, model_type=kind),
    ]


def taken(policy: TorchPolicy, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Loss and gradients of one step that is not taken. The ranks' rows differ."""
    every = samples(policy.model.hf.config.model_type)
    plan = toy.plan(every, num_ranks=world, token_budget=150)[rank]
    mine = [[every[i] for i in micro] for micro in plan]
    policy.logprobs(mine, reference=True)
    gradients = toy.keep_gradients(policy, then_step=False)
    totals = StepTotals(sum(s.num_trained for s in every), len(every))
    result = policy.update(mine, totals, 1e-3, KL)
    return {"loss": float(result.sums.totals["policy_loss"]), "norm": result.grad_norm, "gradients": dict(gradients)}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    a, b = (torch.cat([gradients[name].flatten() for name in sorted(one)]) for gradients in (one, other))
    return float((a / a.norm() - b / b.norm()).norm())


def test_pictures_have_these_tiles(kind: str) -> None:
    grids = {toy.features(image, kind).grid_thw for sample in samples(kind) for image in sample.images}
    assert grids == GRIDS[kind]


def test_a_frozen_tower_runs_once_for_policy_and_reference(kind: str, model: Path) -> None:
    tower, projector = PARTS[kind]
    trained = taken(toy.policy(model, settings()))["gradients"]
    policy = toy.policy(model, settings(freeze_vision_tower=True))
    inside = policy.model.hf.model
    calls: list[int] = []
    inside.get_submodule(tower).register_forward_pre_hook(lambda *_: calls.append(1))
    frozen = taken(policy)["gradients"]
    assert len(calls) == len({image for sample in samples(kind) for image in sample.images})
    of_tower = {name for name in trained if tower in name or projector in name}
    assert of_tower == trained.keys() - frozen.keys()
    assert apart(frozen, trained) < 3e-6
    for part in (tower, projector):
        assert policy.reference.hf.model.get_submodule(part) is inside.get_submodule(part)


VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {"gradient_checkpointing": "selective"},
    "frozen tower": {"freeze_vision_tower": True},
}


CASES = [(1, "whole"), (2, "whole"), (2, "frozen tower")]  # ranks that share a row, and the variant


def _rank(rank: int, world: int, model: str, out: str) -> None:
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for degree, name in CASES:
        policy = toy.policy(Path(model), settings(degree=degree, **VARIANTS[name]), mesh)
        found[degree, name] = taken(policy, rank // degree, world // degree)
    if rank == 0:
        torch.save(found, out)


def test_two_ranks_take_the_step_of_one(model: Path, tmp_path: Path) -> None:
    """With whole rows, of which some have no picture, and with halves of each row."""
    on_ranks(2, _rank, str(model), str(tmp_path / "two.pt"))
    for (_, name), two in torch.load(tmp_path / "two.pt", weights_only=True).items():
        one = taken(toy.policy(model, settings(**VARIANTS[name])))
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-7), name
        assert two["norm"] == pytest.approx(one["norm"], rel=1e-5), name
        assert apart(one["gradients"], two["gradients"]) < 3e-6, name
