"""A row that several ranks compute together against the same row on one: values, loss, gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rlcore.algorithms.loss import StepTotals
from rlcore.batch import Microbatch, pack
from rlcore.config import ExperimentConfig, build_experiment
from rlcore.errors import ConfigError
from rlcore.families.qwen2_vl import GridLayout
from rlcore.models import sequence
from rlcore.models.sequence import SequenceGroup, cut
from rlcore.types import TrainingSample
from tests.checking import make_model
from tests.numerics import toy
from tests.ranks import on_ranks

LOSSES = {"ppo_clip": "token_mean", "gspo": "sequence_mean_token_mean"}  # one of tokens, one of sequences
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "recomputed": {"gradient_checkpointing": "full"},
    "kept in part": {"gradient_checkpointing": "selective"},
    "frozen tower": {"freeze_vision_tower": True},
    "adapters": {"lora": {"rank": 4, "alpha": 8.0}},
}
CASES = [
    ("text", "ppo_clip", "whole"),
    ("pictures", "gspo", "whole"),
    *(("mixed", "ppo_clip", variant) for variant in VARIANTS),
]
LAYOUT = GridLayout(image_token_id=toy.PROCESSOR.tokenizer.convert_tokens_to_ids("<|image_pad|>"), merge_size=2)


def settings(degree: int, loss: str, model: dict[str, Any]) -> ExperimentConfig:
    base = toy.config(loss={"name": loss}, aggregation=LOSSES[loss])
    training = base.training.model_copy(update={"sequence_parallel": degree})
    own = type(base.model).model_validate({**base.model.model_dump(), **model})
    return base.model_copy(update={"training": training, "model": own})


def mixed_samples(kind: str) -> list[TrainingSample]:
    if kind == "text":
        return toy.samples(7, group=3, text_only=True)
    pictures = toy.samples(10, group=4)
    return pictures if kind == "pictures" else pictures[:5] + toy.samples(2, group=2, seed=5, text_only=True)


def _rank(rank: int, world: int, degree: int, model: str, cases: list[tuple[str, str, str]], out: str):
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for case in cases:
        kind, loss, variant = case
        policy = toy.policy(Path(model), settings(degree, loss, VARIANTS[variant]), mesh)
        samples = mixed_samples(kind)
        plan = toy.plan(samples, num_ranks=world // degree, token_budget=300)[rank // degree]
        mine = [[samples[i] for i in micro] for micro in plan]
        scored = policy.logprobs(mine)
        values = torch.zeros(len(samples), 400)
        for micro, part in zip(plan, scored, strict=True):
            for i, one in zip(micro, part, strict=True):
                values[i, : len(one.logprobs)] = torch.from_numpy(one.logprobs)
        shared = values if rank % degree == 0 else torch.zeros_like(values)
        dist.all_reduce(shared)
        mine = [
            [replace(s, old_logprobs=o.logprobs + np.float32(0.01) * s.loss_mask) for s, o in zip(m, p, strict=True)]
            for m, p in zip(mine, scored, strict=True)
        ]
        gradients = toy.keep_gradients(policy, then_step=False)
        totals = StepTotals(sum(s.num_trained for s in samples), len(samples))
        result = policy.update(mine, totals, 0.0, 0.0)
        found[case] = {
            "logprobs": shared,
            "gradient": torch.cat([gradients[name].flatten() for name in sorted(gradients)]),
            "loss": float(result.sums.totals["policy_loss"]),
            "tokens": float(result.sums.totals["tokens"]),
            "entropy": float(result.sums.means["loss/entropy"]),
            "norm": result.grad_norm,
        }
    if rank == 0:
        torch.save(found, out)


def run(world: int, degree: int, model: Path, cases: list[tuple[str, str, str]], folder: Path) -> dict[Any, Any]:
    out = str(folder / f"{world}-{degree}.pt")
    on_ranks(world, _rank, degree, str(model), cases, out)
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def one(each_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    return run(1, 1, each_model, CASES, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize(("world", "degree"), [(4, 2), (4, 4)])
def test_ranks_that_share_rows_take_the_step_of_one(
    one: dict[Any, Any], each_model: Path, tmp_path: Path, world: int, degree: int
) -> None:
    """The model has 4 query and 2 key-value heads: at 4 ranks these are repeated."""
    assert_same(one, run(world, degree, each_model, CASES, tmp_path))


def test_experts_take_the_step_of_one_too(tmp_path: Path) -> None:
    model, cases = make_model(tmp_path / "model", "qwen3_vl_moe"), [("mixed", "ppo_clip", "whole")]
    assert_same(*(run(ranks, ranks, model, cases, tmp_path) for ranks in (1, 2)))


def assert_same(one: dict[Any, Any], many: dict[Any, Any]) -> None:
    for case, a in one.items():
        b = many[case]
        assert a["gradient"].norm() > 0
        assert float((a["gradient"] - b["gradient"]).norm() / a["gradient"].norm()) < 3e-6, case
        torch.testing.assert_close(b["logprobs"], a["logprobs"], atol=1e-5, rtol=0)
        for name in ("loss", "tokens", "entropy", "norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-5, abs=1e-6), (case, name)


# --- the shares of a row ---


def row() -> Microbatch:
    return pack(toy.samples(5, group=2), layout=LAYOUT, features=toy.features)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_the_parts_of_all_ranks_together_are_the_row(size):
    whole = row()
    parts = [cut(whole, rank, size, LAYOUT) for rank in range(size)]
    count = len(whole.token_ids)
    assert {len(part.token_ids) for part in parts} == {-(-count // size)}
    assert torch.cat([part.token_ids for part in parts])[:count].equal(whole.token_ids)
    assert torch.cat([part.position_ids for part in parts], -1)[:, :count].equal(whole.position_ids)
    own = [part.pixel_values for part in parts if part.pixel_values is not None]
    assert torch.cat(own).equal(whole.pixel_values)

    trained = torch.cat([part.share.trained for part in parts])
    assert sorted(trained.tolist()) == list(range(len(whole.targets)))
    length = -(-count // size)
    places = torch.cat([part.predict_from + rank * length for rank, part in enumerate(parts)])
    assert places.equal(whole.predict_from[trained])
    assert torch.cat([part.targets for part in parts]).equal(whole.targets[trained])

    # what each rank knows, put where the ranks' own values come to lie
    most = parts[0].share.most_trained
    lined = torch.full((size * most,), -1)
    for rank, part in enumerate(parts):
        lined[rank * most : rank * most + len(part.targets)] = part.targets
    assert lined[parts[-1].share.places].equal(whole.targets)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_every_image_token_finds_its_row_among_the_gathered_features(size):
    whole = row()
    features = torch.arange(int(whole.image_grid_thw.prod(-1).sum()) // 4)  # [R] each row its own number
    parts = [cut(whole, rank, size, LAYOUT) for rank in range(size)]
    most = parts[0].share.most_features
    lined, start = torch.full((size * most,), -1), 0
    for rank, part in enumerate(parts):
        rows = 0 if part.image_grid_thw is None else int(part.image_grid_thw.prod(-1).sum()) // 4
        lined[rank * most : rank * most + rows] = features[start : start + rows]
        start += rows
    seen = torch.cat([lined[part.image_rows] for part in parts])
    assert seen.equal(features[whole.image_rows])


def test_padding_of_a_row_attends_only_to_itself():
    whole = pack(toy.samples(2, text_only=True), layout=None, features=None)
    size = len(whole.token_ids) - 1  # two tokens a rank, and the last ones nothing
    part = cut(whole, size - 1, size, None)
    filled = 2 * size - len(whole.token_ids)
    assert part.segments.bounds[:-1].equal(whole.segments.bounds)
    assert part.segments.bounds[-1] == 2 * size
    assert part.segments.key_rows[-filled:].tolist() == list(range(2 * size - filled, 2 * size))
    assert part.segments.sizes.tolist() == [1, *(max(int(n), filled) for n in whole.segments.sizes[1:])]
    assert len(part.targets) == 0


# --- what travels ---


def test_the_exchange_compiles_whole_with_its_gradient():
    """A group of one rank, in which every part comes back; torch checks schema, shapes without data and autograd."""
    toy.one_rank_mesh()
    group = SequenceGroup("alone", 0, 1)
    sequence._GROUPS[group.name] = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, heads, 8, generator=generator).requires_grad_() for heads in (4, 2, 2))
    torch.library.opcheck(sequence.EXCHANGE, (query[None], group.name))

    def there_and_back(query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup) -> Tensor:
        q, k, v = sequence.heads_of_all_tokens(query, key, value, group)
        return sequence.tokens_of_all_heads(q + (k * v).repeat_interleave(2, 1), group)

    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
    expected = query + (key * value).repeat_interleave(2, 1)
    wanted = torch.autograd.grad(expected.sum(), (query, key, value))
    for function in (there_and_back, compiled):
        found = function(query, key, value, group)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.sum(), (query, key, value)), wanted)


# --- what is refused ---


def test_a_degree_that_does_not_divide_the_workers_is_refused():
    with pytest.raises(ConfigError, match=r"sequence_parallel \(3\) does not divide resources.workers \(4\)"):
        build_experiment({"name": "toy", "training": {"sequence_parallel": 3}, "resources": {"workers": 4}})


def test_a_row_of_several_workers_may_be_longer_than_one_holds():
    long = {"name": "toy", "data": {"max_prompt_tokens": 2000}, "rollout": {"max_completion_tokens": 6000}}
    training = {"tokens_per_microbatch": 4000, "sequence_parallel": 2}
    assert build_experiment({**long, "training": training, "resources": {"workers": 2}}).training.tokens_per_row == 8000
    with pytest.raises(ConfigError, match="Raise the first to at least 8000"):
        build_experiment({**long, "training": {"tokens_per_microbatch": 4000}})
