"""An independent oracle: loss and gradient of every parameter equal those of TRL's GRPOTrainer on the same tokens.

TRL pads and runs transformers' own attention; ours packs. Needs the extra ``oracle``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rlcore.algorithms import advantage
from rlcore.algorithms.divergence import masked_importance, truncated_importance
from rlcore.algorithms.loss import StepTotals
from rlcore.algorithms.objective import microbatch_loss
from rlcore.batch import pack
from rlcore.config import AlgorithmConfig
from rlcore.data.tiny import build_processor
from rlcore.distributed.group import with_high_entropy
from rlcore.models.packed import PackedModel
from rlcore.types import Floats, TrainingSample

PROMPTS, COMPLETIONS = (3, 5, 2, 4, 3, 6), (1, 5, 12, 3, 9, 2)  # tokens
BUDGET, TEMPERATURE, BETA = 12, 0.9, 0.3
ADVANTAGES = (1.2, -0.7, 0.4, -1.5, 0.9, -0.3)
TOKENIZER = build_processor().tokenizer
LOSS_TOLERANCE = 1e-6  # relative; the two float32 forward passes differ by as much in their log-probs
GRADIENT_TOLERANCE = 2e-6  # against the largest gradient of all


@dataclass(frozen=True)
class Case:
    """One algorithm in TRL's words and in ours."""

    trl: dict[str, Any]
    ours: dict[str, Any]
    noise: float = 0.4  # nats between new and old log-probs
    slack: float = 1.0  # times the tolerances


CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
PPO = {"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}
TIGHT = {"epsilon": 0.05, "epsilon_high": 0.08, "importance_sampling_level": "sequence"}
GSPO = {"name": "gspo", "clip_low": 0.05, "clip_high": 0.08}
CASES = {
    "grpo": Case({"loss_type": "grpo", **CLIP}, {"loss": PPO, "aggregation": "sequence_mean_token_mean"}),
    "dr_grpo": Case({"loss_type": "dr_grpo", **CLIP}, {"loss": PPO, "aggregation": "constant"}),
    "dapo": Case({"loss_type": "dapo", **CLIP}, {"loss": PPO, "aggregation": "token_mean"}),
    "bnpo": Case({"loss_type": "bnpo", **CLIP}, {"loss": PPO, "aggregation": "token_mean"}),
    "dual_clip": Case(
        {"loss_type": "dapo", "delta": 1.6, **CLIP},
        {"loss": PPO | {"dual_clip": 1.6}, "aggregation": "token_mean"},
        noise=1.0,
    ),
    "cispo": Case(
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"loss": {"name": "cispo", "max_ratio": 1.3}, "aggregation": "token_mean"},
    ),
    "sapo": Case(
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.4},
        {
            "loss": {"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.4},
            "aggregation": "sequence_mean_token_mean",
        },
    ),
    "cispo_sequence": Case(
        {"loss_type": "cispo", "epsilon_high": 1.02, "importance_sampling_level": "sequence"},
        {"loss": {"name": "cispo", "level": "sequence", "max_ratio": 1.02}, "aggregation": "token_mean"},
    ),
    "sapo_sequence": Case(
        {"loss_type": "sapo", "sapo_temperature_neg": 1.4, "importance_sampling_level": "sequence"},
        {
            "loss": {"name": "sapo", "level": "sequence", "tau_negative": 1.4},
            "aggregation": "sequence_mean_token_mean",
        },
    ),
    "top_entropy": Case(
        {"loss_type": "dapo", "top_entropy_quantile": 0.2, **CLIP},
        {"loss": PPO, "aggregation": "token_mean", "entropy_mask": {"share": 0.2}},
    ),
    "off_policy_mask": Case(
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05, **CLIP},
        {"loss": PPO, "aggregation": "sequence_mean_token_mean", "off_policy_mask": {"threshold": 0.05}},
    ),
    "gspo": Case({"loss_type": "grpo", **TIGHT}, {"loss": GSPO, "aggregation": "sequence_mean_token_mean"}),
    "gspo_token": Case(
        {"loss_type": "grpo", **TIGHT},
        {"loss": GSPO | {"name": "gspo_token"}, "aggregation": "sequence_mean_token_mean"},
    ),
    "luspo": Case({"loss_type": "luspo", **TIGHT}, {"loss": GSPO, "aggregation": "sequence_mean_token_sum"}),
    # the product over a sequence adds up the rounding of its tokens; how it falls differs between processors
    "vespo": Case(
        {"loss_type": "vespo"}, {"loss": {"name": "vespo"}, "aggregation": "token_mean"}, 0.2, slack=max(COMPLETIONS)
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 13,456 parameters, weights drawn wide enough that its distribution is not flat."""
    config = Qwen2Config(
        vocab_size=len(TOKENIZER),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    path = tmp_path_factory.mktemp("oracle")
    model.save_pretrained(path)
    return path


def build_trainer(
    folder: Path, reward: Callable[..., list[float | None]] | None = None, **settings: Any
) -> GRPOTrainer:
    arguments = {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "gradient_checkpointing": False,
        "per_device_train_batch_size": len(PROMPTS),
        "num_generations": 3,
        "max_completion_length": BUDGET,
        "temperature": TEMPERATURE,
        "use_bias_correction_kl": False,
    }
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=reward or (lambda completions, **_: [0.0] * len(completions)),
        args=GRPOConfig(**(arguments | settings)),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=TOKENIZER,
        rollout_func=_rollout,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    return trainer


def _rollout(prompts: list[Any], _: GRPOTrainer) -> dict[str, Any]:
    return {
        "prompt_ids": [[7, 8] for _ in prompts],
        "completion_ids": [[9, 10, 11] for _ in prompts],
        "logprobs": [[-1.0] * 3 for _ in prompts],
    }


def draw_samples(folder: Path, *, noise: float, on_policy: bool, with_reference: bool) -> list[TrainingSample]:
    """Old, reference and sampler log-probs lie around the model's own, so that ratios fall on all sides."""
    random = np.random.default_rng(0)
    samples = []
    for prompt, completion, value in zip(PROMPTS, COMPLETIONS, ADVANTAGES, strict=True):
        mask = np.arange(prompt + completion) >= prompt
        samples.append(
            TrainingSample(
                token_ids=random.integers(0, len(TOKENIZER), len(mask)).astype(np.int32),
                loss_mask=mask,
                sampler_logprobs=np.zeros(len(mask), np.float32),
                images=(),
                policy_version=0,
                advantages=np.where(mask, value, 0).astype(np.float32),
            )
        )
    with torch.no_grad():
        own = our_model(folder)(pack(samples, layout=None, features=None))[0].numpy()
    parts = np.split(own, np.cumsum(COMPLETIONS)[:-1])

    def around(part: Floats, sample: TrainingSample, by: float) -> Floats:
        return filled(sample, part + random.normal(0, by, len(part)).astype(np.float32))

    return [
        replace(
            sample,
            sampler_logprobs=around(part, sample, 0.3),
            old_logprobs=None if on_policy else around(part, sample, noise),
            ref_logprobs=around(part, sample, 0.5) if with_reference else None,
        )
        for sample, part in zip(samples, parts, strict=True)
    ]


def filled(sample: TrainingSample, values: Floats) -> Floats:
    """[L] the values on the trained tokens, 0 elsewhere."""
    out = np.zeros(sample.num_tokens, np.float32)
    out[sample.loss_mask] = values
    return out


def our_model(folder: Path) -> PackedModel:
    hf = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return PackedModel(hf, temperature=TEMPERATURE, banned_token_ids=[])


def padded(samples: list[TrainingSample]) -> dict[str, Tensor]:
    """What TRL's ``_generate_and_score_completions`` hands to ``_compute_loss``: prompts left, completions right."""
    prompt_width = max(s.num_tokens - s.num_trained for s in samples)
    width = max(s.num_trained for s in samples)

    def left(s: TrainingSample, values: np.ndarray, fill: int) -> Tensor:
        part = values[~s.loss_mask]
        return torch.from_numpy(np.concatenate([np.full(prompt_width - len(part), fill), part])).long()

    def right(s: TrainingSample, values: np.ndarray, fill: float) -> Tensor:
        part = values[s.loss_mask]
        return torch.from_numpy(np.concatenate([part, np.full(width - len(part), fill, part.dtype)]))

    pad = TOKENIZER.pad_token_id
    inputs = {
        "prompt_ids": torch.stack([left(s, s.token_ids, pad) for s in samples]),
        "prompt_mask": torch.stack([left(s, np.ones(s.num_tokens), 0) for s in samples]),
        "completion_ids": torch.stack([right(s, s.token_ids, pad) for s in samples]).long(),
        "completion_mask": torch.stack([right(s, np.ones(s.num_tokens), 0) for s in samples]).long(),
        "advantages": torch.tensor([float(s.advantages[-1]) for s in samples]),
        "num_items_in_batch": torch.tensor(sum(s.num_trained for s in samples)),
    }
    for ours, theirs in (
        ("sampler_logprobs", "sampling_per_token_logps"),
        ("old_logprobs", "old_per_token_logps"),
        ("ref_logprobs", "ref_per_token_logps"),
    ):
        if getattr(samples[0], ours) is not None:
            inputs[theirs] = torch.stack([right(s, getattr(s, ours), 0) for s in samples])
    return inputs


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def of_trl(trainer: GRPOTrainer, parts: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients accumulated over the microbatches of one optimizer step."""
    total = 0.0
    trainer.model.zero_grad()
    for inputs in parts:
        loss = trainer._compute_loss(trainer.model, inputs)
        loss.backward()
        total += float(loss.detach())
    return total, gradients(trainer.model)


def of_ours(
    folder: Path, algorithm: dict[str, Any], parts: list[list[TrainingSample]], beta: float
) -> tuple[float, dict[str, Tensor]]:
    model = our_model(folder)
    config = AlgorithmConfig.model_validate(algorithm)
    every = [s for part in parts for s in part]
    if config.entropy_mask is not None:
        with torch.no_grad():
            entropies = [model(pack([s], layout=None, features=None))[1].numpy() for s in every]
        every = [replace(s, entropies=filled(s, values)) for s, values in zip(every, entropies, strict=True)]
        masked = iter(with_high_entropy(every, config.entropy_mask.share))
        parts = [[next(masked) for _ in part] for part in parts]
    totals = StepTotals(tokens=sum(s.num_trained for s in every), sequences=len(every))
    total = 0.0
    for part in parts:
        batch = pack(part, layout=None, features=None)
        loss, _ = microbatch_loss(
            batch,
            model(batch),
            config,
            totals,
            kl_coefficient=beta,
            max_completion_tokens=BUDGET,
        )
        loss.backward()
        total += float(loss.detach())
    return total, gradients(model.hf)


def assert_equal(ours: tuple[float, dict[str, Tensor]], theirs: tuple[float, dict[str, Tensor]], slack: float) -> None:
    largest = max(float(g.abs().max()) for g in theirs[1].values())
    assert largest > 1e-2
    assert ours[0] == pytest.approx(theirs[0], rel=slack * LOSS_TOLERANCE, abs=slack * LOSS_TOLERANCE)
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in ours[1].items():
        assert float((gradient - theirs[1][name]).abs().max()) <= slack * GRADIENT_TOLERANCE * largest, name


@pytest.mark.parametrize("beta", [0.0, BETA], ids=["no_kl", "kl"])
@pytest.mark.parametrize("on_policy", [True, False], ids=["on_policy", "off_policy"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(folder: Path, name: str, on_policy: bool, beta: float) -> None:
    case = CASES[name]
    samples = draw_samples(folder, noise=case.noise, on_policy=on_policy, with_reference=beta > 0)
    trainer = build_trainer(folder, beta=beta, **case.trl)
    theirs = of_trl(trainer, [padded(samples)])
    assert_equal(of_ours(folder, case.ours, [samples], beta), theirs, case.slack)
    assert_equal(of_ours(folder, case.ours, [samples[:1], samples[3:], samples[1:3]], beta), theirs, case.slack)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"])
def test_straight_through_is_trls_bias_corrected_kl_on_policy(folder: Path, name: str) -> None:
    """TRL's default multiplies k3 by the ratio, gradient included; at ratio 1 that is the gradient of k2."""
    case = CASES[name]
    samples = draw_samples(folder, noise=case.noise, on_policy=True, with_reference=True)
    trainer = build_trainer(folder, beta=BETA, use_bias_correction_kl=True, **case.trl)
    ours = of_ours(folder, case.ours | {"kl": {"estimator": "straight_through"}}, [samples], BETA)
    assert_equal(ours, of_trl(trainer, [padded(samples)]), case.slack)


@pytest.mark.parametrize("on_policy", [True, False], ids=["on_policy", "off_policy"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo"])
def test_weighted_k3_is_trls_bias_corrected_kl(folder: Path, name: str, on_policy: bool) -> None:
    case = CASES[name]
    samples = draw_samples(folder, noise=case.noise, on_policy=on_policy, with_reference=True)
    trainer = build_trainer(folder, beta=BETA, use_bias_correction_kl=True, **case.trl)
    ours = of_ours(folder, case.ours | {"kl": {"estimator": "k3_weighted"}}, [samples[:2], samples[2:]], BETA)
    assert_equal(ours, of_trl(trainer, [padded(samples)]), case.slack)


def test_the_masks_of_the_cases_mask_some_and_not_all(folder: Path) -> None:
    samples = draw_samples(folder, noise=0.4, on_policy=True, with_reference=False)
    losses = {name: of_ours(folder, CASES[name].ours, [samples], 0.0)[0] for name in ("dapo", "grpo")}
    for name, plain in (("top_entropy", "dapo"), ("off_policy_mask", "grpo")):
        assert of_ours(folder, CASES[name].ours, [samples], 0.0)[0] not in (0.0, losses[plain])


@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize(
    ("name", "level"),
    # in VESPO's kernel TRL has only token weights
    [*product(["grpo", "dapo", "gspo", "cispo"], ["token", "sequence"]), ("vespo", "token")],
)
def test_correction_of_the_samplers_mismatch(folder: Path, name: str, kind: str, level: str) -> None:
    """TRL's vLLM importance sampling; the ratio that it would get from vLLM is fed in, made by our own functions."""
    case = CASES[name]
    samples = draw_samples(folder, noise=case.noise, on_policy=False, with_reference=True)
    inputs = padded(samples)
    old = torch.from_numpy(np.concatenate([s.old_logprobs[s.loss_mask] for s in samples]))
    sampler = torch.from_numpy(np.concatenate([s.sampler_logprobs[s.loss_mask] for s in samples]))
    index = torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(COMPLETIONS))
    of_sequence = index if level == "sequence" else None
    if kind == "truncate":
        weights = truncated_importance(old, sampler, of_sequence, max_weight=1.2)
    else:
        weights = masked_importance(old, sampler, of_sequence, min_weight=0.6, max_weight=1.2)
    mask = inputs["completion_mask"].bool()
    inputs["importance_sampling_ratio"] = torch.ones(mask.shape).masked_scatter(mask, weights)
    trainer = build_trainer(folder, beta=BETA, **case.trl)
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    correction = {"name": kind, "level": level, "max_weight": 1.2} | ({"min_weight": 0.6} if kind == "mask" else {})
    ours = of_ours(folder, case.ours | {"correction": correction}, [samples], BETA)
    assert_equal(ours, of_trl(trainer, [inputs]), case.slack)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "gspo", "luspo", "vespo"])
def test_accumulated_over_equal_microbatches(folder: Path, name: str) -> None:
    case = CASES[name]
    samples = draw_samples(folder, noise=case.noise, on_policy=False, with_reference=False)
    settings = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    trainer = build_trainer(folder, **case.trl, **settings)
    halves = [padded(samples[:3]), padded(samples[3:])]
    for half in halves:
        half["num_items_in_batch"] = torch.tensor(sum(COMPLETIONS))
    assert_equal(of_ours(folder, case.ours, [samples], 0.0), of_trl(trainer, halves), case.slack)


def test_trls_bnpo_is_a_mean_of_local_means(folder: Path) -> None:
    """The difference that docs/algorithms.md tells of: accumulated, it is no longer the token mean."""
    case = CASES["bnpo"]
    samples = draw_samples(folder, noise=case.noise, on_policy=False, with_reference=False)
    trainer = build_trainer(folder, **case.trl, per_device_train_batch_size=3, gradient_accumulation_steps=2)
    theirs, _ = of_trl(trainer, [padded(samples[:3]), padded(samples[3:])])
    whole, _ = of_ours(folder, case.ours, [samples], 0.0)
    local = [of_ours(folder, case.ours, [part], 0.0)[0] for part in (samples[:3], samples[3:])]
    assert theirs == pytest.approx(sum(local) / 2, rel=1e-5)
    assert theirs != pytest.approx(whole, rel=1e-2)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_up_to_trls_epsilon(folder: Path, scale: str) -> None:
    """TRL divides by deviation + 1e-4. Times that, its advantages are ours times the deviation."""
    rewards = [1.0, 0.25, 0.0, None, 0.5, 0.75]
    trainer = build_trainer(folder, reward=lambda **_: rewards, scale_rewards=scale)
    theirs = trainer._generate_and_score_completions([{"prompt": "a"}] * 3 + [{"prompt": "b"}] * 3)["advantages"]
    batch = torch.tensor([r if r is not None else torch.nan for r in rewards], dtype=torch.float64).view(2, 3)
    graded = ~batch.isnan()
    if scale == "none":
        ours, deviations = advantage.dr_grpo(batch, graded), torch.ones(2, 1, dtype=torch.float64)
        epsilon = 0.0
    elif scale == "batch":
        ours, deviations = advantage.batch_std(batch, graded), batch[graded].std().expand(2, 1)
        epsilon = 1e-4
    else:
        ours = advantage.grpo(batch, graded, std="sample")
        deviations = torch.stack([row[ok].std() for row, ok in zip(batch, graded, strict=True)])[:, None]
        epsilon = 1e-4
    scaled = theirs.double().view(2, 3) * (deviations + epsilon)
    torch.testing.assert_close(scaled, ours.values * deviations, rtol=1e-6, atol=1e-7)
