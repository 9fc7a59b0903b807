"""Decoding with several tokens per scheduler call, where vLLM's own loop calls its scheduler for every token.

With hundreds of short sequences, vLLM's Python code per request and token takes longer than the model on the GPU. But
the scheduler has nothing to decide between two tokens, unless a request ends or another can begin. So this loop
allocates key-value blocks for several tokens, queues as many steps of the model on one plan, and updates each request
once for all of its tokens. A request that ends early runs to the last of these steps, and its further tokens are
dropped. While no request waits for a slot, the first steps of the next call are queued before the results of this one
are read, so that the device is not idle.

Nothing here imports vLLM; ``core`` is its in-process EngineCore.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcore.types import Floats, Ints, Routes

ReadRoutes = Callable[[Sequence[tuple[Sequence[int], int]]], list[Routes]]  # RouteRecorder.read


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """One finished request."""

    request_id: str
    token_ids: Ints  # [C], the token that ended it included
    logprobs: Floats  # [C], nats
    finish_reason: str  # vLLM's name
    routes: Routes | None = None  # [L - 1, E, k], of the prompt as well


@dataclass(slots=True)
class _Sampled:
    """What a request has sampled so far."""

    tokens: list[Ints] = field(default_factory=list)
    logprobs: list[Floats] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """The tokens of one scheduler call, each row up to the token that ends its request; rows in the plan's order."""

    first: Any  # vLLM's ModelRunnerOutput of the first step
    names: list[str]  # [n]
    token_ids: Ints  # [n, depth]
    logprobs: Floats  # [n, depth]
    lengths: npt.NDArray[np.int64]  # [n]; 0 until a request's whole prompt is computed


def decode(
    core: Any, tokens_per_call: int, queued_ahead: int, read_routes: ReadRoutes | None = None
) -> Iterator[list[Decoded]]:
    """Run all requests in the engine to their end. After each scheduler call, yields the requests that have ended.

    Args:
        tokens_per_call: the most tokens that a request samples between two calls of the scheduler.
        queued_ahead: the most steps of the next call that are queued before the results of this one are read; less than
            ``tokens_per_call``.
        read_routes: reads the chosen experts of requests that have ended. None: none are recorded.
    """
    scheduler, executor = core.scheduler, core.model_executor
    scheduler.num_lookahead_tokens = tokens_per_call - 1 + queued_ahead
    sampled: defaultdict[str, _Sampled] = defaultdict(_Sampled)
    ahead: list[Future[Any]] = []
    while scheduler.has_requests():
        plan = scheduler.schedule()
        left = _tokens_left(scheduler, plan)
        if not left:  # run the plan, because it tells the runner which requests are finished
            ahead = []
            scheduler.update_from_output(plan, executor.execute_model(plan))
            continue
        only_decodes = _only_decodes(scheduler, plan)
        depth = min(tokens_per_call, max(left.values())) if only_decodes else 1
        steps = [*ahead, *_first_step(executor, plan, left, len(ahead))]
        steps += [_launch(executor, _continued(plan, left, offset)) for offset in range(len(steps), depth)]
        nothing_waits = scheduler.get_num_unfinished_requests() == len(scheduler.running)
        end = min(depth + queued_ahead, max(left.values())) if only_decodes and nothing_waits else depth
        ahead = [_launch(executor, _continued(plan, left, offset)) for offset in range(depth, end)]
        result = _collect([step.result() for step in steps[:depth]], list(left), _stop_ids(scheduler, plan))
        held = {} if read_routes is None else _held(scheduler, result.names)
        ended = _update(scheduler, plan, result, sampled)
        if ended and read_routes is not None:  # before the next plan, which may give the blocks to other requests
            ended = _with_routes(ended, held, read_routes)
        if ended:
            yield ended


def _only_decodes(scheduler: Any, plan: Any) -> bool:
    """Whether the same plan can sample further tokens: it computes no part of a prompt."""
    one_each = plan.total_num_scheduled_tokens == len(plan.num_scheduled_tokens)
    return (
        one_each
        and not plan.scheduled_new_reqs
        and not any(scheduler.requests[name].is_prefill_chunk for name in plan.num_scheduled_tokens)
    )


def _tokens_left(scheduler: Any, plan: Any) -> dict[str, int]:
    """How many more tokens each planned request may sample, including the plan's token."""
    left = {}
    for name in plan.num_scheduled_tokens:
        request = scheduler.requests[name]
        most = min(request.max_tokens, scheduler.max_model_len - request.num_prompt_tokens)
        left[name] = most - request.num_output_tokens
    return left


def _stop_ids(scheduler: Any, plan: Any) -> list[int]:
    """Tokens that end a completion; all requests have the same."""
    params = scheduler.requests[next(iter(plan.num_scheduled_tokens))].sampling_params
    eos = [] if params.eos_token_id is None else [params.eos_token_id]
    return [*eos, *(params.stop_token_ids or ())]


def _launch(executor: Any, step: Any) -> Future[Any]:
    """On a GPU the step is only queued."""
    executor.execute_model(step, non_block=True).result()  # has no output yet, but raises errors
    future: Future[Any] = executor.sample_tokens(None, non_block=True)
    return future


def _first_step(executor: Any, plan: Any, left: dict[str, int], offset: int) -> list[Future[Any]]:
    """Launch the first step of a plan, at ``offset``. It tells the runner about new blocks and finished requests.

    If every request has reached its limit at ``offset``, it does nothing else.
    """
    step = plan if offset == 0 else _continued(plan, left, offset, tells=True)
    if step.total_num_scheduled_tokens == 0:
        executor.execute_model(step)
        return []
    return [_launch(executor, step)]


def _continued(plan: Any, left: dict[str, int], offset: int, *, tells: bool = False) -> Any:
    """The plan of the step ``offset`` tokens later: the same requests without those that have reached their limit.

    Args:
        tells: the step tells the runner about new blocks, because the planned step itself was not launched.
    """
    cached = plan.scheduled_cached_reqs
    rows = [row for row, name in enumerate(cached.req_ids) if left[name] > offset]
    names = [cached.req_ids[row] for row in rows]
    step = replace(
        plan,
        scheduled_cached_reqs=replace(
            cached,
            req_ids=names,
            new_block_ids=[cached.new_block_ids[row] if tells else None for row in rows],
            num_computed_tokens=[cached.num_computed_tokens[row] + offset for row in rows],
            num_output_tokens=[cached.num_output_tokens[row] + offset for row in rows],
        ),
        num_scheduled_tokens=dict.fromkeys(names, 1),
        total_num_scheduled_tokens=len(names),
    )
    if tells:
        return step
    return replace(
        step, finished_req_ids=set(), free_encoder_mm_hashes=[], preempted_req_ids=None, new_block_ids_to_zero=None
    )


def _collect(outputs: Sequence[Any], names: list[str], stop_ids: Sequence[int]) -> _Tokens:
    token_ids = np.full((len(names), len(outputs)), -1, np.int32)
    logprobs = np.zeros(token_ids.shape, np.float32)
    places = {name: row for row, name in enumerate(names)}
    for column, output in enumerate(outputs):
        # a step that was launched ahead can include requests that have ended since
        sampled = [
            (places[name], tokens[0], index)
            for index, (name, tokens) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True))
            if tokens and name in places
        ]
        rows, ids, indices = (list(values) for values in zip(*sampled, strict=True)) if sampled else ([], [], [])
        token_ids[rows, column] = ids
        logprobs[rows, column] = output.logprobs.logprobs[indices, 0]
    ends = np.isin(token_ids, stop_ids)
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, (token_ids >= 0).sum(axis=1))
    return _Tokens(outputs[0], names, token_ids, logprobs, lengths)


def _update(scheduler: Any, plan: Any, result: _Tokens, sampled: defaultdict[str, _Sampled]) -> list[Decoded]:
    """Update the scheduler, and return the requests that have ended.

    All tokens but the last are added to the request first. To the scheduler it has then sampled the last one only.
    """
    last: list[list[int]] = []
    for row, (name, length) in enumerate(zip(result.names, result.lengths.tolist(), strict=True)):
        tokens = result.token_ids[row, :length]
        last.append(tokens[-1:].tolist())
        if length > 1:
            request = scheduler.requests[name]
            request.append_output_token_ids(tokens[:-1].tolist())
            request.num_computed_tokens += length - 1
        if length > 0:
            sampled[name].tokens.append(tokens)
            sampled[name].logprobs.append(result.logprobs[row, :length])
    places = {name: row for row, name in enumerate(result.names)}
    step_output = replace(
        result.first, req_ids=result.names, req_id_to_index=places, sampled_token_ids=last, logprobs=None
    )
    ended = []
    for client in scheduler.update_from_output(plan, step_output).values():
        for output in client.outputs:
            if output.finish_reason is not None:
                done = sampled.pop(output.request_id)
                ended.append(
                    Decoded(
                        output.request_id,
                        np.concatenate(done.tokens),
                        np.concatenate(done.logprobs),
                        str(output.finish_reason),
                    )
                )
    return ended


def _held(scheduler: Any, names: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Each request with its key-value blocks, which the scheduler forgets when the request ends."""
    return {name: (scheduler.requests[name], scheduler.kv_cache_manager.get_blocks(name).blocks[0]) for name in names}


def _with_routes(
    ended: Sequence[Decoded], held: Mapping[str, tuple[Any, Any]], read_routes: ReadRoutes
) -> list[Decoded]:
    pairs = [held[done.request_id] for done in ended]
    routes = read_routes([([block.block_id for block in blocks], request.num_tokens - 1) for request, blocks in pairs])
    return [replace(done, routes=own) for done, own in zip(ended, routes, strict=True)]
