"""A batch with too many ungraded completions."""

from __future__ import annotations

import functools

import pytest

from rlcore.errors import UngradedError
from rlcore.rewards.pool import GradingPool
from rlcore.rollout.grading import require_graded
from rlcore.types import Completion, Problem, Score
from tests.unit.toy_run import Grader

GRADED, LOST = Score(1.0, {}, graded=True), Score(0.0, {}, graded=False)


class Failing(Grader):
    def last_failures(self) -> list[str]:
        return ["problem p1, error: ZeroDivisionError", "problem p2, timeout: It took longer than 10 s."]


def test_the_share_is_a_bound_and_the_last_errors_are_shown() -> None:
    require_graded([GRADED, LOST], 0.5, Failing({}))
    with pytest.raises(UngradedError, match=r"(?s)2 of 3 completions.*share of 0\.5.*- problem p1, error: Zero.*- pro"):
        require_graded([GRADED, LOST, LOST], 0.5, Failing({}))
    require_graded([LOST], 1.0, Failing({}))


def broken_reward(text: str, problem: Problem, num_tokens: int, finish_reason: str, *, why: str) -> Score:
    raise ValueError(f"{why} {problem.problem_id}")


def test_the_pool_keeps_the_last_three_failures() -> None:
    import numpy as np

    completion = Completion.one_turn(np.zeros(1, np.int32), np.zeros(1, np.float32), "t", "stop", 0)
    problems = [Problem(f"p{i}", "?", (), "1", "test") for i in range(5)]
    with GradingPool(functools.partial(broken_reward, why="no grade for"), 1, 10.0) as pool:
        scores = pool.submit(problems, [completion] * 5).result()
        assert not any(score.graded for score in scores)
        last = pool.last_failures()
        assert [line.splitlines()[-1] for line in last] == [f"ValueError: no grade for p{i}" for i in (2, 3, 4)]
        with pytest.raises(UngradedError, match="no grade for p4"):
            require_graded(scores, 0.5, pool)
