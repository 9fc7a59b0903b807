"""Router replay against transformers' model, whose routers are told the experts by a hook that shares no code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rlcore.algorithms.loss import StepTotals
from rlcore.batch import pack, prompt_key, rows_of
from rlcore.config import ExperimentConfig
from rlcore.errors import ModelError
from rlcore.families import images_in
from rlcore.models.loading import load_hf_model
from rlcore.models.torch_policy import TorchPolicy
from rlcore.types import TrainingSample
from tests.checking import make_model
from tests.numerics import toy
from tests.ranks import on_ranks

LAYERS, EXPERTS, USED = 3, 6, 2
KINDS = ["qwen3_moe", "qwen3_moe, a layer without experts", "qwen3_vl_moe"]


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("replay") / "model", request.param)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("replay") / "model", KINDS[0])


def settings(**parts: dict[str, Any]) -> ExperimentConfig:
    values = toy.config().model_dump()
    values["rollout"]["replay_routes"] = True
    for part, changes in parts.items():
        values[part] |= changes
    return ExperimentConfig.model_validate(values)


def policy_of(folder: Path, **parts: dict[str, Any]) -> TorchPolicy:
    return toy.policy(folder, settings(**parts))


def num_routers(policy: TorchPolicy) -> int:
    return sum(hasattr(layer.mlp, "experts") for layer in policy.model.decoder.layers)


def with_routes(samples: list[TrainingSample], layers: int) -> list[TrainingSample]:
    """Each token gets random experts. Samples that share a prompt share its experts."""
    random = np.random.default_rng(0)
    prompts: dict[Any, Any] = {}
    routed = []
    for sample in samples:
        shape = (sample.num_tokens - 1, layers, EXPERTS)
        drawn = random.permuted(np.broadcast_to(np.arange(EXPERTS, dtype=np.uint8), shape), axis=-1)[..., :USED]
        prompt = prompts.setdefault(prompt_key(sample), drawn[: sample.num_prompt])
        routed.append(replace(sample, routes=np.concatenate([prompt, drawn[sample.num_prompt :]])))
    return routed


def samples_for(folder: Path, policy: TorchPolicy, count: int = 6) -> list[TrainingSample]:
    return with_routes(toy.samples(count, group=3, text_only=images_in(folder) is None), num_routers(policy))


def told(model: Any, sample: TrainingSample) -> Callable[[], None]:
    """Let the routers of a transformers model take the experts of a sample. The last token keeps its own."""
    routers = [m for m in model.modules() if hasattr(m, "top_k") and hasattr(m, "hidden_dim")]
    assert sample.routes is not None
    layers = cycle(range(len(routers)))

    def tell(router: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, experts = output
        experts = experts.clone()
        experts[:-1] = torch.from_numpy(sample.routes[:, next(layers)].astype(np.int64))
        chosen = torch.stack([row[own] for row, own in zip(logits, experts, strict=True)])
        if getattr(router, "norm_topk_prob", True):
            return logits, chosen.softmax(-1), experts
        return logits, (chosen - logits.logsumexp(-1, keepdim=True)).exp(), experts

    hooks = [router.register_forward_hook(tell) for router in routers]
    return lambda: [hook.remove() for hook in hooks] and None


def plain_logprobs(model: Any, sample: TrainingSample, temperature: float) -> Tensor:
    """[trained tokens] of one sequence, differentiable, by transformers with the experts of the sample."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
    inputs: dict[str, Any] = {}
    if sample.images:
        image = toy.features(sample.images[0], model.config.model_type)
        inputs = {"pixel_values": image.pixel_values, "image_grid_thw": torch.tensor([image.grid_thw])}
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    forget = told(model, sample)
    logits = model(input_ids=ids, **inputs).logits[0] / temperature
    forget()
    banned = torch.zeros(logits.shape[-1], dtype=torch.bool)
    banned[toy.BANNED] = True
    logprobs = logits.masked_fill(banned, float("-inf")).log_softmax(-1)
    return logprobs[:-1].gather(-1, ids[0, 1:, None])[:, 0][torch.from_numpy(sample.loss_mask[1:])]


def transformers_model(folder: Path) -> Any:
    return load_hf_model(folder, torch.float32, attn_implementation="eager", experts_implementation="eager")


def test_logprobs_are_those_of_transformers_with_the_same_experts(model: Path) -> None:
    policy = policy_of(model)
    samples = samples_for(model, policy)
    found = policy.logprobs([samples])[0]
    free = policy.logprobs([[replace(sample, routes=None) for sample in samples]])[0]
    plain = transformers_model(model)
    for sample, one, other in zip(samples, found, free, strict=True):
        with torch.no_grad():
            expected = plain_logprobs(plain, sample, policy.config.rollout.temperature).numpy()
        np.testing.assert_allclose(one.logprobs[sample.loss_mask], expected, atol=3e-5)
        assert np.abs(other.logprobs - one.logprobs).max() > 0.1  # the experts matter


def test_gradients_are_those_of_transformers_and_reach_every_router(model: Path) -> None:
    policy = policy_of(model)
    samples = samples_for(model, policy, 3)
    plain = transformers_model(model)
    torch.stack([plain_logprobs(plain, s, policy.config.rollout.temperature).sum() for s in samples]).sum().backward()
    batch = policy._pack(samples, policy.model)
    policy.model(batch).logprobs.sum().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in policy.model.hf.named_parameters():
        gradient, want = parameter.grad.full_tensor(), expected[name]
        assert (gradient - want).norm() <= 3e-5 * want.norm(), name
        if name.endswith("mlp.gate.weight"):
            assert gradient.norm() > 1e-2


def own_routes(policy: TorchPolicy, samples: list[TrainingSample]) -> list[TrainingSample]:
    """The samples with the experts that the policy's routers choose in one row."""
    seen: list[Tensor] = []
    routers = [layer.mlp.gate for layer in policy.model.decoder.layers if hasattr(layer.mlp, "experts")]
    hooks = [router.register_forward_hook(lambda _, __, out: seen.append(out[2])) for router in routers]
    policy.logprobs([[replace(sample, routes=None) for sample in samples]])
    for hook in hooks:
        hook.remove()
    by_row = torch.stack(seen, 1).numpy().astype(np.int16)
    places = [row.numpy()[:-1] for row in rows_of(samples)]
    return [replace(sample, routes=by_row[place]) for sample, place in zip(samples, places, strict=True)]


def means(policy: TorchPolicy, samples: list[TrainingSample]) -> dict[str, float]:
    totals = StepTotals(sum(s.num_trained for s in samples), len(samples))
    sums = policy.update([samples, []], totals, 0.0, 0.0).sums
    return {name: float(value) / float(sums.totals["tokens"]) for name, value in sums.means.items()}


def test_the_routers_own_choice_changes_nothing(model: Path) -> None:
    policy = policy_of(model)
    samples = own_routes(policy, samples_for(model, policy))
    replayed = policy.logprobs([samples])[0]
    free = policy.logprobs([[replace(sample, routes=None) for sample in samples]])[0]
    assert all(np.array_equal(one.logprobs, other.logprobs) for one, other in zip(replayed, free, strict=True))
    assert means(policy, samples)["rollout/routes_differ"] == 0


def test_the_share_of_other_choices_counts_sets_of_experts(text_model: Path) -> None:
    policy = policy_of(text_model)
    samples = own_routes(policy, samples_for(text_model, policy))
    last = LAYERS - 1  # another choice there changes no other layer's
    sample, start = samples[0], samples[0].num_prompt
    routes = sample.routes.copy()
    routes[start, last] = routes[start, last, ::-1]  # the same experts in another order
    unused = next(e for e in range(EXPERTS) if e not in routes[start + 1, last])
    routes[start + 1, last, 0] = unused
    changed = [replace(sample, routes=routes), *samples[1:]]
    tokens = sum(s.num_trained for s in samples)
    assert means(policy, changed)["rollout/routes_differ"] == pytest.approx(1 / LAYERS / tokens)


def test_a_run_without_replay_has_no_share(text_model: Path) -> None:
    policy = toy.policy(text_model, toy.config())
    assert "rollout/routes_differ" not in means(policy, toy.samples(4, text_only=True))


def gradient(policy: TorchPolicy, microbatches: list[list[TrainingSample]]) -> Tensor:
    return toy.step_gradient(policy, microbatches)[0]


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_the_gradient_does_not_depend_on_microbatches(text_model: Path) -> None:
    """Samples with the same prompt and other experts for it do not share it."""
    policy = policy_of(text_model)
    samples = samples_for(text_model, policy)
    others = samples_for(text_model, policy, 3)
    routes = samples[2].routes
    last = replace(samples[2], routes=np.concatenate([(routes[:1] + 1) % EXPERTS, routes[1:]]))
    samples = [*samples[:2], last, *samples[3:]]
    assert prompt_key(last) != prompt_key(samples[0]) == prompt_key(samples[1]) == prompt_key(others[0])
    whole = gradient(policy, [samples])
    assert apart(gradient(policy, [[sample] for sample in samples]), whole) < 2e-6
    assert apart(gradient(policy, [samples[4:], [], samples[:4]]), whole) < 2e-6


@pytest.mark.filterwarnings("ignore:Error detected in")  # transformers' operator for float32 is no graph's part
@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"gradient_checkpointing": "full"}},
        {"model": {"gradient_checkpointing": "selective"}},
        {"training": {"compile_blocks": "on"}, "model": {"gradient_checkpointing": "full"}},
    ],
    ids=["full", "selective", "compiled"],
)
def test_recomputed_and_compiled_blocks_use_the_same_experts(text_model: Path, changes: dict[str, Any]) -> None:
    policy = policy_of(text_model)
    samples = samples_for(text_model, policy)
    plain = gradient(policy, [samples])
    assert apart(gradient(policy_of(text_model), [[replace(s, routes=None) for s in samples]]), plain) > 0.1
    assert apart(gradient(policy_of(text_model, **changes), [samples]), plain) < 2e-6
    assert apart(gradient(policy_of(text_model, **changes), [[s] for s in samples]), plain) < 2e-6


def test_adapters_train_with_the_samplers_experts(text_model: Path) -> None:
    policy = policy_of(text_model, model={"lora": {"rank": 4, "alpha": 8.0}})
    samples = samples_for(text_model, policy)
    whole = policy_of(text_model).logprobs([samples])[0]
    for one, other in zip(policy.logprobs([samples])[0], whole, strict=True):  # B is 0 at first
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    totals = StepTotals(sum(s.num_trained for s in samples), len(samples))
    assert policy.update([samples], totals, 0.0, 0.0).grad_norm > 0


def _rank(rank: int, world: int, model: str, out: str) -> None:
    config = settings(training={"sequence_parallel": world}, resources={"workers": world})
    policy = toy.policy(Path(model), config, init_device_mesh("cpu", (world,)))
    samples = samples_for(Path(model), policy, 5)
    logprobs = [found.logprobs for found in policy.logprobs([samples])[0]]
    vector, _ = toy.step_gradient(policy, [samples])
    differ = means(policy, samples)["rollout/routes_differ"]
    if rank == 0:
        torch.save({"gradient": vector, "logprobs": np.concatenate(logprobs), "differ": differ}, out)


def test_ranks_that_share_a_row_use_the_same_experts(tmp_path: Path) -> None:
    model, found = make_model(tmp_path / "model", "qwen3_vl_moe"), {}
    for world in (1, 2):
        on_ranks(world, _rank, str(model), str(tmp_path / f"{world}.pt"))
        found[world] = torch.load(tmp_path / f"{world}.pt", weights_only=False)
    assert apart(found[2]["gradient"], found[1]["gradient"]) < 3e-6
    np.testing.assert_allclose(found[2]["logprobs"], found[1]["logprobs"], atol=1e-5)
    assert found[1]["differ"] > 0.5
    assert found[2]["differ"] == pytest.approx(found[1]["differ"], abs=1e-3)


def test_a_row_has_the_routes_of_its_tokens(text_model: Path) -> None:
    first, second = with_routes(toy.samples(2, group=2, text_only=True), LAYERS)
    row = pack([first, second, replace(first, routes=None, token_ids=first.token_ids[::-1].copy())],
               layout=None, features=None).routes  # fmt: skip
    assert row is not None
    prompt, ends = first.num_prompt, (first.num_tokens, second.num_tokens)
    other, start = prompt, 2 * prompt  # the prompt of the third sample, then the completions
    assert np.array_equal(row[:prompt], first.routes[:prompt])
    assert (row[other:start] == -1).all()
    for sample, end in zip((first, second), ends, strict=True):
        own = row[start : start + end - prompt]
        assert np.array_equal(own[:-1], sample.routes[prompt:])
        assert (own[-1] == -1).all()
        start += len(own)
    assert (row[start:] == -1).all()
    assert pack([replace(first, routes=None)], layout=None, features=None).routes is None


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="qwen3 has no experts"):
        policy_of(make_model(tmp_path / "model", "qwen3"))


def test_routes_of_another_model_are_refused(text_model: Path) -> None:
    policy = policy_of(text_model)
    samples = with_routes(toy.samples(2, text_only=True), LAYERS - 1)
    with pytest.raises(ValueError, match="2 layers, and this model has 3"):
        policy.logprobs([samples])
