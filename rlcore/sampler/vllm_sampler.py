"""An engine that samples, takes new weights or a new adapter, and verifies that they arrived."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from rlcore.data.pixels import ImageStore
from rlcore.data.prompts import PromptBuilder
from rlcore.errors import SamplerError
from rlcore.sampler.decoding import Decoded, decode
from rlcore.sampler.engine import Engine, adapter_request, engine_prompt, over_engine, sampling_params
from rlcore.sampler.weights import Parts, WeightLoader, checksum, watched
from rlcore.types import Completion, FinishReason, Ints, SampledGroup, SampleRequest

if TYPE_CHECKING:
    from rlcore.data.probe import ProbeSequence

logger = logging.getLogger(__name__)


class EngineSleep:
    """Frees the engine's GPU memory while the policy trains, as ``rollout.sleep`` says. Does nothing on a CPU."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        mode = engine.config.rollout.sleep
        self._sleeps, self._undecided = mode != "never" and engine.device != "cpu", mode == "auto"
        self.lost_weights = True  # the first sync sends all of them
        self._freed_bytes = self._peak_bytes = 0
        self.asleep = False

    def sleep(self) -> None:
        """Free the engine's memory until ``wake_weights`` and ``wake_cache``."""
        if self._sleeps and not self.asleep:
            self._end_phase()
            free, _ = torch.cuda.mem_get_info()
            # 1 keeps a copy of the weights on the host, whose allocation takes seconds; 2 drops them
            syncs_send_all = self._engine.config.model.lora is None
            drops = syncs_send_all or self.lost_weights or self._undecided
            self._engine.llm.sleep(level=2 if drops else 1)
            self.lost_weights = drops
            self.asleep, self._freed_bytes = True, torch.cuda.mem_get_info()[0] - free

    def decide(self) -> None:
        """With ``rollout.sleep`` "auto", keep the engine awake from now on if it fits into memory next to training.

        Call it after a step, while the engine sleeps: torch still holds the memory of that step's peak.
        """
        if not (self.asleep and self._undecided):
            return
        free, total = torch.cuda.mem_get_info()
        self._sleeps, self._undecided = free - self._freed_bytes < total / 10, False
        logger.info(
            "the sampler needs %.1f GiB and training left %.1f of %.1f GiB free: it %s while the policy trains",
            *(value / 2**30 for value in (self._freed_bytes, free, total)),
            "sleeps" if self._sleeps else "stays awake",
        )

    def wake_weights(self) -> None:
        """Allocate the memory of the weights again, without their values."""
        if self.asleep:
            self._end_phase()
            if self._sleeps:
                torch.cuda.empty_cache()  # memory that training used; without sleep both fit
            self._engine.llm.wake_up(tags=["weights"])

    def wake_cache(self) -> None:
        """Allocate the key-value cache again: the engine can sample."""
        if self.asleep:
            self._end_phase()
            self._engine.llm.wake_up(tags=["kv_cache"])
            self.asleep = False

    def take_peak_bytes(self) -> int:
        """The largest GPU memory of this process's tensors since the last call. What sleeps is left out."""
        self._end_phase()
        peak, self._peak_bytes = self._peak_bytes, 0
        return peak

    def _end_phase(self) -> None:
        """Note the peak of a phase in which the same parts of the engine slept. torch counts them as allocated."""
        awake = torch.cuda.max_memory_allocated() - self._engine.sleeping_bytes()
        self._peak_bytes = max(self._peak_bytes, awake)
        torch.cuda.reset_peak_memory_stats()


class VllmSampler:
    """One engine on one device. Implements ``types.Sampler``.

    Call ``load_weights`` or ``load_adapter`` before the first ``generate``: it needs the version of the weights.
    """

    def __init__(self, engine: Engine, *, prompts: PromptBuilder, images: ImageStore) -> None:
        rollout = engine.config.rollout
        self._engine, self._prompts, self._images = engine, prompts, images
        self._version: int | None = None
        self._lora = engine.config.model.lora
        self.memory = EngineSleep(engine)
        # fewer on a CPU: a sequence that ends early runs on to the end of the call, which costs more there
        self._tokens_per_call = rollout.scheduler_steps_per_call or (4 if engine.device == "cpu" else 16)
        self._queued_ahead = 0 if engine.device == "cpu" else min(4, self._tokens_per_call // 2)
        self._params = {
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_tokens": rollout.max_completion_tokens,
            "logprobs": 0,  # of the sampled token only
            "detokenize": False,
            "logit_bias": {token: -100.0 for token in prompts.banned_token_ids} or None,
        }
        together = rollout.tensor_parallel > 1
        parts, quantised = Parts(over_engine) if together else None, engine.quantised_layers()
        quantising = None if quantised is None else quantised.watched
        self._loader = WeightLoader(engine.llm, engine.device, parts, quantising)
        self._adapter_parts = Parts(over_engine, may_tie=False) if together else None
        self.ready_at = time.time()

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        """Sample every request; yield each group when its last completion ends (``types.Sampler``).

        Raises:
            SamplerError: the sampler has no weights or is asleep, or the engine and the trainer expand a prompt to
                different tokens.
        """
        if self._version is None or self.memory.asleep:
            raise SamplerError("the sampler holds no current weights: call load_weights and wake it before generate")
        params = [sampling_params(n=r.count, **self._params | self._sampling_of(r)) for r in requests]
        problems = {id(r.problem): r.problem for r in requests}  # an evaluation has a request for each sample
        bare = {key: self._prompts.unexpanded(problem) for key, problem in problems.items()}
        asked = {key: engine_prompt(bare[key].tolist(), p.images, self._images) for key, p in problems.items()}
        adapter = None if self._lora is None else adapter_request(self._version)
        named = self._engine.enqueue(
            [_continued(asked[id(r.problem)], r.so_far) if len(r.so_far) else asked[id(r.problem)] for r in requests],
            params,
            adapter,
        )
        expanded = {
            key: self._prompts.placeholders.expand(bare[key], problem.images) for key, problem in problems.items()
        }
        prompts = [expanded[id(r.problem)] for r in requests]
        for request, prompt, names in zip(requests, prompts, named, strict=True):
            self._require_same(request, prompt, names[0])
        place = {name: index for index, names in enumerate(named) for name in names}
        missing = [len(names) for names in named]
        done: dict[str, Completion] = {}
        for ended in decode(self._engine.core, self._tokens_per_call, self._queued_ahead, self._engine.read_routes):
            asking = [requests[place[answer.request_id]] for answer in ended]
            texts = self._prompts.texts(
                [np.concatenate([r.so_far, answer.token_ids]) for r, answer in zip(asking, ended, strict=True)]
            )
            for request, answer, text in zip(asking, ended, texts, strict=True):
                done[answer.request_id] = self._completion(request, answer, text)
                missing[place[answer.request_id]] -= 1
            whole = dict.fromkeys(index for answer in ended if not missing[index := place[answer.request_id]])
            if whole:
                yield {i: SampledGroup(prompts[i], tuple(done.pop(name) for name in named[i])) for i in whole}
        self._engine.forget_outputs()

    def _require_same(self, request: SampleRequest, prompt: Ints, name: str) -> None:
        """
        Raises:
            SamplerError: the engine expanded the prompt to other tokens.
        """
        expected, expanded = np.concatenate([prompt, request.so_far]), self._engine.waiting_prompt(name)
        if not np.array_equal(expected, expanded):
            raise SamplerError(
                f"problem {request.problem.problem_id}: vLLM sees a prompt of {len(expanded)} tokens, "
                f"the trainer one of {len(expected)}. They resize images differently. Set data.min_pixels and "
                "data.max_pixels to the values that the dataset was prepared with."
            )

    def read_problems(self, prompts: PromptBuilder, images: ImageStore) -> None:
        """Take later requests from another dataset. ``prompts`` are of the same model."""
        self._prompts, self._images = prompts, images

    def reset_caches(self) -> None:
        """Drop everything that earlier requests left, as a weight sync does: later ones are computed as after it."""
        self._engine.reset_caches()

    def prompt_logprobs(self, sequences: Sequence[ProbeSequence]) -> list[list[float]]:
        """The engine's log-probs (nats, temperature 1) of each sequence's completion tokens, by its current weights."""
        adapter = None if self._lora is None else adapter_request(cast(int, self._version))
        return self._engine.prompt_logprobs(sequences, self._images, adapter)

    def decoder_layers(self, count: int) -> nn.ModuleList | None:
        """``Engine.decoder_layers``."""
        return self._engine.decoder_layers(count)

    @property
    def _budget(self) -> int:
        """Tokens of a whole completion."""
        return cast(int, self._params["max_tokens"])

    def _sampling_of(self, request: SampleRequest) -> dict[str, object]:
        left = self._budget - len(request.so_far)
        most = left if request.max_tokens is None else min(left, request.max_tokens)
        how: dict[str, object] = {"temperature": 0.0} if request.greedy else {"seed": request.seed & 0x7FFFFFFF}
        if request.decoding is not None:
            how |= asdict(request.decoding)
        return {"max_tokens": most, **how}

    def _completion(self, request: SampleRequest, done: Decoded, text: str) -> Completion:
        more = len(request.so_far) + len(done.token_ids) < self._budget
        cut = done.finish_reason == "length" and len(done.token_ids) == request.max_tokens and more
        return Completion.one_turn(
            token_ids=done.token_ids,
            logprobs=done.logprobs,
            text=text,
            finish_reason="unfinished" if cut else _finish_reason(done.finish_reason),
            policy_version=cast(int, self._version),
            routes=done.routes,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Load Hugging Face tensors, drop every cache that depends on weights, and verify the result.

        Returns:
            The ``checksum`` of the tensors received.

        Raises:
            SamplerError: the engine's parameters do not have the expected checksum; or, in an engine of several ranks,
                no rank copied some element.
        """
        # lm_head.weight included, tied or not: vLLM on CPU holds a second copy
        device, dtype = self._engine.device, self._engine.dtype
        family = self._engine.family
        sent, due = self._loader.load(
            (family.published_name(name), family.as_published(name, value.to(device, dtype))) for name, value in weights
        )
        self._engine.reset_caches()
        actual = checksum(self._engine.held_weights())
        if due != actual:
            raise SamplerError(
                f"after the weight sync to version {version} the sampler's parameters have the checksum {actual}, and "
                f"the trainer's, or this rank's part of them, {due}: not every weight arrived. Check that vLLM loads "
                "each tensor of this architecture by its Hugging Face name."
            )
        self._version = version
        return sent

    def load_base(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """``load_weights`` for the frozen weights of a policy with adapters. Call ``load_adapter`` afterwards."""
        with self._engine.without_adapter_layers():
            self.load_weights(weights, version=0)
        self._version = None
        self.memory.lost_weights = False

    @property
    def needs_base(self) -> bool:
        """Whether the frozen weights of a policy with adapters must be sent before its adapter."""
        return self.memory.lost_weights

    def load_adapter(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Replace the adapter, drop every cache that depends on weights, and verify the result.

        Args:
            tensors: ``lora_A.weight`` and ``lora_B.weight`` of Hugging Face's modules, B times alpha / rank.

        Returns:
            The ``checksum`` of the tensors received.

        Raises:
            SamplerError: the engine's adapter does not have the expected checksum; or, in an engine of several ranks,
                no rank copied some element.
        """
        if self._lora is None:
            raise SamplerError("this sampler has no buffers for an adapter: model.lora is null")
        # copies, because vLLM keeps them, and the tensors may be the trainer's memory
        adapter = {name: value.detach().to(self._engine.dtype, copy=True) for name, value in tensors}
        sent = due = checksum(adapter.values())
        install = partial(self._engine.install_adapter, adapter, self._lora.rank)
        if self._adapter_parts is None:
            install()
        else:
            due = self._adapter_parts.of(adapter, watched(install, adapter))
        self._engine.reset_caches()
        actual = checksum(self._engine.held_adapter())
        if due != actual:
            raise SamplerError(
                f"after the sync to version {version} the sampler's adapter has the checksum {actual}, and the "
                f"trainer's, or this rank's part of it, {due}: not every tensor arrived. Check that vLLM supports "
                "adapters for each linear layer of this architecture, with model.lora.vision_tower for the vision "
                "tower as well."
            )
        self._version = version
        return sent

    def keep_loaded_weights(self, version: int) -> None:
        """Sample from the weights of the model folder."""
        self._version = version


def _finish_reason(reason: str | None) -> FinishReason:
    return cast(FinishReason, reason) if reason in ("stop", "length") else "abort"


def _continued(prompt: Mapping[str, Any], so_far: Ints) -> dict[str, Any]:
    """vLLM's input of a completion that goes on after its first tokens."""
    return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *so_far.tolist()]}
