"""Decoding in bursts: vLLM's scheduler looks at the requests once in many tokens instead of once a token.

With hundreds of short sequences, what vLLM's scheduler and its output objects do in Python for each request and token
takes longer than the model on the GPU. Between two tokens there is nothing to decide, though, unless a request
ends or another can begin: so key-value blocks are allocated for a burst of tokens ahead, the model runs that often on
one plan, its steps queued behind each other, and each request is updated once for all of its tokens. A request that
ends inside a burst runs on to the burst's end, and what it draws there is dropped.

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
    """What n requests drew, up to and including the token that ends them; rows in the order of ``first.req_ids``."""

    first: Any  # vLLM's ModelRunnerOutput of the planned step
    token_ids: Ints  # [n, depth]
    logprobs: Floats  # [n, depth]
    lengths: npt.NDArray[np.int64]  # [n]; 0 for a prompt that is not read to its end


def decode(core: Any, burst: int) -> Iterator[Decoded]:
    """Run every request that waits in the engine to its end; each comes out when it is finished.

    Args:
        burst: most tokens that a request draws between two looks of the scheduler.
    """
    scheduler, executor = core.scheduler, core.model_executor
    scheduler.num_lookahead_tokens = burst - 1
    drawn: defaultdict[str, _Drawn] = defaultdict(_Drawn)
    while scheduler.has_requests():
        plan = scheduler.schedule()
        if plan.total_num_scheduled_tokens == 0:  # tells the runner which requests are finished
            scheduler.update_from_output(plan, executor.execute_model(plan))
            continue
        left = _tokens_left(scheduler, plan)
        depth = min(burst, max(left.values())) if _only_decodes(scheduler, plan) else 1
        result = _collect(list(_launch(executor, plan, left, depth)), _stop_ids(scheduler, plan))
        yield from _update(scheduler, plan, result, drawn)


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


def _launch(executor: Any, plan: Any, left: dict[str, int], depth: int) -> Iterator[Future[Any]]:
    """The planned step and ``depth - 1`` more; on a GPU they are only queued."""
    for offset in range(depth):
        step = plan if offset == 0 else _continued(plan, left, offset)
        executor.execute_model(step, non_block=True).result()  # no output yet: raises what went wrong
        yield executor.sample_tokens(None, non_block=True)


def _continued(plan: Any, left: dict[str, int], offset: int) -> Any:
    """The plan of a step that follows ``offset`` tokens behind: the same requests, less those at their cap."""
    cached = plan.scheduled_cached_reqs
    rows = [row for row, name in enumerate(cached.req_ids) if left[name] > offset]
    names = [cached.req_ids[row] for row in rows]
    return replace(
        plan,
        scheduled_cached_reqs=replace(
            cached,
            req_ids=names,
            resumed_req_ids=set(),
            all_token_ids={},
            new_block_ids=[None] * len(names),
            num_computed_tokens=[cached.num_computed_tokens[row] + offset for row in rows],
            num_output_tokens=[cached.num_output_tokens[row] + offset for row in rows],
        ),
        num_scheduled_tokens=dict.fromkeys(names, 1),
        total_num_scheduled_tokens=len(names),
        scheduled_encoder_inputs={},
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        preempted_req_ids=None,
        new_block_ids_to_zero=None,
    )


def _collect(steps: Sequence[Future[Any]], stop_ids: Sequence[int]) -> _Burst:
    first = steps[0].result()
    token_ids = np.full((len(first.req_ids), len(steps)), -1, np.int32)
    logprobs = np.zeros(token_ids.shape, np.float32)
    for column, step in enumerate(steps):
        output = step.result()
        drew = [bool(tokens) for tokens in output.sampled_token_ids]
        same = output.req_ids == first.req_ids
        rows = np.arange(len(drew)) if same else np.array([first.req_id_to_index[name] for name in output.req_ids])
        token_ids[rows[drew], column] = [tokens[0] for tokens in output.sampled_token_ids if tokens]
        logprobs[rows[drew], column] = output.logprobs.logprobs[: len(drew)][drew, 0]
    ends = np.isin(token_ids, stop_ids)
    lengths = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, (token_ids >= 0).sum(axis=1))
    return _Burst(first, token_ids, logprobs, lengths)


def _update(scheduler: Any, plan: Any, burst: _Burst, drawn: defaultdict[str, _Drawn]) -> Iterator[Decoded]:
    """Tell the scheduler, as if each request had drawn its last token only, behind others that it already had."""
    last: list[list[int]] = []
    lengths = burst.lengths.tolist()
    for row, (name, length) in enumerate(zip(burst.first.req_ids, lengths, strict=True)):
        tokens = burst.token_ids[row, :length]
        last.append(tokens[-1:].tolist())
        if length > 1:
            request = scheduler.requests[name]
            request.append_output_token_ids(tokens[:-1].tolist())
            request.num_computed_tokens += length - 1
        if length > 0:
            drawn[name].tokens.append(tokens)
            drawn[name].logprobs.append(burst.logprobs[row, :length])
    outputs = scheduler.update_from_output(plan, replace(burst.first, sampled_token_ids=last, logprobs=None))
    for client in outputs.values():
        for output in client.outputs:
            if output.finish_reason is not None:
                done = drawn.pop(output.request_id)
                yield Decoded(
                    output.request_id,
                    np.concatenate(done.tokens),
                    np.concatenate(done.logprobs),
                    str(output.finish_reason),
                )
