"""Promise 1: the gradient is one number, however the step is split, packed or ordered."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rlcore.algorithms import advantage
from rlcore.algorithms.logprobs import linear_logprobs
from rlcore.algorithms.loss import StepTotals, high_entropy
from rlcore.algorithms.objective import PolicyTokens, StepSums, microbatch_loss
from rlcore.batch import Microbatch, Segments, trained_positions, trained_sequences
from rlcore.config import AlgorithmConfig
from tests.numerics import reference

MODES = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
WIDTH, VOCABULARY, MAX_COMPLETION = 6, 9, 12
KL_COEFFICIENT, TEMPERATURE = 0.05, 0.8

# by name: the loss as it is configured, and what one sequence's tokens are worth by the formula alone
OfSequence = Callable[[list[float], list[float], float], list[float]]


def each(of_token: Callable[[float, float, float], float]) -> OfSequence:
    return lambda new, old, a: [of_token(n, o, a) for n, o in zip(new, old, strict=True)]


BAND = {"clip_low": 0.2, "clip_high": 0.28}
LOSSES: dict[str, tuple[dict[str, object], OfSequence]] = {
    "ppo_clip": ({"name": "ppo_clip", **BAND}, each(lambda n, o, a: reference.ppo_clip(n, o, a, 0.2, 0.28))),
    "dual_clip": (
        {"name": "ppo_clip", "dual_clip": 1.5, **BAND},
        each(lambda n, o, a: reference.ppo_clip(n, o, a, 0.2, 0.28, 1.5)),
    ),
    "gspo": ({"name": "gspo", **BAND}, lambda n, o, a: [reference.gspo(n, o, a, 0.2, 0.28)] * len(n)),
    "gspo_token": ({"name": "gspo_token", **BAND}, lambda n, o, a: [reference.gspo(n, o, a, 0.2, 0.28)] * len(n)),
    "cispo": (
        {"name": "cispo", "max_ratio": 1.3},
        lambda new, old, a: reference.cispo(new, old, a, 1.3, "token"),
    ),
    "cispo_sequence": (
        {"name": "cispo", "level": "sequence", "max_ratio": 1.05},
        lambda new, old, a: reference.cispo(new, old, a, 1.05, "sequence"),
    ),
    "sapo": (
        {"name": "sapo"},
        lambda new, old, a: [reference.sapo(r, a, 1.0, 1.05) for r in reference.ratios(new, old, "token")],
    ),
    "sapo_sequence": (
        {"name": "sapo", "level": "sequence"},
        lambda new, old, a: [reference.sapo(r, a, 1.0, 1.05) for r in reference.ratios(new, old, "sequence")],
    ),
    "vespo": (
        {"name": "vespo"},
        lambda new, old, a: [-reference.vespo_weight(new, old, a, (2.0, 3.0), (3.0, 2.0)) * a * n for n in new],
    ),
}
CORRECTIONS = {
    "none": None,
    "token": {"name": "truncate", "level": "token", "max_weight": 1.5},
    "sequence": {"name": "mask", "level": "sequence", "min_weight": 0.2, "max_weight": 3.0},
}


@dataclass(frozen=True)
class Sequence:
    hidden: Tensor  # [L, H], stands for what the decoder says
    tokens: Tensor  # [L]
    prompt: int
    old: Tensor  # [L]
    sampler: Tensor  # [L]
    ref: Tensor  # [L]
    entropy: Tensor  # [L], of the old policy
    advantage: float


MASKS = {
    "none": {},
    "entropy": {"entropy_mask": {"share": 0.3}},
    "off_policy": {"off_policy_mask": {"threshold": 0.05}},
}
MASKS["both"] = MASKS["entropy"] | MASKS["off_policy"]


def algorithm(loss: str, correction: str = "none", masks: str = "none", estimator: str = "k3") -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {
            "loss": LOSSES[loss][0],
            "correction": CORRECTIONS[correction],
            "kl": {"estimator": estimator},
            **MASKS[masks],
        }
    )


_NONE = torch.zeros(0, dtype=torch.int64)
# a microbatch of nothing: what the loss does not look at stays so
NOTHING = Microbatch(
    token_ids=_NONE,
    position_ids=_NONE,
    segments=Segments(_NONE, _NONE, _NONE, _NONE),
    predict_from=_NONE,
    targets=_NONE,
    sequence_index=_NONE,
    sequence_lengths=_NONE,
    sampler_logprobs=_NONE,
    advantages=_NONE,
    old_logprobs=None,
    truncation_logprobs=None,
    ref_logprobs=None,
    high_entropy=None,
    pixel_values=None,
    image_grid_thw=None,
    image_features=None,
    image_index=_NONE,
    image_rows=_NONE,
)


def make_step(dtype: torch.dtype) -> list[Sequence]:
    """Four groups of three ragged sequences; group 2 is all right, one member of group 3 is not graded."""
    generator = torch.Generator().manual_seed(7)

    def around(length: int) -> Tensor:
        return (-2.2 + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64)).to(dtype)

    rewards = torch.tensor([[1.0, 0.0, 0.1], [0.0, 0.1, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    graded = torch.ones_like(rewards, dtype=torch.bool)
    graded[3, 2] = False
    values = advantage.grpo(rewards, graded, std="sample").values
    sequences = []
    for group in range(4):
        for member in range(3):
            prompt = 1 + (group + member) % 3
            length = prompt + [1, 5, 2, 9][(2 * group + member) % 4]
            old = around(length)
            sequences.append(
                Sequence(
                    hidden=torch.randn(length, WIDTH, generator=generator, dtype=torch.float64).to(dtype),
                    tokens=torch.randint(0, VOCABULARY, (length,), generator=generator),
                    prompt=prompt,
                    old=old,
                    sampler=(old + 0.2 * (around(length) + 2.2)),
                    ref=around(length),
                    entropy=around(length).abs(),
                    advantage=float(values[group, member]),
                )
            )
    return sequences


def make_head(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).mul(0.3).to(dtype).requires_grad_()


def step_gradient(
    microbatches: list[list[Sequence]],
    mode: str,
    dtype: torch.dtype,
    config: AlgorithmConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the LM head, accumulated as the trainer does it."""
    config = config or algorithm("ppo_clip")
    head = make_head(dtype)
    everything = [s for batch in microbatches for s in batch]
    totals = StepTotals(tokens=sum(len(s.tokens) - s.prompt for s in everything), sequences=len(everything))
    total = torch.zeros((), dtype=torch.float64)
    kept = None
    if config.entropy_mask is not None:
        of_step = high_entropy(torch.cat([s.entropy[s.prompt :] for s in everything]), config.entropy_mask.share)
        kept = iter(of_step.split([sum(len(s.tokens) - s.prompt for s in batch) for batch in microbatches]))
    for batch in microbatches:
        mask = torch.cat([torch.arange(len(s.tokens)) >= s.prompt for s in batch])
        bounds = torch.tensor([0, *np.cumsum([len(s.tokens) for s in batch])])
        predict_from, token_index = trained_positions(mask, bounds)
        sequence_index, lengths = trained_sequences(mask, bounds)
        logprobs, entropy, truncation_logprobs = linear_logprobs(
            torch.cat([s.hidden for s in batch])[predict_from],
            head,
            torch.cat([s.tokens for s in batch])[token_index],
            temperature=TEMPERATURE,
            chunk_size=4,
        )
        of = {n: torch.cat([getattr(s, n) for s in batch])[token_index] for n in ("old", "ref", "sampler")}
        packed = replace(
            NOTHING,
            sequence_index=sequence_index,
            sequence_lengths=lengths,
            sampler_logprobs=of["sampler"],
            advantages=torch.tensor([s.advantage for s in batch], dtype=dtype)[sequence_index],
            old_logprobs=of["old"],
            truncation_logprobs=torch.zeros_like(of["old"]),
            ref_logprobs=of["ref"],
            high_entropy=None if kept is None else next(kept),
        )
        loss, _ = microbatch_loss(
            packed,
            PolicyTokens(logprobs, entropy, truncation_logprobs),
            config.model_copy(update={"aggregation": mode}),
            totals,
            kl_coefficient=KL_COEFFICIENT,
            max_completion_tokens=MAX_COMPLETION,
        )
        loss.backward()
        total += loss.detach().double()
    return total, head.grad


def oracle_loss(
    sequences: list[Sequence], mode: str, name: str, correction: str, masks: str = "none", estimator: str = "k3"
) -> float:
    """The same number from the formulas alone: python loops over one token at a time."""
    every = sorted((float(x) for s in sequences for x in s.entropy[s.prompt :]), reverse=True)
    lowest = every[math.ceil(0.3 * len(every)) - 1] if masks in ("entropy", "both") else 0.0
    head = make_head(torch.float64).detach().numpy()
    num_tokens = sum(len(s.tokens) - s.prompt for s in sequences)
    loss = 0.0
    for s in sequences:
        new = []
        for t in range(s.prompt, len(s.tokens)):
            logits = [float(np.dot(row, s.hidden[t - 1].numpy())) / TEMPERATURE for row in head]
            new.append(logits[int(s.tokens[t])] - math.log(sum(math.exp(x) for x in logits)))
        old, ref, sampler = (getattr(s, n)[s.prompt :].tolist() for n in ("old", "ref", "sampler"))
        ratios = reference.importance(old, sampler, [0] * len(new) if correction == "sequence" else None)
        factors = [
            {"none": 1.0, "token": min(r, 1.5), "sequence": r if 0.2 <= r <= 3.0 else 0.0}[correction] for r in ratios
        ]
        beside, before = factors, old
        if name == "vespo":  # its W contains the product of the tokens' weights, or the sequence's weight
            parts = factors if correction == "token" else [w ** (1 / len(new)) for w in factors]
            before = [o - (math.log(w) if w else 20.0) for o, w in zip(old, parts, strict=True)]
            beside = [1.0] * len(new)
        if masks in ("off_policy", "both") and s.advantage < 0 and np.mean(sampler) - np.mean(new) > 0.05:
            beside = [0.0] * len(new)
        beside = [w * (e >= lowest) for w, e in zip(beside, s.entropy[s.prompt :].tolist(), strict=True)]
        values = LOSSES[name][1](new, before, s.advantage)
        weight = reference.token_weight(
            mode, length=len(new), tokens=num_tokens, sequences=len(sequences), budget=MAX_COMPLETION
        )
        for token, value in enumerate(values):
            kl = reference.k3(new[token], ref[token])
            if estimator == "k3_weighted":
                kl *= factors[token] * math.exp(new[token] - old[token])
            loss += weight * (beside[token] * value + KL_COEFFICIENT * kl)
    return loss


def chunks(sequences: list[Sequence], size: int) -> list[list[Sequence]]:
    return [sequences[i : i + size] for i in range(0, len(sequences), size)]


def assert_same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], relative: float) -> None:
    assert abs(got[0] - expected[0]) <= relative * max(1.0, abs(expected[0]))  # terms of either sign cancel
    assert (got[1] - expected[1]).norm() <= relative * expected[1].norm()


each_choice = pytest.mark.parametrize(
    "choice",
    [
        *((name,) for name in LOSSES),
        *(("ppo_clip", "token"), ("ppo_clip", "sequence"), ("gspo", "sequence")),
        *(("vespo", "token"), ("vespo", "sequence")),
        *(("ppo_clip", "none", masks) for masks in MASKS if masks != "none"),
        *(("sapo_sequence", "token", "both"), ("vespo", "token", "both")),
        *(("ppo_clip", correction, "none", "k3_weighted") for correction in CORRECTIONS),
        ("vespo", "token", "both", "k3_weighted"),
    ],
    ids="-".join,
)
each_mode = pytest.mark.parametrize("mode", MODES)
each_dtype = pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])


@each_mode
@each_choice
def test_loss_equals_an_oracle_written_as_loops(choice, mode):
    step = make_step(torch.float64)
    loss, _ = step_gradient([step], mode, torch.float64, algorithm(*choice))
    name, correction, *others = [*choice, "none"][: max(2, len(choice))]
    assert_close(float(loss), oracle_loss(step, mode, name, correction, *others), rtol=1e-12, atol=0)


@each_dtype
@each_mode
@each_choice
def test_any_split_into_microbatches_gives_the_same_gradient(choice, mode, dtype, relative):
    step, config = make_step(dtype), algorithm(*choice)
    whole = step_gradient([step], mode, dtype, config)
    for split in (chunks(step, 1), chunks(step, 5), [step[:1], step[1:11], step[11:]]):
        assert_same(step_gradient(split, mode, dtype, config), whole, relative)


@each_dtype
@each_mode
@each_choice
def test_any_order_of_sequences_and_groups_gives_the_same_gradient(choice, mode, dtype, relative):
    step, config = make_step(dtype), algorithm(*choice)
    whole = step_gradient([step], mode, dtype, config)
    shuffled = [step[i] for i in torch.randperm(len(step), generator=torch.Generator().manual_seed(3))]
    within_groups = [s for group in chunks(step, 3) for s in reversed(group)]
    for order in (shuffled, within_groups, step[::-1]):
        assert_same(step_gradient(chunks(order, 4), mode, dtype, config), whole, relative)


def test_the_aggregations_are_different_objectives():
    step = make_step(torch.float64)
    losses = [float(step_gradient([step], mode, torch.float64)[0]) for mode in MODES]
    assert len({round(loss, 6) for loss in losses}) == 4


def test_the_masks_mask_some_tokens_here_and_not_all():
    step = make_step(torch.float64)
    configs = [algorithm("ppo_clip", "none", masks) for masks in MASKS]
    gradients = [step_gradient([step], "token_mean", torch.float64, config)[1] for config in configs]
    assert len({round(float(gradient.norm()), 9) for gradient in [*gradients, torch.zeros(1)]}) == 5


@each_mode
@pytest.mark.parametrize("name", LOSSES)
def test_a_group_without_signal_adds_exactly_nothing(name, mode, monkeypatch):
    monkeypatch.setattr(f"{__name__}.KL_COEFFICIENT", 0.0)
    step, config = make_step(torch.float64), algorithm(name)
    group = step[6:9]  # all right
    assert [s.advantage for s in group] == [0.0] * 3
    _, gradient = step_gradient([group], mode, torch.float64, config)
    assert torch.equal(gradient, torch.zeros_like(gradient))
    # its tokens may be anything: the rest of the step does not move by one bit
    other = [replace(s, hidden=s.hidden * 3, old=s.old - 1) for s in group]
    rest = [step[:6], group, step[9:]], [step[:6], other, step[9:]]
    first, second = (step_gradient(parts, mode, torch.float64, config) for parts in rest)
    assert torch.equal(first[1], second[1])


THREE_TOKENS = replace(
    NOTHING,
    sequence_index=torch.tensor([0, 0, 1]),
    sequence_lengths=torch.tensor([2, 1]),
    old_logprobs=torch.tensor([0.5, 0.5, 0.5]).log(),
    sampler_logprobs=torch.tensor([0.5, 0.25, 0.1]).log(),
    truncation_logprobs=torch.zeros(3),
    ref_logprobs=torch.tensor([0.5, 0.5, 0.5]).log(),
    advantages=torch.tensor([2.0, 2.0, 0.0]),
)


def by_hand(
    correction: dict[str, object] | None, batch: Microbatch = THREE_TOKENS, **others: object
) -> tuple[float, StepSums]:
    """Ratios 1, 1.5 and 0.5 over six tokens of the step, three of them here and the third one without an advantage."""
    configured = {"loss": LOSSES["ppo_clip"][0], "correction": correction, "kl": {"estimator": "k3"}, **others}
    loss, sums = microbatch_loss(
        batch,
        PolicyTokens(torch.tensor([0.5, 0.75, 0.25]).log(), torch.tensor([1.0, 2.0, 4.0]), torch.full((3,), 9.0)),
        AlgorithmConfig.model_validate({**configured, "aggregation": "token_mean"}),
        StepTotals(tokens=6, sequences=3),
        kl_coefficient=0.5,
        max_completion_tokens=MAX_COMPLETION,
    )
    return float(loss), sums


def test_the_loss_and_the_sums_of_a_microbatch_by_hand():
    loss, sums = by_hand(None)
    k3 = [0, 2 / 3 - 1 - math.log(2 / 3), 2 - 1 - math.log(2)]  # r - 1 - ln r, r = reference / policy
    policy = -(2 * 1 + 2 * 1.28) / 6
    assert loss == pytest.approx(policy + 0.5 * sum(k3) / 6)
    # trainer over sampler: 1 and 2
    assert {name: float(value) for name, value in sums.totals.items()} == pytest.approx(
        {
            "tokens": 2, "computed": 3, "policy_loss": policy, "kl_loss": sum(k3) / 6, "kl_ref": sum(k3),
            "importance_ratio": 3, "importance_ratio_squared": 5,
        }
    )  # fmt: skip
    assert {name: float(value) for name, value in sums.means.items()} == pytest.approx(
        {
            "loss/entropy": 3, "loss/kl_old": 0.5 - math.log(1.5), "loss/ratio_mean": 2.5,
            "loss/clip_fraction": 1, "loss/clip_fraction_low": 0, "loss/clip_fraction_high": 1,
            "rollout/abs_delta_logprob_mean": math.log(2), "rollout/kl_sampler_trainer": 1 - math.log(2),
            "rollout/importance_weight_mean": 2, "rollout/importance_masked": 0,
        }
    )  # fmt: skip
    assert {name: float(value) for name, value in sums.maxima.items()} == pytest.approx(
        {"loss/ratio_max": 1.5, "rollout/abs_delta_logprob_max": math.log(2)}
    )


def test_a_masked_token_is_counted_and_not_trained_on():
    _, sums = by_hand({"name": "mask", "level": "token", "min_weight": 0.5, "max_weight": 1.5})
    assert float(sums.totals["policy_loss"]) == pytest.approx(
        -2 / 6
    )  # of the first token; the second is at twice the sampler's
    assert [float(sums.means[f"rollout/importance_{name}"]) for name in ("weight_mean", "masked")] == [1, 1]


def test_a_token_of_low_entropy_has_no_policy_loss_and_keeps_its_kl():
    kept = replace(THREE_TOKENS, high_entropy=torch.tensor([True, False, False]))
    loss, sums = by_hand(None, kept, entropy_mask={"share": 0.2})
    unmasked, _ = by_hand(None)
    assert float(sums.totals["policy_loss"]) == pytest.approx(-2 * 1 / 6)
    assert unmasked - loss == pytest.approx(-2 * 1.28 / 6)  # nothing else differs
    assert float(sums.means["loss/entropy_masked"]) == 1  # the third token has no advantage and is not counted
    assert float(sums.means["loss/entropy"]) == 3  # the mean covers masked tokens too


def test_a_sequence_that_has_left_the_policy_has_no_policy_loss_and_is_counted():
    # log(p_sampler / p_new) of the first sequence: 0 and log(0.25 / 0.75) = -1.1; with 0.9: log(1.8), log(1.2): 0.385
    bad = replace(THREE_TOKENS, advantages=-THREE_TOKENS.advantages)
    for sampler, threshold, advantage_sign, masked in (
        (0.25, 0.1, -1, 0),
        (0.9, 0.3, -1, 2),
        (0.9, 0.4, -1, 0),
        (0.9, 0.3, 1, 0),
    ):
        log_probs = THREE_TOKENS.sampler_logprobs if sampler == 0.25 else torch.tensor([0.9, 0.9, 0.9]).log()
        batch = replace(bad if advantage_sign < 0 else THREE_TOKENS, sampler_logprobs=log_probs)
        _, sums = by_hand(None, batch, off_policy_mask={"threshold": threshold})
        assert float(sums.means["loss/off_policy_masked"]) == masked
        policy = {-1: 2 * 1 + 2 * 1.5, 1: -2 * 1 - 2 * 1.28}[advantage_sign] / 6
        assert float(sums.totals["policy_loss"]) == pytest.approx(0.0 if masked else policy)


def test_without_reference_log_probs_there_is_no_kl_term():
    batch = replace(THREE_TOKENS, ref_logprobs=None, old_logprobs=None)
    logprobs = torch.tensor([0.5, 0.75, 0.25]).log()
    loss, sums = microbatch_loss(
        batch,
        PolicyTokens(logprobs, torch.zeros(3), torch.zeros(3)),
        algorithm("ppo_clip"),
        StepTotals(tokens=6, sequences=3),
        kl_coefficient=0.5,
        max_completion_tokens=MAX_COMPLETION,
    )
    assert float(loss) == float(sums.totals["policy_loss"]) != 0
    assert float(sums.totals["kl_loss"]) == float(sums.totals["kl_ref"]) == 0
    assert (float(sums.means["loss/ratio_mean"]), float(sums.maxima["loss/ratio_max"])) == (
        2,
        1,
    )  # the policy itself is the old one


def test_sums_start_at_nothing_and_merge_name_by_name():
    _, sums = by_hand(None)
    nothing = StepSums()
    for whole, times in ((nothing.merge(sums), 1), (sums.merge(sums), 2), (sums.all_reduce(), 1), (sums.zeros(), 0)):
        for part, ours, factor in (
            (whole.totals, sums.totals, times),
            (whole.means, sums.means, times),
            (whole.maxima, sums.maxima, min(times, 1)),
        ):
            assert {value.dtype for value in part.values()} == {torch.float64}
            found = {name: float(value) for name, value in part.items()}
            assert found == pytest.approx({name: factor * float(value) for name, value in ours.items()})


def test_sums_of_parts_merge_to_the_sums_of_the_whole_also_over_extremes():
    values, counted = torch.tensor([500.0, -1.2, 0.3, 7.0]), torch.tensor([True, False, True, True])

    def sums(part: slice) -> StepSums:
        own = values[part]
        return StepSums.of(counted[part], totals={"all": own}, means={"mean": own}, maxima={"largest": own})

    merged = sums(slice(0, 1)).merge(sums(slice(1, 1))).merge(sums(slice(1, 4)))
    assert float(merged.totals["all"]) == pytest.approx(506.1)
    assert float(merged.means["mean"]) == pytest.approx(507.3)
    assert float(merged.maxima["largest"]) == 500
    assert float(sums(slice(1, 2)).maxima["largest"]) == 0  # over no tokens
