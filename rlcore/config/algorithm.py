"""How rewards become a gradient. Each choice is a tagged union: ``name`` selects one, and each has its own fields.

Formulas, sources and differences to other trainers: docs/algorithms.md.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlcore.config.base import Frozen, named_by_default
from rlcore.config.policy import ModelConfig, TinyModelConfig, expand_home


class _GroupAdvantage(Frozen):
    min_group_size: ClassVar[int] = 2  # below it a completion has none to be compared with


class GrpoAdvantage(_GroupAdvantage):
    """(reward - mean of the group) / standard deviation of the group."""

    name: Literal["grpo"] = "grpo"
    std: Literal["sample", "population"] = "sample"
    """sample divides by G - 1, as EasyR1, verl and TRL do; population divides by G. The paper does not say which. All
    advantages differ by the same factor, which AdamW almost cancels."""


class DrGrpoAdvantage(_GroupAdvantage):
    """reward - mean of the group. A problem's difficulty does not weight it."""

    name: Literal["dr_grpo"] = "dr_grpo"


class BatchStdAdvantage(_GroupAdvantage):
    """(reward - mean of the group) / standard deviation of the rewards of the whole rollout batch."""

    name: Literal["batch_std"] = "batch_std"


class RlooAdvantage(_GroupAdvantage):
    """reward - mean of the other completions of the group."""

    name: Literal["rloo"] = "rloo"


class BnpoAdvantage(_GroupAdvantage):
    """(reward - mean of the group) / density of a Beta distribution fitted to the groups' means."""

    name: Literal["bnpo"] = "bnpo"


class PassAtKAdvantage(_GroupAdvantage):
    """The mean amount that a completion adds to the best of k, over all subsets of k completions of the group."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(4, ge=1)
    """Size of the subsets, below rollout.group_size."""


class ReinforcePlusPlusAdvantage(Frozen):
    """Reward to go per token, normalised over all tokens of the rollout batch. Needs no group."""

    min_group_size: ClassVar[int] = 1
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"


class ReinforcePlusPlusBaselineAdvantage(_GroupAdvantage):
    """reward - mean of the group, then normalised over all tokens of the rollout batch."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"


class RemaxAdvantage(Frozen):
    """reward - reward of a greedy completion of the same problem, which is sampled only for this."""

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
    """Ratios are clipped below 1 - clip_low."""
    clip_high: float = Field(0.28, ge=0)
    """Ratios are clipped above 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Largest ratio that counts for a token with a negative advantage."""

    @model_validator(mode="after")
    def _check_dual_clip(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"algorithm.loss.dual_clip ({self.dual_clip}) is not above 1 + clip_high ({1 + self.clip_high}). "
                "Set it above, for example to 3, or to null."
            )
        return self


class _SequenceClip(Frozen):
    clip_low: float = Field(3e-4, ge=0, le=1)
    """Sequence ratios are clipped below 1 - clip_low."""
    clip_high: float = Field(4e-4, ge=0)
    """Sequence ratios are clipped above 1 + clip_high."""


class GspoLoss(_SequenceClip):
    """The clipped surrogate on the length-normalised sequence ratio. The usual aggregation is sequence_mean_token_mean;
    with sequence_mean_token_sum it is LUSPO."""

    name: Literal["gspo"] = "gspo"


class GspoTokenLoss(_SequenceClip):
    """GSPO with a gradient per token, for advantages that differ within a sequence."""

    name: Literal["gspo_token"] = "gspo_token"


class CispoLoss(Frozen):
    """Policy gradient weighted by the detached ratio, which is clipped only from above."""

    name: Literal["cispo"] = "cispo"
    level: Literal["token", "sequence"] = "token"
    """token: the ratio of each token. sequence: the length-normalised ratio of the whole sequence, as in GSPO."""
    max_ratio: float = Field(5.0, ge=1)
    """Largest weight of a token."""


class SapoLoss(Frozen):
    """A soft gate on the ratio instead of clipping."""

    name: Literal["sapo"] = "sapo"
    level: Literal["token", "sequence"] = "token"
    """token: the ratio of each token. sequence: the length-normalised ratio of the whole sequence, as in GSPO."""
    tau_positive: float = Field(1.0, gt=0)
    """Steepness of the gate for positive advantages."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness of the gate for other advantages."""


class VespoLoss(Frozen):
    """Policy gradient weighted by a detached kernel of the sequence ratio (not length-normalised). The weights of
    algorithm.correction are factors of this ratio and do not multiply the loss."""

    name: Literal["vespo"] = "vespo"
    k_positive: float = Field(2.0, ge=0)
    """Power of the ratio in the kernel for positive advantages."""
    lambda_positive: float = Field(3.0, gt=0)
    """Decay rate of the kernel for positive advantages."""
    k_negative: float = Field(3.0, ge=0)
    """Power of the ratio in the kernel for other advantages."""
    lambda_negative: float = Field(2.0, gt=0)
    """Decay rate of the kernel for other advantages."""


PolicyLoss = Annotated[
    PpoClipLoss | GspoLoss | GspoTokenLoss | CispoLoss | SapoLoss | VespoLoss,
    Field(discriminator="name"),
    named_by_default("ppo_clip"),
]


class AdaptiveKl(Frozen):
    """Adapts the coefficient to keep the KL to the reference near a target."""

    target: float = Field(0.1, gt=0)
    """Nats per token, in the configured estimator."""
    horizon: int = Field(10_000, ge=1)
    """Number of completions after which a KL that is 20% or more off target has multiplied the coefficient by about 1.2
    or 0.8."""


KlEstimator = Literal["k1", "k2", "k3", "straight_through", "k3_weighted"]


class KlConfig(Frozen):
    """KL(policy || reference) as a penalty: in the loss or in the reward, never both."""

    coefficient: float = Field(0.01, ge=0)
    """0: no KL term and no reference model. With ``adaptive``: the initial value."""
    place: Literal["loss", "reward"] = "loss"
    """Where the penalty is added. In the reward it has no gradient."""
    estimator: KlEstimator = "k3"
    """Estimator of the KL. straight_through has the value of k3 and the gradient of k2. k3_weighted is k3 times the
    importance ratio of the token, so that value and gradient are unbiased off policy too."""
    adaptive: AdaptiveKl | None = None
    """null: the coefficient is constant."""

    @model_validator(mode="after")
    def _check_estimator(self) -> Self:
        if self.place == "loss" and self.estimator == "k1":
            raise ValueError(
                "algorithm.kl.estimator is k1 in the loss: its gradient has mean 0, so it does not limit the KL. "
                "Use k2, k3, straight_through or k3_weighted, or set algorithm.kl.place to reward."
            )
        if self.place == "reward" and self.estimator in ("straight_through", "k3_weighted"):
            raise ValueError(
                f"algorithm.kl.estimator is {self.estimator} in the reward, where it has no gradient and equals k3. "
                "Use k1, k2 or k3."
            )
        if self.adaptive is not None and self.coefficient == 0:
            raise ValueError(
                "algorithm.kl.adaptive multiplies algorithm.kl.coefficient, which is 0 and would stay 0. "
                "Set the coefficient above 0."
            )
        return self


class TruncatedImportance(Frozen):
    """TIS: weights the loss by p_trainer / p_sampler, truncated from above."""

    name: Literal["truncate"] = "truncate"
    level: Literal["token", "sequence"] = "token"
    """token: one weight per token. sequence: one per sequence, the product of its tokens' weights."""
    max_weight: float = Field(2.0, ge=1)
    """Larger weights are truncated to it."""


class MaskedImportance(Frozen):
    """MIS: weights the loss by p_trainer / p_sampler, and masks weights out of bounds."""

    name: Literal["mask"] = "mask"
    level: Literal["token", "sequence"] = "token"
    """token: one weight per token. sequence: one per sequence, the product of its tokens' weights."""
    min_weight: float = Field(0.5, ge=0, le=1)
    """Smaller weights become 0."""
    max_weight: float = Field(2.0, ge=1)
    """Larger weights become 0."""


ImportanceCorrection = Annotated[
    TruncatedImportance | MaskedImportance, Field(discriminator="name"), named_by_default("truncate")
]


class EntropyMask(Frozen):
    """Policy gradient only on the tokens with the highest entropy. The KL term keeps all tokens."""

    share: float = Field(0.2, gt=0, le=1)
    """Share of the trained tokens of an optimizer step that keep their policy gradient. Needs a separate forward pass
    for the entropies, as recompute_old_logprobs."""


class OffPolicyMask(Frozen):
    """No policy gradient on sequences with a negative advantage that have become too unlikely under the policy. The KL
    term keeps all tokens."""

    threshold: float = Field(0.5, gt=0)
    """Largest mean of log(p_sampler / p_policy) over the tokens of a sequence, in nats. A sequence above it that has a
    negative advantage is masked. The paper does not state its value."""


class DynamicSamplingConfig(Frozen):
    """Replaces groups without signal until the rollout batch is full. Surplus groups wait for the next batch, also in
    checkpoints."""

    max_rounds: int = Field(10, ge=1)
    """Rounds of new groups per rollout batch, at most."""
    if_short: Literal["fill", "fail"] = "fill"
    """After max_rounds. fill: use groups without signal, which add exactly 0 to the gradient. fail: end the run."""
    surplus_staleness: int = Field(1, ge=0)
    """Policy versions (rollout batches) between the policy that sampled a surplus group and the policy that trains on
    it, at most. Older groups are dropped and counted. 0 keeps no surplus. training.max_staleness above 0 also bounds
    surplus groups."""


class TeacherConfig(Frozen):
    """On-policy distillation: a frozen second model scores the tokens that the policy sampled, and
    coefficient * (log p_teacher - log p_policy) is added to the advantage of each token. Teacher and policy must have
    the same tokenizer and image processor."""

    path: str
    """The teacher: a Hugging Face id, a folder with config.json and safetensors, or ``tiny``."""
    revision: str | None = None
    """Commit, branch or tag of a Hugging Face id. null: its main branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the teacher."""
    tiny: TinyModelConfig = TinyModelConfig()
    """How a teacher ``tiny`` is made."""
    coefficient: float = Field(1.0, gt=0)
    """Weight of the teacher's signal, against a weight of 1 of the task's advantage."""
    task_reward: bool = True
    """Also train on the task's reward. false: distillation alone; completions are still graded, for the metrics."""

    @field_validator("path")
    @classmethod
    def _expand_home(cls, path: str) -> str:
        return expand_home(path)

    @property
    def model(self) -> ModelConfig:
        """The teacher as a model to fetch, with no check against vLLM: it never samples."""
        return ModelConfig(
            path=self.path,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            tiny=self.tiny,
            check="off",
        )


class AlgorithmConfig(Frozen):
    advantage: Advantage = GrpoAdvantage()
    loss: PolicyLoss = PpoClipLoss()
    kl: KlConfig = KlConfig()
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """How per-token losses become one number. ``constant`` is Dr.GRPO: the sum over tokens divided by
    sequences * rollout.max_completion_tokens."""
    correction: ImportanceCorrection | None = None
    """Importance weights for the mismatch between sampler and trainer, and for staleness (training.max_staleness). The
    effective sample size is always logged."""
    entropy_mask: EntropyMask | None = None
    """null: policy gradient on all trained tokens."""
    off_policy_mask: OffPolicyMask | None = None
    """null: policy gradient on all sequences."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """null: train on every sampled group."""
    teacher: TeacherConfig | None = None
    """null: no distillation."""
    mask_truncated: bool = False
    """Do not train on completions that were cut at rollout.max_completion_tokens. They still count in the statistics of
    their group."""
    recompute_old_logprobs: bool = False
    """Compute the log-probs of the policy that the updates of a batch start from in a separate forward pass for all of
    the batch. By default the first update is left out, because there they equal the new log-probs. Several epochs, KL
    in the reward, a teacher, an entropy_mask, and surplus groups of dynamic sampling always need all."""

    @property
    def trains_on_reward(self) -> bool:
        """False: only a teacher gives advantages."""
        return self.teacher is None or self.teacher.task_reward

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        if self.teacher is None:
            return self
        by_sequence = isinstance(self.loss, GspoLoss | VespoLoss)
        if by_sequence or (isinstance(self.loss, CispoLoss | SapoLoss) and self.loss.level == "sequence"):
            named = self.loss.name if by_sequence else f"{self.loss.name} with level sequence"
            raise ValueError(
                f"algorithm.loss is {named}, which weights a whole sequence by one ratio, and algorithm.teacher gives "
                "each token an advantage of its own. Set algorithm.loss.name to ppo_clip, cispo or sapo (level token), "
                "or gspo_token."
            )
        if self.dynamic_sampling is not None:
            raise ValueError(
                "algorithm.dynamic_sampling replaces groups without signal, and with algorithm.teacher every group has "
                "one. Set one of them to null."
            )
        if self.off_policy_mask is not None:
            raise ValueError(
                "algorithm.off_policy_mask masks sequences with a negative advantage, and algorithm.teacher gives "
                "the tokens of a sequence advantages of either sign. Set one of them to null."
            )
        return self
