"""One grading process: ``python -m rlcore.rewards.worker FD``, started and killed by ``GradingPool``.

Over the socket FD it takes a pickled reward function, answers None when it can grade (else a traceback), and
then, for each list of jobs, answers each in turn with a Score, or with a traceback where the reward raised.
"""

from __future__ import annotations

import ctypes
import math
import pickle
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from rlcore.ports import RewardFn
from rlcore.rewards.pool import Job
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
            for job in connection.recv():
                connection.send(_grade(reward, job))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the pool is gone


def _receive_reward(connection: Connection) -> RewardFn | None:
    payload = connection.recv_bytes()
    try:
        reward: RewardFn = pickle.loads(payload)
    except Exception:  # noqa: BLE001 - whatever an import can raise is the pool's to report
        connection.send(traceback.format_exc())
        return None
    connection.send(None)
    return reward


def _grade(reward: RewardFn, job: Job) -> Score | str:
    try:
        score = reward(*job)
        if not isinstance(score, Score) or not math.isfinite(score.reward):
            raise TypeError(f"the reward returned {score!r}, not a Score with a finite reward")
        return Score(float(score.reward), {str(k): float(v) for k, v in score.parts.items()}, bool(score.graded))
    except BaseException:  # noqa: BLE001 - even SystemExit is one completion's affair
        return traceback.format_exc()


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
