"""An engine that samples, takes new weights or a new adapter in place, and proves that they arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from rlcore.config import ExperimentConfig, LoraConfig
from rlcore.data.images import ImageStore
from rlcore.data.prompts import PromptBuilder
from rlcore.errors import SamplerError
from rlcore.ports import SampledGroup, SampleRequest
from rlcore.rollout.engine import (
    adapter_request,
    build_engine,
    engine_dtype,
    engine_prompt,
    held_adapter,
    held_weights,
    install_adapter,
    reload_weights,
    reset_caches,
    sampling_params,
)
from rlcore.types import Completion, FinishReason


class VllmSampler:
    """One engine on one device. Implements ``ports.Sampler``.

    ``load_weights`` or ``load_adapter`` has to be called before the first ``generate``, so that the weights have a
    version.
    """

    def __init__(
        self,
        model: Path,
        config: ExperimentConfig,
        *,
        prompts: PromptBuilder,
        images: ImageStore,
        device: str,
        temperature: float | None = None,
        top_p: float | None = None,
        join_world: bool = True,
        lora: LoraConfig | None = None,
    ) -> None:
        """
        Args:
            lora: sample with an adapter, which ``load_adapter`` brings, on the weights of ``model``.
            temperature, top_p: of this sampler, where they differ from ``config.rollout`` (evaluation).
            join_world: the calling process is one rank of a torch.distributed world, which the engine joins.
        """
        rollout = config.rollout
        self._prompts, self._images, self._device = prompts, images, device
        self._version: int | None = None
        self._asleep = False
        self._lora, self._adapter = lora, None  # the second is what requests carry
        self._params = {
            "temperature": rollout.temperature if temperature is None else temperature,
            "top_p": rollout.top_p if top_p is None else top_p,
            "top_k": rollout.top_k,
            "max_tokens": rollout.max_completion_tokens,
            "logprobs": 0,  # of the sampled token alone
            "flat_logprobs": True,
            "detokenize": False,
            "logit_bias": {token: -100.0 for token in prompts.banned_token_ids} or None,
        }
        self._llm = build_engine(
            model,
            device=device,
            join_world=join_world,
            max_model_len=config.max_sequence_tokens,
            max_num_seqs=rollout.max_sequences,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            kv_cache_mib=rollout.kv_cache_mib,
            enforce_eager=rollout.enforce_eager or device == "cpu",
            seed=config.seed,
            images_per_prompt=config.data.max_images if prompts.image_token_id is not None else 0,
            min_pixels=config.data.min_pixels,
            max_pixels=config.data.max_pixels,
            trust_remote_code=config.model.trust_remote_code,
            dtype=engine_dtype(device),
            lora=lora,
        )

    def generate(self, requests: Sequence[SampleRequest]) -> list[SampledGroup]:
        """Sample every request; groups and completions come back in the order asked for.

        Raises:
            SamplerError: no weights yet, asleep, or the engine expanded a prompt to other tokens than the trainer will.
        """
        if self._version is None or self._asleep:
            raise SamplerError("the sampler holds no current weights: call load_weights (and wake) before generate")
        outputs = self._llm.generate(
            [self._prompt(request) for request in requests],
            [sampling_params(n=r.count, **self._params | _draw(r)) for r in requests],
            use_tqdm=False,
            lora_request=self._adapter,
        )
        return [self._group(r, output) for r, output in zip(requests, outputs, strict=True)]

    def _prompt(self, request: SampleRequest) -> Any:
        problem = request.problem
        tokens = self._prompts.unexpanded_tokens(problem.question, len(problem.images))
        return engine_prompt(tokens.tolist(), problem.images, self._images)

    def _group(self, request: SampleRequest, output: Any) -> SampledGroup:
        expected = self._prompts.tokens(request.problem)
        if not np.array_equal(expected, output.prompt_token_ids):
            raise SamplerError(
                f"problem {request.problem.problem_id}: vLLM sees a prompt of {len(output.prompt_token_ids)} tokens, "
                f"the trainer one of {len(expected)}. Image resizing differs between the two; "
                "check that data.min_pixels and data.max_pixels are those the dataset was prepared with."
            )
        samples = sorted(output.outputs, key=lambda sample: sample.index)
        texts = self._prompts.tokenizer.batch_decode([s.token_ids for s in samples], skip_special_tokens=True)
        return SampledGroup(
            prompt_token_ids=expected,
            completions=tuple(
                Completion(
                    token_ids=np.asarray(s.token_ids, np.int32),
                    logprobs=np.asarray(s.logprobs.logprobs, np.float32),
                    text=text,
                    finish_reason=_finish_reason(s.finish_reason),
                    policy_version=cast(int, self._version),
                )
                for s, text in zip(samples, texts, strict=True)
            ),
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> tuple[float, float]:
        """Take Hugging Face tensors in place, drop every cache that depends on weights, and prove the result.

        Returns:
            The checksum (sum, sum of squares; float64) of the tensors that came in.

        Raises:
            SamplerError: the engine's parameters do not have the checksum of what was sent.
        """
        sent = Checksum()

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, value in weights:  # lm_head.weight included, tied or not: vLLM on CPU holds a second copy
                sent.add(value.to(self._dtype))
                yield name, value

        reload_weights(self._llm, counted())
        reset_caches(self._llm)
        held = Checksum.of(held_weights(self._llm))
        if not sent.matches(held):
            raise SamplerError(
                f"after the weight sync to version {version} the sampler's parameters sum to {held}, the trainer's to "
                f"{sent}: not every weight arrived. Check that vLLM loads each tensor of this architecture by its "
                "Hugging Face name."
            )
        self._version = version
        return sent.total, sent.squares

    def check_base(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Prove once that the engine read the same weights from the model folder as the trainer.

        Raises:
            SamplerError: their checksums differ.
        """
        theirs = Checksum.of(value.to(self._dtype) for _, value in weights)
        held = Checksum.of(held_weights(self._llm))
        if not theirs.matches(held):
            raise SamplerError(
                f"the sampler's weights sum to {held}, those that the trainer's adapters change to {theirs}: with one "
                "adapter these are two policies. Check that the model folder did not change since the run started."
            )

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> tuple[float, float]:
        """Take an adapter in place of the last one, drop every cache that depends on weights, and prove the result.

        Args:
            tensors: ``lora_A.weight`` and ``lora_B.weight`` of Hugging Face's modules, B times alpha / rank.

        Returns:
            The checksum (sum, sum of squares; float64) of the tensors that came in.

        Raises:
            SamplerError: the engine's adapter does not have the checksum of what was sent.
        """
        if self._lora is None:
            raise SamplerError("this sampler was built without room for an adapter: give lora to VllmSampler")
        # copies, because vLLM keeps them, and what came in may be the trainer's own memory
        adapter = {name: value.detach().to(self._dtype, copy=True) for name, value in tensors}
        sent = Checksum.of(adapter.values())
        install_adapter(self._llm, adapter, self._lora.rank)
        reset_caches(self._llm)
        held = Checksum.of(held_adapter(self._llm))
        if not sent.matches(held):
            raise SamplerError(
                f"after the sync to version {version} the sampler's adapter sums to {held}, the trainer's to {sent}: "
                "not every tensor arrived. Check that vLLM has adapters for each linear layer of this architecture; "
                "model.lora.vision_tower needs it for the vision tower as well."
            )
        self._version, self._adapter = version, adapter_request(version)
        return sent.total, sent.squares

    @property
    def _dtype(self) -> torch.dtype:
        return cast(torch.dtype, getattr(torch, engine_dtype(self._device)))

    def keep_loaded_weights(self, version: int) -> None:
        """Sample from the weights of the model folder itself."""
        self._version = version

    def sleep(self) -> None:
        """Give the engine's GPU memory back until ``wake``. On CPU nothing is held that training needs."""
        if self._device != "cpu":
            # a sync of all weights would overwrite them anyway; one of an adapter leaves them, so they go to the host
            self._llm.sleep(level=2 if self._lora is None else 1)
            self._asleep = True

    def wake(self) -> Iterator[None]:
        """A generator of two stops: weights are back (load them now), then the key-value cache is back."""
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        yield
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        yield


def _draw(request: SampleRequest) -> dict[str, object]:
    return {"temperature": 0.0} if request.greedy else {"seed": request.seed & 0x7FFFFFFF}


class Checksum:
    """Sum and sum of squares over tensors in float64: equal for fused and unfused, padded and unpadded layouts."""

    def __init__(self) -> None:
        self.total = 0.0
        self.squares = 0.0

    @classmethod
    def of(cls, values: Iterable[Tensor]) -> Self:
        checksum = cls()
        for value in values:
            checksum.add(value)
        return checksum

    def add(self, value: Tensor) -> None:
        wide = value.detach().double()
        self.total += float(wide.sum())
        self.squares += float((wide * wide).sum())

    def matches(self, other: Checksum) -> bool:
        """Equal up to the order of summation."""
        scale = max(1.0, self.squares)
        return abs(self.squares - other.squares) <= 1e-9 * scale and abs(self.total - other.total) <= 1e-9 * scale

    def __str__(self) -> str:
        return f"{self.total:.9g} (squares {self.squares:.9g})"


def _finish_reason(reason: str | None) -> FinishReason:
    return cast(FinishReason, reason) if reason in ("stop", "length") else "abort"
