"""The tasks of the tiny text policies: a problem of each, and what a completion of it earns."""

from __future__ import annotations

from functools import cache

from transformers import PreTrainedTokenizerFast

from rlcore.data.synthetic.arithmetic import ArithmeticProblem, generate_countdown, generate_sum
from rlcore.data.tiny import build_text_tokenizer
from rlcore.models.tiny import GAME
from rlcore.rewards.arithmetic import countdown_reward, gsm8k_reward
from rlcore.types import Problem

TASKS = ("sums", "countdown")
MAX_COMPLETION_TOKENS = {"sums": 40, "countdown": 24}  # of their deployments


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_text_tokenizer()


def drawn(task: str, index: int) -> ArithmeticProblem:
    return generate_sum("test", index, 7) if task == "sums" else generate_countdown("test", index, 7, GAME)


def reward(task: str, problem: ArithmeticProblem, text: str) -> float:
    extra = {"nums": list(problem.numbers), "target": problem.target}
    asked = Problem(problem.problem_id, problem.question, (), problem.answer, "test", extra)
    if task == "sums":
        return gsm8k_reward(text, asked, 0, "stop", method="strict").reward
    return countdown_reward(text, asked, 0, "stop", format_score=0.1).reward
