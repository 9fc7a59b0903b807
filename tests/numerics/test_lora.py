"""Adapters and frozen parts: what trains, what stays, and that the adapted policy is one and the same everywhere."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForImageTextToText, Qwen2Config, Qwen2ForCausalLM

from rlcore.algorithms.loss import StepTotals
from rlcore.config import ExperimentConfig, LoraConfig, ModelConfig
from rlcore.errors import CheckpointError
from rlcore.jobs.merge import merge_checkpoint
from rlcore.models.lora import A, AdaptedLinear, B, choose_trainable, draw_adapters, is_adapter
from rlcore.models.torch_policy import TorchPolicy
from rlcore.types import TrainingSample
from tests.numerics import toy
from tests.ranks import on_ranks, whole
from tests.train_states import load_full_weights

LORA = LoraConfig(rank=4, alpha=12.0)


def settings(
    *,
    lora: LoraConfig | None = LORA,
    freeze: bool = False,
    kl: float = 0.0,
    checkpointing: bool = False,
    optimizer: str = "adamw",
) -> ExperimentConfig:
    config = toy.config(kl={"coefficient": kl})
    model = {"lora": lora, "freeze_vision_tower": freeze, "gradient_checkpointing": "full" if checkpointing else "none"}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update=model),
            "training": config.training.model_copy(update={"optimizer": optimizer}),
        }
    )


def totals(samples: list[TrainingSample]) -> StepTotals:
    return StepTotals(sum(s.num_trained for s in samples), len(samples))


def train(policy: TorchPolicy, steps: int, rate: float = 1e-2) -> None:
    for step in range(steps):
        samples = toy.samples(6, group=3, seed=step)
        policy.update([samples[:4], samples[4:]], totals(samples), rate, kl_coefficient=0.0)


def state(policy: TorchPolicy) -> dict[str, Tensor]:
    """Every number that training depends on, unsharded, by name."""
    tensors = {name: whole(value) for name, value in policy.model.hf.state_dict().items()}
    for name, parameter in policy.model.hf.named_parameters():
        for key, value in policy.optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{key}"] = whole(value)
    return tensors


def gradients(policy: TorchPolicy, plan: list[list[TrainingSample]]) -> dict[str, Tensor]:
    """Of one optimizer step, before AdamW sees them and before clipping."""
    taken: dict[str, Tensor] = {}

    def keep() -> None:
        for name, parameter in policy.model.hf.named_parameters():
            if parameter.grad is not None:
                taken[name] = whole(parameter.grad)

    step, policy.optimizer.step = policy.optimizer.step, keep  # type: ignore[method-assign]
    result = policy.update(plan, totals([s for m in plan for s in m]), 1e-3, kl_coefficient=0.0)
    policy.optimizer.step = step  # type: ignore[method-assign]
    factor = max(1.0, result.grad_norm / policy.config.training.max_grad_norm)
    return {name: value * factor for name, value in taken.items()}


def logprobs(policy: TorchPolicy, samples: list[TrainingSample], *, reference: bool = False) -> np.ndarray:
    return np.concatenate([s.logprobs for s in policy.logprobs([samples], reference=reference)[0]])


def text_model(vocabulary: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **heads}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=vocabulary, initializer_range=0.3, **sizes))


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_step_0_and_the_reference_equal_the_base_bit_for_bit(tiny_model: Path) -> None:
    samples = toy.samples(6)
    base = logprobs(toy.policy(tiny_model, settings(lora=None)), samples)
    policy = toy.policy(tiny_model, settings(kl=0.1))
    assert policy.reference is None  # no second copy of the model
    np.testing.assert_array_equal(logprobs(policy, samples), base)
    train(policy, 3)
    assert np.abs(logprobs(policy, samples) - base).max() > 1e-2
    np.testing.assert_array_equal(logprobs(policy, samples, reference=True), base)
    assert np.abs(logprobs(policy, samples) - base).max() > 1e-2  # switched on again


def test_every_linear_layer_of_the_language_model_is_adapted_and_only_adapters_train(each_model: Path) -> None:
    policy = toy.policy(each_model, settings())
    before = {name: value for name, value in state(policy).items()}
    layers = policy.model.hf.config.text_config.num_hidden_layers
    adapted = [name for name, module in policy.model.hf.named_modules() if isinstance(module, AdaptedLinear)]
    assert len(adapted) == 7 * layers  # q, k, v, o, gate, up, down
    assert all(name.startswith("model.language_model.layers.") for name in adapted)
    trained = {name for name, parameter in policy.model.hf.named_parameters() if parameter.requires_grad}
    assert trained == {name + part for name in adapted for part in (A, B)}
    found = gradients(policy, [toy.samples(4)])
    assert found.keys() == trained
    train(policy, 2)
    after = state(policy)
    assert {name for name in before if not torch.equal(before[name], after[name])} == trained
    held = sum(len(group["params"]) for group in policy.optimizer.param_groups)
    assert held == len(trained) == len(policy.optimizer.state)


def test_the_vision_tower_is_adapted_on_demand(each_model: Path) -> None:
    policy = toy.policy(each_model, settings(lora=LORA.model_copy(update={"vision_tower": True})))
    adapted = [name for name, module in policy.model.hf.named_modules() if isinstance(module, AdaptedLinear)]
    assert any("visual.blocks.0.attn.qkv" in name for name in adapted)
    assert any("visual.merger." in name for name in adapted)
    assert not any("lm_head" in name for name in adapted)
    train(policy, 1)
    found = gradients(policy, [toy.samples(4)])
    assert all(value.any() for name, value in found.items() if "visual" in name and name.endswith(A))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_that_of_the_merged_model(each_model: Path, tmp_path: Path, checkpointing: bool) -> None:
    """For W' = W + s B A the chain rule gives dB = s dW' A^T and dA = s B^T dW'; dW' from a model that holds W'."""
    config = settings(checkpointing=checkpointing)
    policy = toy.policy(each_model, config)
    train(policy, 2)
    samples = toy.samples(6)
    found = gradients(policy, [samples[:3], samples[3:]])
    adapters = {name: value for name, value in state(policy).items() if is_adapter(name)}
    toy.save(policy, tmp_path / "checkpoint")
    merge_checkpoint(tmp_path / "checkpoint", each_model, tmp_path / "merged")
    full = toy.policy(tmp_path / "merged", settings(lora=None))
    scale = LORA.alpha / LORA.rank
    outer = gradients(full, [samples[:3], samples[3:]])
    expected = {}
    for name in found:
        if name.endswith(A):
            module = name.removesuffix(A)
            whole_gradient = outer[f"{module}.weight"]
            expected[module + B] = scale * whole_gradient @ adapters[module + A].T
            expected[module + A] = scale * adapters[module + B].T @ whole_gradient
    assert expected.keys() == found.keys()
    a, b = flat(found), flat(expected)
    assert b.norm() > 0
    assert float((a - b).norm() / b.norm()) < 3e-6  # float32: W' is rounded once more than W x + s B A x is


def test_adapters_are_reproducible_and_differ_by_seed_and_layer(tiny_model: Path) -> None:
    def drawn(seed: int) -> dict[str, Tensor]:
        hf = AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32)
        torch.manual_seed(int.from_bytes(os.urandom(4)))
        choose_trainable(hf, ModelConfig(lora=LORA))
        adapters = draw_adapters(hf, seed)
        assert adapters.keys() == {name for name in hf.state_dict() if is_adapter(name)}
        return adapters

    first, again, other = drawn(0), drawn(0), drawn(1)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert all(torch.equal(value, other[name]) == name.endswith(B) for name, value in first.items())
    ups = [value for name, value in first.items() if "up_proj" in name and name.endswith(A)]
    assert not torch.equal(ups[0], ups[1])
    bound = 1 / ups[0].shape[1] ** 0.5  # kaiming_uniform with a = sqrt(5): |A| <= sqrt(6 / (6 in))
    assert 0.9 * bound < float(ups[0].abs().max()) <= bound


def test_peft_computes_the_same_with_this_adapter(tmp_path: Path) -> None:
    """An outside witness, on a text model: PEFT's own layers with our tensors under PEFT's names."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model, set_peft_model_state_dict

    base = text_model(64).eval()
    base.save_pretrained(tmp_path)
    choose_trainable(base, ModelConfig(lora=LORA))
    base.load_state_dict(draw_adapters(base, 0), strict=False, assign=True)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith(B):
                parameter.normal_(std=0.2)
    tokens = torch.randint(0, 64, (2, 9))
    theirs = get_peft_model(
        Qwen2ForCausalLM.from_pretrained(tmp_path),
        PeftConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).eval()
    adapters = {f"base_model.model.{name}": v for name, v in base.state_dict().items() if is_adapter(name)}
    assert not set_peft_model_state_dict(theirs, adapters).unexpected_keys
    wanted = {name for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(wanted) == len(adapters) == 2 * 14  # the same layers: all but the head
    with torch.no_grad():
        torch.testing.assert_close(base(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16"])
def test_resume_is_exact_and_the_checkpoint_holds_only_adapters(
    tiny_model: Path, tmp_path: Path, optimizer: str
) -> None:
    config = settings(optimizer=optimizer)
    policy = toy.policy(tiny_model, config)
    train(policy, 2)
    toy.save(policy, tmp_path)
    adapters = [p.numel() for p in policy.model.parameters() if p.requires_grad]
    entries = FileSystemReader(tmp_path / "train_state").read_metadata().state_dict_metadata.values()
    tensors = [entry for entry in entries if isinstance(entry, TensorStorageMetadata)]
    stored = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)
    each = 3 * 4 if optimizer == "adamw" else 4 * 2
    assert stored == each * sum(adapters) + 4 * len(adapters) + 8  # each adapter's step, and alpha
    other = toy.policy(tiny_model, config.model_copy(update={"seed": 5}))
    other.load(tmp_path)
    before, after = state(policy), state(other)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    train(policy, 2)
    train(other, 2)
    before, after = state(policy), state(other)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_a_checkpoint_of_another_shape_or_alpha_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    policy = toy.policy(tiny_model, settings())
    toy.save(policy, tmp_path)
    with pytest.raises(CheckpointError, match=r"alpha 12, the model has 4"):
        toy.policy(tiny_model, settings(lora=LoraConfig(rank=4, alpha=4))).load(tmp_path)
    with pytest.raises(CheckpointError, match="lora_A.weight: checkpoint"):
        toy.policy(tiny_model, settings(lora=LoraConfig(rank=8, alpha=12))).load(tmp_path)
    with pytest.raises(CheckpointError, match="checkpoint only: .*lora_A.weight"):
        toy.policy(tiny_model, settings(lora=None)).load(tmp_path)


def test_the_merged_model_is_the_adapted_policy(each_model: Path, tmp_path: Path) -> None:
    policy = toy.policy(each_model, settings())
    train(policy, 3)
    toy.save(policy, tmp_path / "checkpoint")
    samples = toy.samples(6)
    expected = logprobs(policy, samples)
    merge_checkpoint(tmp_path / "checkpoint", each_model, tmp_path / "merged")
    found = logprobs(toy.policy(tmp_path / "merged", settings(lora=None)), samples)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    base = AutoModelForImageTextToText.from_pretrained(each_model, dtype=torch.float32).state_dict()
    weights = load_full_weights(tmp_path / "checkpoint", each_model)
    assert {name for name, value in weights.items() if not torch.equal(value, base[name])} == {
        name.removesuffix(A) + ".weight" for name in state(policy) if name.endswith(A)
    }


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_frozen_vision_tower_stays_and_the_rest_trains_as_before(tiny_model: Path, checkpointing: bool) -> None:
    policy = toy.policy(tiny_model, settings(lora=None, freeze=True, checkpointing=checkpointing))
    every = toy.policy(tiny_model, settings(lora=None))
    plan = [toy.samples(4), toy.samples(2, text_only=True)]
    found, expected = gradients(policy, plan), gradients(every, plan)
    assert {name for name in expected if name not in found} == {name for name in expected if "visual" in name}
    rest = {name: expected[name] for name in found}
    assert float((flat(found) - flat(rest)).norm() / flat(rest).norm()) < 1e-6
    before = state(policy)
    train(policy, 2)
    after = state(policy)
    assert all(torch.equal(value, after[name]) == ("visual" in name) for name, value in before.items())
    assert not any("visual" in name for name in after if "/" in name)  # no optimizer state
    assert dict(policy.full_weights()).keys() == dict(every.full_weights()).keys()  # synced whole


def test_a_checkpoint_with_a_frozen_tower_is_whole(tiny_model: Path, tmp_path: Path) -> None:
    policy = toy.policy(tiny_model, settings(lora=None, freeze=True))
    train(policy, 1)
    toy.save(policy, tmp_path)
    weights, expected = load_full_weights(tmp_path), dict(policy.full_weights())
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    assert any("visual" in name for name in weights)
    other = toy.policy(tiny_model, settings(lora=None, freeze=True))
    other.load(tmp_path)
    assert state(other).keys() == state(policy).keys()


@pytest.mark.parametrize("model", [ModelConfig(lora=LORA), ModelConfig(freeze_vision_tower=True)])
def test_a_text_model_trains_too(model: ModelConfig) -> None:
    hf = text_model(300)
    config = settings().model_copy(update={"model": model})
    weights, mesh = toy.emptied(hf), toy.one_rank_mesh()
    policy = TorchPolicy(hf, config, weights=weights, mesh=mesh, banned_token_ids=[], features=None)
    samples = [replace(s, token_ids=s.token_ids % 300) for s in toy.samples(4, text_only=True)]
    before = logprobs(policy, samples)
    policy.update([samples], totals(samples), 1e-2, kl_coefficient=0.0)
    assert np.abs(logprobs(policy, samples) - before).max() > 1e-3
    count = len(policy.optimizer.state)
    assert count == (2 * 14 if model.lora else len(list(policy.model.parameters())))


def test_adapters_stay_in_float32_with_weights_in_bfloat16(tiny_model: Path, tmp_path: Path) -> None:
    config = settings()
    config = config.model_copy(update={"model": config.model.model_copy(update={"compute_dtype": "bfloat16"})})
    policy = toy.policy(tiny_model, config)
    samples = toy.samples(4)
    base = logprobs(policy, samples)
    train(policy, 2)
    assert {p.dtype for p in policy.model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in policy.model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert np.abs(logprobs(policy, samples) - base).max() > 1e-2
    np.testing.assert_array_equal(logprobs(policy, samples, reference=True), base)
    toy.save(policy, tmp_path / "checkpoint")
    merge_checkpoint(tmp_path / "checkpoint", tiny_model, tmp_path / "merged")
    merged_policy = toy.policy(tmp_path / "merged", settings(lora=None))
    np.testing.assert_allclose(logprobs(merged_policy, samples), logprobs(policy, samples), atol=0.3)


@pytest.mark.parametrize("compute", ["auto", "float32"])
def test_everything_in_bfloat16_trains_syncs_and_merges(tiny_model: Path, tmp_path: Path, compute: str) -> None:
    config = settings(lora=None, optimizer="adamw_bf16", kl=0.1)
    config = config.model_copy(update={"model": config.model.model_copy(update={"compute_dtype": compute})})
    policy = toy.policy(tiny_model, config)
    samples = toy.samples(4)
    np.testing.assert_array_equal(logprobs(policy, samples), logprobs(policy, samples, reference=True))
    train(policy, 2, rate=1e-3)
    numbers = state(policy)
    assert {value.dtype for name, value in numbers.items() if not name.endswith("/step")} == {torch.bfloat16}
    assert all(value.dtype == torch.bfloat16 for _, value in policy.full_weights())
    toy.save(policy, tmp_path / "checkpoint")
    merge_checkpoint(tmp_path / "checkpoint", tiny_model, tmp_path / "merged")
    found = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(value, numbers[name].float()) for name, value in found.items())


def _rank(rank: int, world: int, model: str, folder: str) -> None:
    policy = toy.policy(Path(model), settings(), init_device_mesh("cpu", (world,)))
    samples = toy.samples(6, group=2)
    mine = [samples] if world == 1 else [samples[rank::world], []]
    sums = gradients_of_ranks(policy, mine, samples)
    out = {"gradients": sums}
    policy.update(mine, totals(samples), 1e-3, kl_coefficient=0.0)
    out["state"] = state(policy)
    out["sent"] = {name: value.clone() for name, value in policy.adapter_weights()}
    out["reference"] = {"logprobs": torch.from_numpy(logprobs(policy, samples, reference=True))}
    toy.save(policy, Path(folder) / f"checkpoint-{world}")
    if world == 2:
        policy.load(Path(folder) / "checkpoint-1")
        out["loaded"] = state(policy)
    if rank == 0:
        torch.save(out, f"{folder}/world-{world}.pt")


def gradients_of_ranks(
    policy: TorchPolicy, mine: list[list[TrainingSample]], samples: list[TrainingSample]
) -> dict[str, Tensor]:
    taken: dict[str, Tensor] = {}
    step = policy.optimizer.step
    policy.optimizer.step = lambda: taken.update(  # type: ignore[method-assign]
        {n: whole(p.grad) for n, p in policy.model.hf.named_parameters() if p.requires_grad}
    )
    policy.update(mine, totals(samples), 1e-3, kl_coefficient=0.0)
    policy.optimizer.step = step  # type: ignore[method-assign]
    return taken


def test_two_ranks_train_the_adapters_of_one(each_model: Path, tmp_path: Path) -> None:
    found = {}
    for world in (1, 2):
        on_ranks(world, _rank, str(each_model), str(tmp_path))
        found[world] = torch.load(tmp_path / f"world-{world}.pt", weights_only=True)
    one, two = found[1], found[2]
    a, b = flat(one["gradients"]), flat(two["gradients"])
    assert a.norm() > 0
    assert float((a - b).norm() / a.norm()) < 1e-6
    same = (flat(one["state"]) - flat(two["state"])).abs() < 1e-5
    assert same.float().mean() > 0.999  # AdamW's first step divides by |g|: float noise around 0 decides a sign
    assert one["sent"].keys() == two["sent"].keys()
    torch.testing.assert_close(one["reference"], two["reference"], atol=1e-5, rtol=0)
    assert all(torch.equal(value, two["loaded"][name]) for name, value in one["state"].items())  # elastic
    names = partial(load_full_weights, base=each_model)
    assert names(tmp_path / "checkpoint-1").keys() == names(tmp_path / "checkpoint-2").keys()
