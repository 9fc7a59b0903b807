"""One grading process: ``python -m rlcore.rewards.worker FD SCRATCH``, started and killed by ``GradingPool``.

It enters the sandbox (sandbox.py), reads a pickled reward from the socket FD, and reports that it can grade, or why
not. Then it reads lists of jobs and answers each job in order with a score, or a traceback if the reward raised. A
batch reward gets the whole list at once. Jobs and answers are JSON, so that no text of a model is ever unpickled.
"""

from __future__ import annotations

import ctypes
import json
import math
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from rlcore.rewards import sandbox
from rlcore.rewards.protocol import MAX_GIVEN_CHARS, BatchRewardFn, Job, Reward, answer_to_json, jobs_from_json
from rlcore.rewards.user import UserFunction
from rlcore.types import Score

MEMORY_BYTES = 4 << 30  # per grading; with more, the kernel could kill the trainer instead
MAX_TRACEBACK_CHARS = 20_000  # from its end
HINT = (
    "\nA reward has no network, cannot start processes, and writes only into its temporary folder: "
    "docs/howto/own-reward.md."
)
_PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer handles Ctrl-C
    connection, scratch = Connection(int(sys.argv[1])), Path(sys.argv[2])
    missing = sandbox.enter(scratch)
    if sys.platform == "linux":  # a worker stuck in sympy must not outlive a killed trainer
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        reward = _receive_reward(connection, missing)
        _limit_memory()
        if not isinstance(_innermost(reward), UserFunction):
            sandbox.read_code_only(scratch)  # a user's own function may read its files
        while reward is not None:
            for answer in _answers(reward, jobs_from_json(connection.recv_bytes())):
                connection.send_bytes(answer_to_json(answer))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the pool was closed


def _receive_reward(connection: Connection, missing: list[str]) -> Reward | None:
    payload = connection.recv_bytes()
    try:
        reward: Reward = pickle.loads(payload)  # from the trainer, before any text of a model arrives
    except Exception as error:  # noqa: BLE001 - the pool reports whatever an import raises
        connection.send_bytes(json.dumps({"error": _describe(error), "missing": missing}).encode())
        return None
    connection.send_bytes(json.dumps({"error": None, "missing": missing}).encode())
    return reward


def _innermost(reward: object) -> object:
    """The reward without the length penalty and the stripping of thoughts around it."""
    while (inner := getattr(reward, "inner", None)) is not None:
        reward = inner
    return reward


def _answers(reward: Reward, jobs: Sequence[Job]) -> Iterator[Score | str]:
    """For each job in order its Score, or a traceback."""
    if isinstance(reward, BatchRewardFn):
        yield from _batch_answers(reward, jobs)
        return
    for job in jobs:
        try:
            answer: Score | str = _checked(reward(*job))
        except BaseException as error:  # noqa: BLE001 - even SystemExit affects one completion only
            answer = _describe(error)
        yield answer


def _batch_answers(reward: BatchRewardFn, jobs: Sequence[Job]) -> Sequence[Score | str]:
    try:
        scores = [_checked(score) for score in reward.score_batch(jobs)]
        if len(scores) != len(jobs):
            raise TypeError(f"the reward returned {len(scores)} scores for {len(jobs)} completions")
    except BaseException as error:  # noqa: BLE001
        return [_describe(error)] * len(jobs)
    return scores


def _describe(error: BaseException) -> str:
    refused = isinstance(error, PermissionError) or isinstance(error.__cause__ or error.__context__, PermissionError)
    return "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:] + (HINT if refused else "")


def _checked(score: object) -> Score:
    if not isinstance(score, Score) or not all(map(math.isfinite, (score.reward, *score.parts.values()))):
        raise TypeError(f"the reward returned {score!r}, not a Score of finite numbers")
    answer = None if score.answer is None else str(score.answer)[:MAX_GIVEN_CHARS]
    return Score(float(score.reward), {str(k): float(v) for k, v in score.parts.items()}, bool(score.graded), answer)


def _limit_memory() -> None:
    """Cap the address space at what is mapped now plus ``MEMORY_BYTES``."""
    if sys.platform == "linux":
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = mapped + MEMORY_BYTES
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


if __name__ == "__main__":
    main()
