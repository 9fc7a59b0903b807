"""An engine that samples, takes new weights or a new adapter in place, and proves that they arrived."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rlcore.config import ExperimentConfig, LoraConfig
from rlcore.data.image_store import ImageStore
from rlcore.data.prompts import PromptBuilder
from rlcore.errors import SamplerError
from rlcore.ports import SampledGroup, SampleRequest
from rlcore.sampler.decoding import Decoded, decode
from rlcore.sampler.engine import (
    adapter_request,
    build_engine,
    engine_core,
    engine_dtype,
    engine_prompt,
    enqueue,
    forget_outputs,
    held_adapter,
    held_weights,
    install_adapter,
    over_engine,
    reset_caches,
    sampling_params,
    waiting_prompt,
)
from rlcore.sampler.proof import Parts, checksum
from rlcore.sampler.weights import WeightLoader
from rlcore.types import Completion, FinishReason, Ints

logger = logging.getLogger(__name__)


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
        join_world: bool = True,
        lora: LoraConfig | None = None,
    ) -> None:
        """
        Args:
            lora: sample with an adapter, which ``load_adapter`` brings, on the weights of ``model``.
            join_world: the calling process is one rank of a torch.distributed world, which the engine joins. With
                ``rollout.tensor_parallel`` it has to be, and that many neighbours in it hold each engine together: they
                make every call alike.
        """
        rollout = config.rollout
        self._prompts, self._images, self._device = prompts, images, device
        self._dtype = cast(torch.dtype, getattr(torch, dtype := engine_dtype(device, rollout.dtype)))
        self._version: int | None = None
        self._asleep, self._can_sleep = False, rollout.sleep != "never" and device != "cpu"
        self._sleep_is_auto = rollout.sleep == "auto"
        self._slept_bytes = 0
        # on CPU a step takes longer than a look of the scheduler, and the same core does both
        self._burst = rollout.tokens_per_burst or (1 if device == "cpu" else 16)
        self._ahead = 0 if device == "cpu" else min(4, self._burst // 2)
        self._lora, self._adapter = lora, None  # the second is what requests carry
        self._params = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_tokens": rollout.max_completion_tokens,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
            "logit_bias": {token: -100.0 for token in prompts.banned_token_ids} or None,
        }
        self._llm = build_engine(
            model,
            device=device,
            join_world=join_world,
            tensor_parallel=rollout.tensor_parallel,
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
            dtype=dtype,
            can_sleep=self._can_sleep,
            lora=lora,
        )
        self._loader = WeightLoader(self._llm, device, Parts(over_engine) if rollout.tensor_parallel > 1 else None)

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        """Sample every request; groups come when their last completion ends, as ``ports.Sampler`` says.

        Raises:
            SamplerError: no weights yet, asleep, or the engine expanded a prompt to other tokens than the trainer will.
        """
        if self._version is None or self._asleep:
            raise SamplerError("the sampler holds no current weights: call load_weights (and wake) before generate")
        params = [sampling_params(n=r.count, **self._params | self._draw(r)) for r in requests]
        bare = [self._prompts.unexpanded(r.problem) for r in requests]
        asked = [
            engine_prompt([*t.tolist(), *r.drawn.tolist()], r.problem.images, self._images)
            for r, t in zip(requests, bare, strict=True)
        ]
        named = enqueue(self._llm, asked, params, self._adapter)
        prompts = [self._expanded(r, t, names[0]) for r, t, names in zip(requests, bare, named, strict=True)]
        place = {name: index for index, names in enumerate(named) for name in names}
        missing = [len(names) for names in named]
        done: dict[str, Completion] = {}
        for ended in decode(engine_core(self._llm), self._burst, self._ahead):
            asking = [requests[place[found.request_id]] for found in ended]
            texts = self._prompts.texts(
                [np.concatenate([r.drawn, found.token_ids]) for r, found in zip(asking, ended, strict=True)]
            )
            for request, found, text in zip(asking, ended, texts, strict=True):
                done[found.request_id] = self._completion(request, found, text)
                missing[place[found.request_id]] -= 1
            whole = dict.fromkeys(index for found in ended if not missing[index := place[found.request_id]])
            if whole:
                yield {i: SampledGroup(prompts[i], tuple(done.pop(name) for name in named[i])) for i in whole}
        forget_outputs(self._llm)

    def _expanded(self, request: SampleRequest, bare: Ints, name: str) -> Ints:
        prompt, found = self._prompts.expand(bare, request.problem.images), waiting_prompt(self._llm, name)
        expected = np.concatenate([prompt, request.drawn])
        if not np.array_equal(expected, found):
            raise SamplerError(
                f"problem {request.problem.problem_id}: vLLM sees a prompt of {len(found)} tokens, "
                f"the trainer one of {len(expected)}. Image resizing differs between the two; "
                "check that data.min_pixels and data.max_pixels are those the dataset was prepared with."
            )
        return prompt

    @property
    def _budget(self) -> int:
        """Tokens of a whole completion."""
        return cast(int, self._params["max_tokens"])

    def _draw(self, request: SampleRequest) -> dict[str, object]:
        left = self._budget - len(request.drawn)
        most = left if request.max_tokens is None else min(left, request.max_tokens)
        how: dict[str, object] = {"temperature": 0.0} if request.greedy else {"seed": request.seed & 0x7FFFFFFF}
        return {"max_tokens": most, **how}

    def _completion(self, request: SampleRequest, done: Decoded, text: str) -> Completion:
        more = len(request.drawn) + len(done.token_ids) < self._budget
        cut = done.finish_reason == "length" and len(done.token_ids) == request.max_tokens and more
        return Completion(
            token_ids=done.token_ids,
            logprobs=done.logprobs,
            text=text,
            finish_reason="unfinished" if cut else _finish_reason(done.finish_reason),
            policy_version=cast(int, self._version),
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Take Hugging Face tensors in place, drop every cache that depends on weights, and prove the result.

        Returns:
            The ``checksum`` of the tensors that came in.

        Raises:
            SamplerError: the engine's parameters do not have the checksum of what was sent; or, of an engine of several
                ranks, this rank's part of them that of what it took, or no rank took some element.
        """
        # lm_head.weight included, tied or not: vLLM on CPU holds a second copy
        sent, due = self._loader.load((name, value.to(self._device, self._dtype)) for name, value in weights)
        reset_caches(self._llm)
        held = checksum(held_weights(self._llm))
        if due != held:
            raise SamplerError(
                f"after the weight sync to version {version} the bits of the sampler's parameters sum to {held}, those "
                f"of the trainer's, or of what this rank took of them, to {due}: not every weight arrived. Check that "
                "vLLM loads each tensor of this architecture by its Hugging Face name."
            )
        self._version = version
        return sent

    def check_base(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Prove once that the engine read the same weights from the model folder as the trainer.

        Raises:
            SamplerError: their checksums differ.
        """
        theirs = checksum(value.to(self._dtype) for _, value in weights)
        held = checksum(held_weights(self._llm))
        if theirs != held:
            raise SamplerError(
                f"the bits of the sampler's weights sum to {held}, of those that the trainer's adapters change to "
                f"{theirs}: with one adapter these are two policies. Check that the model folder did not change since "
                "the run started."
            )

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Take an adapter in place of the last one, drop every cache that depends on weights, and prove the result.

        Args:
            tensors: ``lora_A.weight`` and ``lora_B.weight`` of Hugging Face's modules, B times alpha / rank.

        Returns:
            The ``checksum`` of the tensors that came in.

        Raises:
            SamplerError: the engine's adapter does not have the checksum of what was sent.
        """
        if self._lora is None:
            raise SamplerError("this sampler was built without room for an adapter: give lora to VllmSampler")
        # copies, because vLLM keeps them, and what came in may be the trainer's own memory
        adapter = {name: value.detach().to(self._dtype, copy=True) for name, value in tensors}
        sent = checksum(adapter.values())
        install_adapter(self._llm, adapter, self._lora.rank)
        reset_caches(self._llm)
        held = checksum(held_adapter(self._llm))
        if sent != held:
            raise SamplerError(
                f"after the sync to version {version} the bits of the sampler's adapter sum to {held}, of the "
                f"trainer's to {sent}: not every tensor arrived. Check that vLLM has adapters for each linear layer of "
                "this architecture; model.lora.vision_tower needs it for the vision tower as well."
            )
        self._version, self._adapter = version, adapter_request(version)
        return sent

    def keep_loaded_weights(self, version: int) -> None:
        """Sample from the weights of the model folder itself."""
        self._version = version

    def sleep(self) -> None:
        """Give the engine's GPU memory back until ``wake``, where it sleeps at all (``rollout.sleep``)."""
        if self._can_sleep and not self._asleep:
            free = _free_memory()
            # a sync of all weights would overwrite them anyway; one of an adapter leaves them, so they go to the host
            self._llm.sleep(level=2 if self._lora is None else 1)
            self._asleep, self._slept_bytes = True, _free_memory() - free

    def sleep_no_more_if_there_is_room(self) -> None:
        """Under ``rollout.sleep: auto`` the engine stays awake from here on if it fits beside training.

        To be called while it sleeps, after a step: torch then still holds as much as that step took at its most.
        """
        if not (self._asleep and self._sleep_is_auto):
            return
        free, total = torch.cuda.mem_get_info()
        self._can_sleep = free - self._slept_bytes < total / 10
        logger.info(
            "the sampler needs %.1f GiB and training left %.1f of %.1f GiB free: it %s while the policy trains",
            *(value / 2**30 for value in (self._slept_bytes, free, total)),
            "sleeps" if self._can_sleep else "stays awake",
        )
        self._sleep_is_auto = False

    def wake_weights(self) -> None:
        """After ``sleep``: take back the memory of the weights, to be loaded next. ``wake_cache`` follows."""
        if self._asleep:
            if self._can_sleep:
                torch.cuda.empty_cache()  # what training took in between; else both fit together
            self._llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        """Take back the memory of the key-value cache: the engine can sample again."""
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False


def _free_memory() -> int:
    return torch.cuda.mem_get_info()[0]


def _finish_reason(reason: str | None) -> FinishReason:
    return cast(FinishReason, reason) if reason in ("stop", "length") else "abort"
