"""The policy under training on one rank: an FSDP2 shard, its optimizer, and the frozen models, reference and teacher.

With adapters the reference is the same model with its adapters off. All ranks call the same methods in the same order,
each with its own microbatches. Nothing here uses Ray or vLLM: one process without them is a complete policy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from rlcore.algorithms.loss import StepTotals
from rlcore.algorithms.objective import PolicyTokens, StepSums, UpdateResult, microbatch_loss
from rlcore.batch import ImageFeatures, Microbatch, on_device, pack
from rlcore.config import ExperimentConfig
from rlcore.flops import ModelShape
from rlcore.models.checkpoint import BackgroundSaver, load_train_state
from rlcore.models.dtypes import compute_dtype, convert, master_dtype, reference_dtype, weights_dtype
from rlcore.models.exact import SamplerKernels, exact_logprobs, with_value
from rlcore.models.flash import require_kernel
from rlcore.models.loading import require_supported
from rlcore.models.lora import (
    B,
    adapters_off,
    choose_trainable,
    draw_adapters,
    frozen_tower,
    is_adapter,
    lora_alpha,
)
from rlcore.models.offload import HostOffload, OffloadedOptimizer
from rlcore.models.optimizer import make_optimizer
from rlcore.models.packed import PackedModel
from rlcore.models.sequence import cut, sequence_group
from rlcore.models.sharding import (
    checkpoint_blocks,
    gather_whole,
    reshard,
    reshards_after_forward,
    shard,
    transformer_blocks,
)
from rlcore.models.stored_weights import Values, load_shards, with_adapters
from rlcore.models.teacher import Teacher, within_vocabulary, without_unknown
from rlcore.models.vision import FrozenTower
from rlcore.types import Floats, ImageRef, ScoredTokens, TrainingSample


class TorchPolicy:
    def __init__(
        self,
        hf: nn.Module,
        config: ExperimentConfig,
        *,
        weights: Values,
        mesh: DeviceMesh,
        banned_token_ids: Sequence[int],
        features: Callable[[ImageRef], ImageFeatures] | None,
        teacher: Teacher | None = None,
        kernels: SamplerKernels | None = None,
    ) -> None:
        """
        Args:
            hf: the architecture, with its parameters on the meta device (``loading.empty_hf_model``).
            weights: their values, such as ``StoredWeights.read``. Each rank reads only its own rows.
            mesh: all ranks, in one dimension. Consecutive ranks form the sequence groups.
            features: reads one image of the prepared dataset.
            teacher: of ``algorithm.teacher``.
            kernels: for ``rollout.exact``.
        """
        require_supported(
            hf.config,
            sequence_parallel=config.training.sequence_parallel,
            lora=config.model.lora,
            replay_routes=config.rollout.replay_routes,
        )
        require_kernel(hf.config, config, mesh.device_type)
        self.config, self._kernels = config, kernels
        on_gpu = mesh.device_type == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device(mesh.device_type)
        self._reshards = reshards_after_forward(config, mesh)
        convert(hf.parameters(), weights_dtype(config, mesh.device_type))
        choose_trainable(hf, config.model)
        convert((p for p in hf.parameters() if p.requires_grad), master_dtype(config))
        self._frozen_tower = frozen_tower(hf)
        with_reference = config.algorithm.kl.coefficient > 0 and config.model.lora is None
        shared = {} if self._frozen_tower is None else {id(part): part for part in self._frozen_tower.modules()}
        reference = copy.deepcopy(hf, shared) if with_reference else None
        self._sequence = sequence_group(mesh, config.training.sequence_parallel)
        packed = partial(
            PackedModel,
            temperature=config.rollout.temperature,
            banned_token_ids=banned_token_ids,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            sequence=self._sequence,
        )
        embedded = self._frozen_tower is not None
        checkpoint_blocks(transformer_blocks(hf), config.model.gradient_checkpointing)
        replays = config.rollout.replay_routes
        self.model = self._shard(packed(hf, images_embedded=embedded, replays=replays), mesh)
        load_shards(self.model, hf, with_adapters(weights, draw_adapters(hf, config.seed)), self.device)
        self._features = self._pixels = features
        if self._frozen_tower is not None and self.model.images is not None and features is not None:
            dtype = compute_dtype(config, mesh.device_type)
            tower = FrozenTower(self._frozen_tower, self.model.images, features, device=self.device, dtype=dtype)
            self._features = tower.of
        self.model.train()
        _without_dropout(self.model)
        self.reference = self.teacher = None
        if reference is not None:
            own = set(reference.parameters()) - set(hf.parameters())
            self.reference = self._frozen(packed(reference, images_embedded=embedded), own, weights, mesh)
        if teacher is not None:
            require_supported(teacher.hf.config, sequence_parallel=config.training.sequence_parallel)
            require_kernel(teacher.hf.config, config, mesh.device_type)
            own = set(teacher.hf.parameters())
            self.teacher = self._frozen(packed(teacher.hf), own, teacher.weights, mesh)
        self.optimizer = make_optimizer(self.model.parameters(), config.training)
        self._weights = HostOffload(self.model.parameters)
        self._reference_weights = HostOffload(self._own_of_reference)
        self._teacher_weights = HostOffload(lambda: [] if self.teacher is None else self.teacher.parameters())
        self._optimizer_state = OffloadedOptimizer(self.optimizer)
        self._saver, self._save_reserved = BackgroundSaver(), False
        self.offload()

    def _frozen(self, model: PackedModel, own: set[nn.Parameter], weights: Values, mesh: DeviceMesh) -> PackedModel:
        """A sharded model that never trains.

        Args:
            own: its parameters that the policy does not share.
        """
        convert(own, reference_dtype(self.config, mesh.device_type))
        # like the policy in all that a compiled graph depends on, so that one graph without gradient serves both
        checkpoint_blocks(transformer_blocks(model.hf), self.config.model.gradient_checkpointing)
        sharded = self._shard(model, mesh).train()
        _without_dropout(sharded)
        load_shards(sharded, model.hf, weights, self.device)
        return sharded

    def _own_of_reference(self) -> list[nn.Parameter]:
        shared = {id(parameter) for parameter in self.model.parameters()}  # those of a frozen tower
        return [p for p in self.reference.parameters() if id(p) not in shared] if self.reference is not None else []

    def _shard(self, model: PackedModel, mesh: DeviceMesh) -> PackedModel:
        frozen = set() if self._frozen_tower is None else set(self._frozen_tower.parameters())
        shard(model, model.hf, mesh, self.config, whole=frozen & set(model.parameters()))
        return model

    def _pack(self, samples: Sequence[TrainingSample], model: PackedModel) -> Microbatch:
        if model.images_embedded:  # packing runs the frozen tower, for the reference too
            self._weights.onload()
        layout, sequence = model.image_layout, self._sequence
        batch = pack(samples, layout=layout, features=self._features if model.images_embedded else self._pixels)
        if sequence is not None:
            batch = cut(batch, sequence.rank, sequence.size, layout)
        return on_device(batch, self.device)

    @torch.no_grad()
    def logprobs(
        self, microbatches: Sequence[Sequence[TrainingSample]], *, reference: bool = False
    ) -> list[list[ScoredTokens]]:
        """Log-probs by microbatch and sample, and for an entropy mask the policy's entropies. Empty microbatches take
        part in the collectives too."""
        if reference and self.config.model.lora is not None:
            with adapters_off(self.model):
                return self.logprobs(microbatches)
        model = self.reference if reference else self.model
        if model is None:
            raise ValueError("this policy has no reference model: algorithm.kl.coefficient is 0")
        (self._reference_weights if reference else self._weights).onload()
        with_entropy = self.config.algorithm.entropy_mask is not None and not reference
        scored = [self._logprobs_of(model, samples, with_entropy=with_entropy) for samples in microbatches]
        reshard(model)
        if reference:
            self._offload(self._reference_weights)
        return scored

    @torch.no_grad()
    def teacher_logprobs(self, microbatches: Sequence[Sequence[TrainingSample]]) -> list[list[ScoredTokens]]:
        """As ``logprobs``, of the teacher at the policy's temperature; -inf for tokens that the teacher lacks."""
        if self.teacher is None:
            raise ValueError("this policy has no teacher: algorithm.teacher is null")
        self._teacher_weights.onload()
        size = self.teacher.hf.lm_head.weight.shape[0]
        known = [[within_vocabulary(sample, size) for sample in samples] for samples in microbatches]
        scored = [
            without_unknown(self._logprobs_of(self.teacher, own), samples, size)
            for own, samples in zip(known, microbatches, strict=True)
        ]
        reshard(self.teacher)
        self._offload(self._teacher_weights)
        return scored

    @torch.no_grad()
    def raw_logprobs(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Log-probs [L] of each sample at temperature 1 with no token banned. Computes one microbatch."""
        self._weights.onload()
        logprobs = [scored.logprobs for scored in self._logprobs_of(self.model, samples, raw=True)]
        reshard(self.model)
        return logprobs

    def _logprobs_of(
        self, model: PackedModel, samples: Sequence[TrainingSample], *, raw: bool = False, with_entropy: bool = False
    ) -> list[ScoredTokens]:
        batch = self._pack(samples or [FILLER], model)
        tokens: PolicyTokens = model(batch, raw, with_entropy=with_entropy)
        if not raw:
            tokens = self._exact(model, batch, tokens)
        values = torch.stack([tokens.logprobs, tokens.truncation_logprobs, tokens.entropy])
        counts = [sample.num_trained for sample in samples]
        parts = np.split(values.cpu().numpy(), np.cumsum(counts)[:-1], axis=1)
        return [
            ScoredTokens(
                logprobs=_placed(part[0], sample),
                truncation_logprobs=_placed(part[1], sample),
                entropies=_placed(part[2], sample) if with_entropy else None,
            )
            for part, sample in zip(parts, samples, strict=False)  # np.split gives one part for no samples
        ]

    def _exact(self, model: PackedModel, batch: Microbatch, tokens: PolicyTokens) -> PolicyTokens:
        """With ``rollout.exact``: the policy's log-probs as the sampler computes them."""
        if self._kernels is None or model is not self.model:
            return tokens
        exact = exact_logprobs(model, batch, self._kernels, reshards=self._reshards)
        return tokens._replace(logprobs=with_value(tokens.logprobs, exact))

    def update(
        self,
        microbatches: Sequence[Sequence[TrainingSample]],
        totals: StepTotals,
        learning_rate: float,
        kl_coefficient: float,
    ) -> UpdateResult:
        """Accumulate the gradient over the microbatches, clip it by its global norm and take one AdamW step.

        The ranks of a sequence group get the same microbatches, and only the first rank counts their sums.

        Args:
            totals: the denominators of the loss, over all microbatches and ranks of this step.
            kl_coefficient: of the KL term in the loss.
        """
        self._weights.onload()
        sums = StepSums()
        counts = self._sequence is None or self._sequence.rank == 0
        sharded = cast(FSDPModule, self.model)
        for number, samples in enumerate(microbatches, start=1):
            last = number == len(microbatches)
            sharded.set_reshard_after_backward(self._reshards or last)
            sharded.set_requires_gradient_sync(self._reshards or last)
            batch = self._pack(samples or [FILLER], self.model)
            tokens = self._exact(self.model, batch, self.model(batch))
            loss, part = microbatch_loss(
                batch,
                tokens,
                self.config.algorithm,
                totals,
                kl_coefficient=kl_coefficient,
                max_completion_tokens=self.config.rollout.max_completion_tokens,
            )
            loss.backward()  # type: ignore[no-untyped-call]
            sums = sums.merge(part if counts else part.zeros())
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.training.max_grad_norm)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        skipped = not np.isfinite(grad_norm)
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            (self._optimizer_state if self.config.training.offload else self.optimizer).step()
        self.optimizer.zero_grad(set_to_none=True)
        if not (skipped or self._save_reserved):  # the first step has created the optimizer's state
            self._saver.reserve(self.model.hf, self.optimizer)
            self._save_reserved = True
        return UpdateResult(sums=sums.all_reduce(), grad_norm=grad_norm, skipped=skipped)

    def tensors(self) -> dict[str, Tensor]:
        """The sharded state dict, on the device."""
        self._weights.onload()
        tensors: dict[str, Tensor] = self.model.hf.state_dict()
        return tensors

    def full_weights(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = 512 << 20
    ) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors of the state dict, in its order, without adapters.

        Collective: all ranks iterate in step.
        """
        tensors = self.tensors().items()
        return gather_whole([(name, value) for name, value in tensors if not is_adapter(name)], dtype, bucket_bytes)

    def adapter_weights(
        self, dtype: torch.dtype | None = None, bucket_bytes: int = 512 << 20
    ) -> Iterator[tuple[str, Tensor]]:
        """The whole A and (alpha / rank) B of every adapter: their product is added to the weight. Collective."""
        tensors = {name: value for name, value in self.tensors().items() if is_adapter(name)}
        alpha = lora_alpha(self.model) or 0.0
        for name in (name for name in tensors if name.endswith(B)):  # before any rounding to ``dtype``
            tensors[name] = tensors[name] * (alpha / tensors[name].shape[1])
        return gather_whole(list(tensors.items()), dtype, bucket_bytes)

    def model_shape(self) -> ModelShape:
        return self.model.shape

    def device_name(self) -> str:
        """The vendor's name of the device, as in the table of ``flops.peak_flops``."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    @property
    def sync_dtype(self) -> torch.dtype:
        """Dtype of the weights that the sampler receives."""
        return compute_dtype(self.config, self.device.type)

    def offload(self) -> None:
        """With ``training.offload``: move weights and optimizer state to the host until another method needs them."""
        for part in (self._weights, self._reference_weights, self._teacher_weights, self._optimizer_state):
            self._offload(part)
        if self.config.training.offload and self.device.type == "cuda":
            torch.cuda.empty_cache()  # for the sampler, which has another allocator

    def _offload(self, part: HostOffload | OffloadedOptimizer) -> None:
        if self.config.training.offload:
            part.offload()

    def begin_save(self, folder: Path) -> None:
        self._weights.onload()
        self._optimizer_state.onload()
        self._saver.begin(self.model.hf, self.optimizer, folder)
        self.offload()

    def saved(self) -> bool:
        return self._saver.done()

    def load(self, folder: Path) -> None:
        self._weights.onload()
        self._optimizer_state.onload()
        load_train_state(self.model.hf, self.optimizer, folder)
        self.offload()


def _placed(values: Floats, sample: TrainingSample) -> Floats:
    """[L] the values on the trained tokens, 0 elsewhere."""
    placed = np.zeros(sample.num_tokens, np.float32)
    placed[sample.loss_mask] = values
    return placed


def _without_dropout(model: nn.Module) -> None:
    # the sampler has no dropout, so ratios would not start at 1; and a step would depend on torch's generator
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


# Stands for an empty microbatch. It has no trained tokens, so its loss is 0.
FILLER = TrainingSample(
    token_ids=np.zeros(2, np.int32),
    loss_mask=np.zeros(2, np.bool_),
    sampler_logprobs=np.zeros(2, np.float32),
    images=(),
    policy_version=0,
)
