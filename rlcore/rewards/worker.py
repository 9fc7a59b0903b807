"""One grading process: ``python -m rlcore.rewards.worker FD``, started and killed by ``GradingPool``.

Over the socket FD it takes a pickled reward, answers None when it can grade (else a traceback), and then, for
each list of jobs, answers each in turn with a Score, or with a traceback where the reward raised. A reward of
many completions at once gets the whole list, so its first answer comes when it has them all.
"""

from __future__ import annotations

import ctypes
import math
import pickle
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from rlcore.rewards.protocol import BatchRewardFn, Job, Reward
from rlcore.types import Score

MEMORY_BYTES = 4 << 30  # what a grading may take; more could get the trainer killed in its place
_PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    if sys.platform == "linux":  # a worker stuck inside sympy must not outlive a trainer that was killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    try:
        reward = _receive_reward(connection)
        _limit_memory()
        while reward is not None:
            for answer in _answers(reward, connection.recv()):
                connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the pool is gone


def _receive_reward(connection: Connection) -> Reward | None:
    payload = connection.recv_bytes()
    try:
        reward: Reward = pickle.loads(payload)
    except Exception:  # noqa: BLE001 - whatever an import can raise is the pool's to report
        connection.send(traceback.format_exc())
        return None
    connection.send(None)
    return reward


def _answers(reward: Reward, jobs: Sequence[Job]) -> Iterator[Score | str]:
    """One for each job, in order: its Score, or the traceback of what went wrong."""
    if isinstance(reward, BatchRewardFn):
        yield from _batch_answers(reward, jobs)
        return
    for job in jobs:
        try:
            answer: Score | str = _checked(reward(*job))
        except BaseException:  # noqa: BLE001 - even SystemExit is one completion's affair
            answer = traceback.format_exc()
        yield answer


def _batch_answers(reward: BatchRewardFn, jobs: Sequence[Job]) -> Sequence[Score | str]:
    texts, problems, num_tokens, finish_reasons = zip(*jobs, strict=True)
    try:
        scores = [_checked(score) for score in reward.score_batch(texts, problems, num_tokens, finish_reasons)]
        if len(scores) != len(jobs):
            raise TypeError(f"the reward returned {len(scores)} scores for {len(jobs)} completions")
    except BaseException:  # noqa: BLE001
        return [traceback.format_exc()] * len(jobs)
    return scores


def _checked(score: object) -> Score:
    if not isinstance(score, Score) or not all(map(math.isfinite, (score.reward, *score.parts.values()))):
        raise TypeError(f"the reward returned {score!r}, not a Score of finite numbers")
    return Score(float(score.reward), {str(k): float(v) for k, v in score.parts.items()}, bool(score.graded))


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
