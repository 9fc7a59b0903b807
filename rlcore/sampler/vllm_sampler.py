"""An engine that samples, takes new weights or a new adapter in place, and verifies that they arrived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import numpy as np
from torch import Tensor

from rlcore.data.image_store import ImageStore
from rlcore.data.prompts import PromptBuilder
from rlcore.errors import SamplerError
from rlcore.ports import SampledGroup, SampleRequest
from rlcore.sampler.decoding import Decoded, decode
from rlcore.sampler.engine import Engine, adapter_request, engine_prompt, over_engine, sampling_params
from rlcore.sampler.sleep import EngineSleep
from rlcore.sampler.verify import Parts, checksum
from rlcore.sampler.weights import WeightLoader
from rlcore.types import Completion, FinishReason, Ints


class VllmSampler:
    """One engine on one device. Implements ``ports.Sampler``.

    ``load_weights`` or ``load_adapter`` has to be called before the first ``generate``, so that the weights have a
    version.
    """

    def __init__(self, engine: Engine, *, prompts: PromptBuilder, images: ImageStore) -> None:
        rollout = engine.config.rollout
        self._engine, self._prompts, self._images = engine, prompts, images
        self._version: int | None = None
        self._lora = engine.config.model.lora
        self.memory = EngineSleep(engine)
        # on CPU a step takes longer than a scheduler call, and the same core does both
        self._tokens_per_call = rollout.scheduler_steps_per_call or (1 if engine.device == "cpu" else 16)
        self._queued_ahead = 0 if engine.device == "cpu" else min(4, self._tokens_per_call // 2)
        self._params = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_tokens": rollout.max_completion_tokens,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
            "logit_bias": {token: -100.0 for token in prompts.banned_token_ids} or None,
        }
        self._loader = WeightLoader(
            engine.llm, engine.device, Parts(over_engine) if rollout.tensor_parallel > 1 else None
        )

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        """Sample every request; groups come when their last completion ends, as ``ports.Sampler`` says.

        Raises:
            SamplerError: no weights yet, asleep, or the engine expanded a prompt to other tokens than the trainer will.
        """
        if self._version is None or self.memory.asleep:
            raise SamplerError("the sampler holds no current weights: call load_weights (and wake) before generate")
        params = [sampling_params(n=r.count, **self._params | self._sampling_of(r)) for r in requests]
        bare = [self._prompts.unexpanded(r.problem) for r in requests]
        asked = [
            engine_prompt([*t.tolist(), *r.drawn.tolist()], r.problem.images, self._images)
            for r, t in zip(requests, bare, strict=True)
        ]
        adapter = None if self._lora is None else adapter_request(self._version)
        named = self._engine.enqueue(asked, params, adapter)
        prompts = [self._expanded(r, t, names[0]) for r, t, names in zip(requests, bare, named, strict=True)]
        place = {name: index for index, names in enumerate(named) for name in names}
        missing = [len(names) for names in named]
        done: dict[str, Completion] = {}
        for ended in decode(self._engine.core, self._tokens_per_call, self._queued_ahead):
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
        self._engine.forget_outputs()

    def _expanded(self, request: SampleRequest, bare: Ints, name: str) -> Ints:
        prompt, found = self._prompts.expand(bare, request.problem.images), self._engine.waiting_prompt(name)
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

    def _sampling_of(self, request: SampleRequest) -> dict[str, object]:
        left = self._budget - len(request.drawn)
        most = left if request.max_tokens is None else min(left, request.max_tokens)
        how: dict[str, object] = {"temperature": 0.0} if request.greedy else {"seed": request.seed & 0x7FFFFFFF}
        return {"max_tokens": most, **how}

    def _completion(self, request: SampleRequest, done: Decoded, text: str) -> Completion:
        more = len(request.drawn) + len(done.token_ids) < self._budget
        cut = done.finish_reason == "length" and len(done.token_ids) == request.max_tokens and more
        return Completion.one_turn(
            token_ids=done.token_ids,
            logprobs=done.logprobs,
            text=text,
            finish_reason="unfinished" if cut else _finish_reason(done.finish_reason),
            policy_version=cast(int, self._version),
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Take Hugging Face tensors in place, drop every cache that depends on weights, and verify the result.

        Returns:
            The ``checksum`` of the tensors that came in.

        Raises:
            SamplerError: the engine's parameters do not have the checksum of what was sent; or, of an engine of several
                ranks, this rank's part of them that of what it took, or no rank took some element.
        """
        # lm_head.weight included, tied or not: vLLM on CPU holds a second copy
        device, dtype = self._engine.device, self._engine.dtype
        sent, due = self._loader.load((name, value.to(device, dtype)) for name, value in weights)
        self._engine.reset_caches()
        held = checksum(self._engine.held_weights())
        if due != held:
            raise SamplerError(
                f"after the weight sync to version {version} the bits of the sampler's parameters sum to {held}, those "
                f"of the trainer's, or of what this rank took of them, to {due}: not every weight arrived. Check that "
                "vLLM loads each tensor of this architecture by its Hugging Face name."
            )
        self._version = version
        return sent

    def check_base(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Verify once that the engine read the same weights from the model folder as the trainer.

        Raises:
            SamplerError: their checksums differ.
        """
        theirs = checksum(value.to(self._engine.dtype) for _, value in weights)
        held = checksum(self._engine.held_weights())
        if theirs != held:
            raise SamplerError(
                f"the bits of the sampler's weights sum to {held}, of those that the trainer's adapters change to "
                f"{theirs}: with one adapter these are two policies. Check that the model folder did not change since "
                "the run started."
            )

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Take an adapter in place of the last one, drop every cache that depends on weights, and verify the result.

        Args:
            tensors: ``lora_A.weight`` and ``lora_B.weight`` of Hugging Face's modules, B times alpha / rank.

        Returns:
            The ``checksum`` of the tensors that came in.

        Raises:
            SamplerError: the engine's adapter does not have the checksum of what was sent.
        """
        if self._lora is None:
            raise SamplerError("this sampler has no room for an adapter: model.lora is null")
        # copies, because vLLM keeps them, and what came in may be the trainer's own memory
        adapter = {name: value.detach().to(self._engine.dtype, copy=True) for name, value in tensors}
        sent = checksum(adapter.values())
        self._engine.install_adapter(adapter, self._lora.rank)
        self._engine.reset_caches()
        held = checksum(self._engine.held_adapter())
        if sent != held:
            raise SamplerError(
                f"after the sync to version {version} the bits of the sampler's adapter sum to {held}, of the "
                f"trainer's to {sent}: not every tensor arrived. Check that vLLM has adapters for each linear layer of "
                "this architecture; model.lora.vision_tower needs it for the vision tower as well."
            )
        self._version = version
        return sent

    def keep_loaded_weights(self, version: int) -> None:
        """Sample from the weights of the model folder itself."""
        self._version = version


def _finish_reason(reason: str | None) -> FinishReason:
    return cast(FinishReason, reason) if reason in ("stop", "length") else "abort"
