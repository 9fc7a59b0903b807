"""Decoding in bursts: vLLM's scheduler looks at the requests once in many tokens instead of once a token.

With hundreds of short sequences, what vLLM's scheduler and its output objects do in Python for each request and token
takes longer than the model on the GPU. Between two tokens there is nothing to decide, though, unless a request
ends or another can begin: so key-value blocks are allocated for a burst of tokens ahead, the model runs that often on
one plan, its steps queued behind each other, and each request is updated once for all of its tokens. A request that
ends inside a burst runs on to the burst's end, and what it draws there is dropped. While nothing waits for a place, the
first steps of the next burst are queued before the last one is looked at, so that the device has work meanwhile.

Nothing here imports vLLM (0.26 to 0.32); ``core`` is its in-process EngineCore.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rlcore.types import Floats, Ints


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """One finished request."""

    request_id: str
    token_ids: Ints  # [C], the token that ended it included
    logprobs: Floats  # [C], nats
    finish_reason: str  # vLLM's


@dataclass(slots=True)
class _Drawn:
    tokens: list[Ints] = field(default_factory=list)
    logprobs: list[Floats] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Burst:
    """What the planned requests drew, up to and including the token that ends each; rows in the order of the plan."""

    first: Any  # vLLM's ModelRunnerOutput of the first step
    names: list[str]  # [n]
    token_ids: Ints  # [n, depth]
    logprobs: Floats  # [n, depth]
    lengths: npt.NDArray[np.int64]  # [n]; 0 for a prompt that is not read to its end


def decode(core: Any, burst: int, most_ahead: int) -> Iterator[list[Decoded]]:
    """Run every request that waits in the engine to its end; after each look, those that have ended.

    Args:
        burst: most tokens that a request draws between two looks of the scheduler.
        most_ahead: steps of the next burst to queue before a look, for a device that works meanwhile; below ``burst``.
    """
    scheduler, executor = core.scheduler, core.model_executor
    scheduler.num_lookahead_tokens = burst - 1 + most_ahead
    drawn: defaultdict[str, _Drawn] = defaultdict(_Drawn)
    ahead: list[Future[Any]] = []
    while scheduler.has_requests():
        plan = scheduler.schedule()
        left = _tokens_left(scheduler, plan)
        if not left:  # tells the runner which requests are finished
            ahead = []
            scheduler.update_from_output(plan, executor.execute_model(plan))
            continue
        only_decodes = _only_decodes(scheduler, plan)
        depth = min(burst, max(left.values())) if only_decodes else 1
        steps = [*ahead, *_told(executor, plan, left, len(ahead))]
        steps += [_launch(executor, _continued(plan, left, offset)) for offset in range(len(steps), depth)]
        nothing_waits = scheduler.get_num_unfinished_requests() == len(scheduler.running)
        end = min(depth + most_ahead, max(left.values())) if only_decodes and nothing_waits else depth
        ahead = [_launch(executor, _continued(plan, left, offset)) for offset in range(depth, end)]
        result = _collect([step.result() for step in steps[:depth]], list(left), _stop_ids(scheduler, plan))
        if ended := _update(scheduler, plan, result, drawn):
            yield ended


def _only_decodes(scheduler: Any, plan: Any) -> bool:
    """Whether the tokens after the planned ones can be drawn by the same plan: nothing of a prompt is read in it."""
    one_each = plan.total_num_scheduled_tokens == len(plan.num_scheduled_tokens)
    return (
        one_each
        and not plan.scheduled_new_reqs
        and not any(scheduler.requests[name].is_prefill_chunk for name in plan.num_scheduled_tokens)
    )


def _tokens_left(scheduler: Any, plan: Any) -> dict[str, int]:
    """How many tokens each planned request may draw at most, that of the plan included."""
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
    executor.execute_model(step, non_block=True).result()  # no output yet: raises what went wrong
    future: Future[Any] = executor.sample_tokens(None, non_block=True)
    return future


def _told(executor: Any, plan: Any, left: dict[str, int], offset: int) -> list[Future[Any]]:
    """The first step that is launched for a plan, at ``offset``: it tells the runner of new blocks and of requests that
    are finished. Every request may be at its cap there; then only that is told."""
    step = plan if offset == 0 else _continued(plan, left, offset, tells=True)
    if step.total_num_scheduled_tokens == 0:
        executor.execute_model(step)
        return []
    return [_launch(executor, step)]


def _continued(plan: Any, left: dict[str, int], offset: int, *, tells: bool = False) -> Any:
    """The plan of a step that follows ``offset`` tokens behind: the same requests, less those at their cap.

    Args:
        tells: the planned step itself was not launched.
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
        step,
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        preempted_req_ids=None,
        new_block_ids_to_zero=None,
    )


def _collect(outputs: Sequence[Any], names: list[str], stop_ids: Sequence[int]) -> _Burst:
    token_ids = np.full((len(names), len(outputs)), -1, np.int32)
    logprobs = np.zeros(token_ids.shape, np.float32)
    places = {name: row for row, name in enumerate(names)}
    for column, output in enumerate(outputs):
        # a step that was launched ahead still holds requests that have ended since
        found = [
            (places[name], tokens[0], index)
            for index, (name, tokens) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True))
            if tokens and name in places
        ]
        rows, drew, indices = (list(values) for values in zip(*found, strict=True)) if found else ([], [], [])
        token_ids[rows, column] = drew
        logprobs[rows, column] = output.logprobs.logprobs[indices, 0]
    ends = np.isin(token_ids, stop_ids)
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, (token_ids >= 0).sum(axis=1))
    return _Burst(outputs[0], names, token_ids, logprobs, lengths)


def _update(scheduler: Any, plan: Any, burst: _Burst, drawn: defaultdict[str, _Drawn]) -> list[Decoded]:
    """Tell the scheduler, as if each request had drawn its last token only, behind others that it already had. Returns
    the requests that have ended."""
    last: list[list[int]] = []
    for row, (name, length) in enumerate(zip(burst.names, burst.lengths.tolist(), strict=True)):
        tokens = burst.token_ids[row, :length]
        last.append(tokens[-1:].tolist())
        if length > 1:
            request = scheduler.requests[name]
            request.append_output_token_ids(tokens[:-1].tolist())
            request.num_computed_tokens += length - 1
        if length > 0:
            drawn[name].tokens.append(tokens)
            drawn[name].logprobs.append(burst.logprobs[row, :length])
    places = {name: row for row, name in enumerate(burst.names)}
    told = replace(burst.first, req_ids=burst.names, req_id_to_index=places, sampled_token_ids=last, logprobs=None)
    ended = []
    for client in scheduler.update_from_output(plan, told).values():
        for output in client.outputs:
            if output.finish_reason is not None:
                done = drawn.pop(output.request_id)
                ended.append(
                    Decoded(
                        output.request_id,
                        np.concatenate(done.tokens),
                        np.concatenate(done.logprobs),
                        str(output.finish_reason),
                    )
                )
    return ended
