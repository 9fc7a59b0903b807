"""Tests a reward before training: in a grading process like those of the run, or by one call of its judge."""

from __future__ import annotations

import asyncio
from concurrent.futures import TimeoutError as FutureTimeoutError

import numpy as np

from rlcore.config.reward import FunctionReward, JudgeConfig, JudgeReward, ModelReward, RewardConfig, UserReward
from rlcore.endpoint import Answered, Away, Denied
from rlcore.errors import JudgeAwayError, RewardError
from rlcore.rewards import environment_of, make_reward
from rlcore.rewards.judge_endpoint import judge_denied, judge_endpoint, judge_key
from rlcore.rewards.pool import GradingPool
from rlcore.rewards.protocol import BatchRewardFn
from rlcore.rewards.rubric import Rubric, opinion_in
from rlcore.rewards.scoring import require_scoring_model
from rlcore.types import Completion, Problem, Score

START_SECONDS = 60.0  # ends a user's file that never returns; a built-in reward loads in about a second

SAMPLE = Problem(
    problem_id="dry-run",
    question="What is 2 + 3?",
    images=(),
    answer="5",
    source="dry run",
    extra={"nums": [2, 3], "target": 5},  # what countdown reads
)
LETTER_SAMPLE = Problem("dry-run", "Which is 2 + 3? (A) 4 (B) 5", (), "B", "dry run", {"choices": ["4", "5"]})


def dry_run(config: RewardConfig, *, max_completion_tokens: int, problem: Problem | None = None) -> tuple[Score, ...]:
    """Grade three made-up completions: one in the right format, an empty one, and one of 10,000 characters. A judge is
    asked once, about the right answer. Of a reward model only the files are checked, without its weights.

    Takes about two seconds, and at most the start plus ``deadline_seconds`` (six times that for a batch reward), since
    it stops at the first completion that cannot be graded.

    Args:
        problem: from the dataset, with the columns that training will have. None: a made-up problem; a user's reward,
            which may read any column, is then only loaded and no Score is returned.

    Raises:
        RewardError: the reward does not load, or a completion could not be graded; with the traceback, if any.
    """
    if isinstance(config, ModelReward):  # its weights are loaded where it runs
        require_scoring_model(config.model)
        return ()
    if isinstance(config, JudgeReward):
        return (_judged(config.judge, problem or SAMPLE),)
    reward = make_reward(config, max_completion_tokens=max_completion_tokens)
    variables = environment_of(config)
    with GradingPool(reward, 1, config.deadline_seconds, start_seconds=START_SECONDS, environment=variables) as pool:
        if problem is None:
            if isinstance(config, UserReward):
                return ()
            problem = LETTER_SAMPLE if config.name == "multiple_choice" else SAMPLE
        completions = [_completion(text, max_completion_tokens) for text in _texts(problem)]
        together = isinstance(reward, BatchRewardFn)
        scores: list[Score] = []
        for few in [completions] if together else [[completion] for completion in completions]:
            try:
                future = pool.submit([problem] * len(few), few)
                scores += future.result(timeout=2 * len(few) * config.deadline_seconds + START_SECONDS)
            except FutureTimeoutError:
                raise _refused(config, problem, "It did not end.") from None
            if failures := [failure for failure in (pool.first_batch_failure, *pool.last_failures()) if failure]:
                raise _refused(config, problem, failures[0])
        return tuple(scores)


def _judged(config: JudgeConfig, problem: Problem) -> Score:
    """Ask the judge once about the right answer to ``problem``, outside of any budget or journal.

    Raises:
        RewardError: rubric, key, endpoint, model or answer are not usable.
        JudgeAwayError: the endpoint does not answer.
    """
    rubric, key = Rubric(config), judge_key(config)

    async def ask() -> Score:
        endpoint = judge_endpoint(config, key)
        try:
            listed = await endpoint.models()
            if isinstance(listed, Denied):
                raise judge_denied(config, listed)
            if isinstance(listed, Away):
                raise JudgeAwayError(
                    f"nothing answers at reward.judge.url {config.url} ({listed.why}). Start the judge, or set the url "
                    "to its address."
                )
            if config.model not in listed:
                raise RewardError(
                    f"reward.judge.model is {config.model!r}, and {config.url} lists "
                    f"{', '.join(listed) or 'no model'}. Set it to one of them."
                )
            outcome = await endpoint.ask(rubric.question(problem, problem.answer or "An answer.").body())
        finally:
            await endpoint.close()
        if isinstance(outcome, Denied):
            raise judge_denied(config, outcome)
        if isinstance(outcome, Answered):
            opinion = outcome.flaw or opinion_in(outcome.text, cut=outcome.cut)
        else:
            opinion = outcome.why
        if isinstance(opinion, str):
            raise RewardError(
                f"the judge {config.model} at {config.url} gave no verdict on the trial before training: {opinion}. It "
                "must answer with JSON of a given schema (response_format json_schema) within "
                f"reward.judge.max_tokens ({config.max_tokens}) and reward.judge.timeout_seconds "
                f"({config.timeout_seconds:g})."
            )
        return Score(opinion.score, {"accuracy": opinion.score}, graded=True)

    return asyncio.run(ask())


def _texts(problem: Problem) -> tuple[str, str, str]:
    answer = problem.answer
    right = f"<think>It has to be this.</think>\n<answer>\\boxed{{{answer}}}</answer>\n#### {answer}\nAnswer: {answer}"
    return right, "", ("so it goes on and on, (2 + 3) = 5, " * 300)[:10_000]


def _completion(text: str, max_tokens: int) -> Completion:
    tokens = min(max_tokens, -(-len(text) // 4))
    return Completion.one_turn(
        token_ids=np.zeros(tokens, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        text=text,
        finish_reason="length" if tokens == max_tokens else "stop",
        policy_version=0,
    )


def _refused(config: FunctionReward, problem: Problem, detail: str) -> RewardError:
    where = f"{config.file}, function {config.function}" if isinstance(config, UserReward) else "built in"
    return RewardError(
        f"the reward {config.name!r} ({where}) failed on its dry run, on problem {problem.problem_id} with answer "
        f"{problem.answer[:100]!r} and columns {sorted(problem.extra)}. It must give a Score for any text within "
        f"reward.deadline_seconds ({config.deadline_seconds:g}). Fix it, or choose another reward.name. "
        f"What happened:\n{detail}"
    )
