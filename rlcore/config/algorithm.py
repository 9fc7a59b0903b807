"""How rewards become a gradient. Each choice is a tagged union: ``name`` picks one, its fields are its own.

Formulas, sources and differences to other trainers: docs/algorithms.md.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlcore.config.base import Frozen, named_by_default


class _GroupAdvantage(Frozen):
    min_group_size: ClassVar[int] = 2  # below it no completion has a sibling to be compared with


class GrpoAdvantage(_GroupAdvantage):
    """(reward - mean of the group) / deviation of the group."""

    name: Literal["grpo"] = "grpo"
    std: Literal["sample", "population"] = "sample"
    """sample divides by G - 1, as EasyR1, verl and TRL do, population by G; the paper does not say which. It is one
    factor for every advantage, which AdamW hardly sees."""


class DrGrpoAdvantage(_GroupAdvantage):
    """reward - mean of the group: a problem's difficulty does not weight it."""

    name: Literal["dr_grpo"] = "dr_grpo"


class BatchStdAdvantage(_GroupAdvantage):
    """(reward - mean of the group) / deviation of the rewards of the whole rollout batch."""

    name: Literal["batch_std"] = "batch_std"


class RlooAdvantage(_GroupAdvantage):
    """reward - mean of the other completions of the group."""

    name: Literal["rloo"] = "rloo"


class BnpoAdvantage(_GroupAdvantage):
    """(reward - mean of the group) / density of a Beta distribution that is fitted to the groups' means."""

    name: Literal["bnpo"] = "bnpo"


class PassAtKAdvantage(_GroupAdvantage):
    """What a completion adds to the best of k, over all subsets of the group that it could be drawn in."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(4, ge=1)
    """Size of the subsets; below rollout.group_size."""


class ReinforcePlusPlusAdvantage(Frozen):
    """Reward to go per token, normalised over all tokens of the rollout batch; no group needed."""

    min_group_size: ClassVar[int] = 1
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"


class ReinforcePlusPlusBaselineAdvantage(_GroupAdvantage):
    """reward - mean of the group, then normalised over all tokens of the rollout batch."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class RemaxAdvantage(Frozen):
    """reward - reward of a greedy completion of the same problem, which is sampled for this alone."""

    min_group_size: ClassVar[int] = 1
    name: Literal["remax"] = "remax"


Advantage = Annotated[
    GrpoAdvantage
    | DrGrpoAdvantage
    | BatchStdAdvantage
    | RlooAdvantage
    | BnpoAdvantage
    | PassAtKAdvantage
    | ReinforcePlusPlusAdvantage
    | ReinforcePlusPlusBaselineAdvantage
    | RemaxAdvantage,
    Field(discriminator="name"),
    named_by_default("grpo"),
]


class PpoClipLoss(Frozen):
    """PPO's clipped surrogate on token ratios."""

    name: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, ge=0, le=1)
    """The ratio counts down to 1 - clip_low."""
    clip_high: float = Field(0.28, ge=0)
    """The ratio counts up to 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Bounds the loss of a token with a negative advantage whose ratio has run away: at this ratio at most."""

    @model_validator(mode="after")
    def _dual_clip_is_outside_the_band(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"algorithm.loss.dual_clip ({self.dual_clip}) is inside the band that ends at 1 + clip_high "
                f"({1 + self.clip_high}). Set it above, 3 is usual, or to null."
            )
        return self


class GspoLoss(Frozen):
    """The clipped surrogate on the sequence ratio (length-normalised). Usual aggregation:
    sequence_mean_token_mean; with sequence_mean_token_sum it is LUSPO."""

    name: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, ge=0, le=1)
    """The sequence ratio counts down to 1 - clip_low."""
    clip_high: float = Field(4e-4, ge=0)
    """The sequence ratio counts up to 1 + clip_high."""


class GspoTokenLoss(Frozen):
    """GSPO whose gradient flows token by token, for advantages that differ within a sequence."""

    name: Literal["gspo_token"] = "gspo_token"
    clip_low: float = Field(3e-4, ge=0, le=1)
    """The sequence ratio counts down to 1 - clip_low."""
    clip_high: float = Field(4e-4, ge=0)
    """The sequence ratio counts up to 1 + clip_high."""


class CispoLoss(Frozen):
    """Policy gradient weighted by the detached ratio, which is cut from above only."""

    name: Literal["cispo"] = "cispo"
    max_ratio: float = Field(5.0, ge=1)
    """Largest weight of a token."""


class SapoLoss(Frozen):
    """A soft gate on the token ratio in place of clipping."""

    name: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    """Steepness of the gate where the advantage is positive."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness of the gate elsewhere."""


class VespoLoss(Frozen):
    """Policy gradient weighted by a detached kernel of the whole sequence's ratio (not length-normalised)."""

    name: Literal["vespo"] = "vespo"
    k_positive: float = Field(2.0, ge=0)
    """Power of the ratio in the kernel where the advantage is positive."""
    lambda_positive: float = Field(3.0, gt=0)
    """Rate of its decay where the advantage is positive."""
    k_negative: float = Field(3.0, ge=0)
    """Power of the ratio in the kernel elsewhere."""
    lambda_negative: float = Field(2.0, gt=0)
    """Rate of its decay elsewhere."""


PolicyLoss = Annotated[
    PpoClipLoss | GspoLoss | GspoTokenLoss | CispoLoss | SapoLoss | VespoLoss,
    Field(discriminator="name"),
    named_by_default("ppo_clip"),
]


class AdaptiveKl(Frozen):
    """Moves the coefficient so that the KL to the reference stays near a target."""

    target: float = Field(0.1, gt=0)
    """Nats per token, in the configured estimator."""
    horizon: int = Field(10_000, ge=1)
    """Completions over which a KL 20% or more off its target multiplies the coefficient by about 1.2 or 0.8."""


KlEstimator = Literal["k1", "k2", "k3", "straight_through"]


class KlConfig(Frozen):
    """KL(policy || reference) as a penalty: in the loss or in the reward, never both."""

    coefficient: float = Field(0.01, ge=0)
    """0: no KL term, no reference model. With ``adaptive`` the first value."""
    place: Literal["loss", "reward"] = "loss"
    """Where the penalty is added; in the reward it has no gradient."""
    estimator: KlEstimator = "k3"
    """straight_through has the value of k3 and the gradient of k2."""
    adaptive: AdaptiveKl | None = None
    """null: the coefficient stays."""

    @model_validator(mode="after")
    def _estimator_fits_its_place(self) -> Self:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "algorithm.kl.estimator is k1 in the loss: its gradient has mean 0 and holds nothing back. "
                "Use k2, k3 or straight_through, or set algorithm.kl.place to reward."
            )
        if self.place == "reward" and self.estimator == "straight_through":
            raise ValueError(
                "algorithm.kl.estimator is straight_through in the reward, where no gradient flows and it is k3. "
                "Use k1, k2 or k3."
            )
        if self.adaptive is not None and self.coefficient == 0:
            raise ValueError(
                "algorithm.kl.adaptive multiplies algorithm.kl.coefficient, which is 0 and would stay 0. "
                "Set the coefficient above 0."
            )
        return self


class TruncatedImportance(Frozen):
    """TIS: the loss is weighted by p_trainer / p_sampler, cut from above."""

    name: Literal["truncate"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or the product of these per sequence."""
    max_weight: float = Field(2.0, ge=1)
    """Larger weights are cut to it."""


class MaskedImportance(Frozen):
    """MIS: the loss is weighted by p_trainer / p_sampler, and by 0 where that is out of bounds."""

    name: Literal["mask"] = "mask"
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or the product of these per sequence."""
    min_weight: float = Field(0.5, ge=0, le=1)
    """Smaller weights become 0."""
    max_weight: float = Field(2.0, ge=1)
    """Larger weights become 0."""


ImportanceCorrection = Annotated[
    TruncatedImportance | MaskedImportance, Field(discriminator="name"), named_by_default("truncate")
]


class DynamicSamplingConfig(Frozen):
    """Groups without signal are replaced until the batch is full; surplus groups wait, in the checkpoint too."""

    max_rounds: int = Field(10, ge=1)
    """How often new groups are sampled for one rollout batch, at most."""
    if_short: Literal["fill", "fail"] = "fill"
    """After max_rounds: fill the batch with groups without signal, which add exactly 0, or end the run."""
    surplus_staleness: int = Field(1, ge=0)
    """Policy versions (rollout batches) between the policy that sampled a surplus group and the one that trains on it,
    at most; older groups are dropped and counted. 0 keeps no surplus. training.max_staleness above 0 is the bound for
    surplus groups too."""


class AlgorithmConfig(Frozen):
    advantage: Advantage = GrpoAdvantage()
    loss: PolicyLoss = PpoClipLoss()
    kl: KlConfig = KlConfig()
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """How per-token losses become one number. ``constant`` is Dr.GRPO: sum over tokens, divided by
    sequences * rollout.max_completion_tokens."""
    correction: ImportanceCorrection | None = None
    """Weights against the mismatch of sampler and trainer, and against staleness (training.max_staleness). Effective
    sample size is logged with or without."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """null: a batch is trained as it was sampled."""
    mask_truncated: bool = False
    """Completions cut at rollout.max_completion_tokens take part in their group's statistics and train no token."""
    recompute_old_logprobs: bool = False
    """With one update per rollout batch the old log-probs, of the policy that the batch's updates start from, are the
    new ones and the extra forward pass is skipped. True runs it all the same. Several updates, KL in the reward
    and surplus groups of dynamic sampling always run it."""
