"""The user's own reward: loading, calling, checking its results, and the dry run before training."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from rlcore.config.reward import (
    ClevrCountReward,
    CountdownReward,
    DapoReward,
    GeoqaReward,
    Gsm8kReward,
    MathReward,
    MathVerifyReward,
    MultipleChoiceReward,
    OverlongPenalty,
    R1vReward,
    UserReward,
)
from rlcore.errors import RewardError
from rlcore.rewards import make_reward
from rlcore.rewards.dry_run import dry_run
from rlcore.rewards.pool import GradingPool
from rlcore.types import Completion, Problem, Score

PROBLEM = Problem("p1", "?", (), "5", "test", {"bonus": 2})
BODY = "def reward(text, problem, num_tokens, finish_reason):\n    "
BATCH = "def reward(texts, problems, num_tokens, finish_reasons):\n    "


def user(tmp_path: Path, source: str, **settings: object) -> UserReward:
    file = tmp_path / "mine.py"
    file.write_text(source)
    return UserReward(file=file, **settings)


def grade(config: UserReward, *texts: str, deadline: float = 10.0) -> tuple[list[Score], GradingPool]:
    completions = [
        Completion.one_turn(np.zeros(4, np.int32), np.zeros(4, np.float32), text, "stop", 0) for text in texts
    ]
    with GradingPool(make_reward(config, max_completion_tokens=8), 1, deadline) as pool:
        return pool.submit([PROBLEM] * len(texts), completions).result(60), pool


@pytest.mark.parametrize(
    ("value", "reward", "parts"),
    [
        ("0.25", 0.25, {"accuracy": 0.25}),
        ("-3", -3, {"accuracy": 0}),
        ("True", 1, {"accuracy": 1}),
        ("{'reward': 2, 'accuracy': 1, 'style': 0.5}", 2, {"accuracy": 1, "style": 0.5}),
        ("__import__('numpy').float32(0.5)", 0.5, {"accuracy": 0.5}),
        ("__import__('rlcore.types').types.Score(1.0, {'style': 2.0}, True)", 1, {"accuracy": 1, "style": 2}),
        ("problem.extra['bonus'] * num_tokens * (finish_reason == 'stop')", 8, {"accuracy": 1}),
    ],
)
def test_what_a_function_may_return(tmp_path, value, reward, parts):
    config = user(tmp_path, BODY + f"return {value}")
    score = make_reward(config, max_completion_tokens=8)("", PROBLEM, 4, "stop")
    assert score == Score(reward, parts, True)


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "'1'",
        "[1]",
        "float('nan')",
        "{'score': 1}",
        "{'reward': 1, 'note': 'x'}",
        "{'reward': 1, 'accuracy': 2}",
    ],
)
def test_what_it_may_not_return_is_named(tmp_path, value):
    config = user(tmp_path, BODY + f"return {value}")
    with pytest.raises(RewardError, match=r"reward in .*mine\.py returned .*Return a finite number, a Score, or a"):
        make_reward(config, max_completion_tokens=8)("", PROBLEM, 4, "stop")


def test_arguments_helpers_and_other_names(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("def double(x):\n    return 2 * x\n")
    source = (
        "from helper_of_mine import double\ndef mark(text, *others, weight):\n    return double(weight) * len(text)"
    )
    config = user(tmp_path, source, function="mark", arguments={"weight": 0.5})
    scores, pool = grade(config, "", "abc")
    assert [score.reward for score in scores] == [0, 3]
    assert pool.last_failures() == []


def test_a_relative_path_starts_at_the_current_directory(tmp_path, monkeypatch):
    user(tmp_path, BODY + "return 1")
    monkeypatch.chdir(tmp_path)
    reward = make_reward(UserReward(file=Path("mine.py")), max_completion_tokens=8)
    monkeypatch.chdir("/")
    assert reward("", PROBLEM, 4, "stop").reward == 1


def test_a_missing_file_is_refused_at_once(tmp_path):
    with pytest.raises(RewardError, match=r"there is no file .*nowhere\.py\. Name a Python file"):
        make_reward(UserReward(file=tmp_path / "nowhere.py"), max_completion_tokens=8)


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        (BODY + "return 1", {"function": "score"}, r"'score'.*no such function\. Functions defined there: reward"),
        ("reward = 3", {}, r"Functions defined there: none"),
        ("def reward(text):\n    return 1", {}, r"defines reward\(text\).*called as reward\(text, problem"),
        (BODY + "return 1", {"arguments": {"judge": "x"}}, r"judge='x'.*unexpected keyword argument 'judge'"),
        ("import nothing_like_it", {}, r"ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("def reward(:", {}, r"SyntaxError"),
        ("raise SystemExit(3)", {}, r"could not load the reward"),
        ("import os; os._exit(3)", {}, r"could not load the reward\. It died"),
    ],
)
def test_what_does_not_load_is_refused_before_any_grading(tmp_path, source, settings, message):
    with pytest.raises(RewardError, match=rf"(?s){message}"):
        dry_run(user(tmp_path, source, **settings), max_completion_tokens=8)


# many at once


def test_a_batch_function_gets_all_that_was_sent(tmp_path):
    config = user(tmp_path, BATCH + "return [{'reward': len(texts), 'tokens': n} for n in num_tokens]", batch=True)
    scores, pool = grade(config, *["x"] * 5)
    assert scores == [Score(5.0, {"accuracy": 1.0, "tokens": 4.0}, True)] * 5
    assert pool.batch_failures == 0
    scores, _ = grade(config, *["x"] * 40)  # 32 are sent at most
    assert {score.reward for score in scores} == {32, 8}


def test_a_batch_may_take_a_deadline_for_each_completion(tmp_path):
    scores, pool = grade(
        user(tmp_path, "import time\n" + BATCH + "time.sleep(1.5); return [1] * len(texts)", batch=True),
        *["x"] * 8,
        deadline=0.5,
    )
    assert all(score.graded for score in scores)
    assert (pool.ungraded["timeout"], pool.batch_failures) == (0, 0)


@pytest.mark.parametrize(
    ("trouble", "losses"),
    [
        ("time.sleep(60)", (1, 0, 0)),
        ("raise ValueError('no such luck')", (0, 1, 0)),
        ("os._exit(1)", (0, 0, 1)),
    ],
)
def test_a_batch_that_fails_is_graded_one_by_one_so_that_only_the_culprit_is_lost(tmp_path, trouble, losses):
    source = f"import os, time\n{BATCH}if 'bad' in texts:\n        {trouble}\n    return [1] * len(texts)"
    scores, pool = grade(user(tmp_path, source, batch=True), "a", "bad", "b", deadline=2.0)
    assert [score.graded for score in scores] == [True, False, True]
    assert (pool.ungraded["timeout"], pool.ungraded["error"], pool.ungraded["death"]) == losses
    assert pool.batch_failures == 1


def test_the_overlong_penalty_goes_around_a_batch_too(tmp_path):
    penalty = OverlongPenalty(buffer_tokens=8)
    config = user(tmp_path, BATCH + "return [1] * len(texts)", batch=True, overlong=penalty)
    scores, _ = grade(config, "x")
    assert scores == [Score(0.5, {"accuracy": 1.0, "overlong": -0.5}, True)]


# the dry run


@pytest.mark.parametrize(
    "config",
    [
        MathReward(),
        MathVerifyReward(),
        R1vReward(),
        DapoReward(overlong=OverlongPenalty(buffer_tokens=4)),
        Gsm8kReward(),
        CountdownReward(),
        ClevrCountReward(),
        GeoqaReward(),
        MultipleChoiceReward(),
    ],
    ids=lambda config: config.name,
)
def test_every_built_in_reward_passes_its_dry_run(config):
    right, empty, long = dry_run(config, max_completion_tokens=64)
    assert right.parts["accuracy"] == (config.name != "countdown")  # its answer is an expression
    assert empty.parts["accuracy"] == long.parts["accuracy"] == 0


def test_the_dry_run_of_a_users_reward_takes_a_real_problem(tmp_path):
    config = user(tmp_path, BODY + "return problem.extra['bonus']")
    assert dry_run(config, max_completion_tokens=64) == ()  # loaded, and not tried on columns that are made up
    assert [score.reward for score in dry_run(config, max_completion_tokens=64, problem=PROBLEM)] == [2, 2, 2]


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        (BODY + "return problem.extra['hint']", {}, r"columns \['bonus'\].*KeyError: 'hint'"),
        (BODY + "return 1 / len(text)", {}, r"mine\.py\", line 2.*ZeroDivisionError"),
        (BODY + "return 'good'", {}, r"returned str 'good'\. Return a finite number"),
        (BATCH + "return [1]", {"batch": True}, r"returned 1 results for 3 completions"),
        (BATCH + "return 1", {"batch": True}, r"returned int 1 for 3 completions.*a list with one result for each"),
        ("import os\n" + BODY + "os._exit(7)", {}, r"The process ended with 7"),
    ],
)
def test_the_dry_run_shows_what_went_wrong(tmp_path, source, settings, message):
    with pytest.raises(
        RewardError, match=rf"(?s)'user' \(.*mine\.py, function reward\) failed on its dry run.*{message}"
    ):
        dry_run(user(tmp_path, source, **settings), max_completion_tokens=64, problem=PROBLEM)


@pytest.mark.parametrize("settings", [{}, {"batch": True}], ids=["single", "batch"])
def test_the_dry_run_of_a_reward_that_hangs_ends(tmp_path, settings):
    config = user(tmp_path, BODY + "while True: pass", deadline_seconds=0.5, **settings)
    with pytest.raises(RewardError, match=r"longer than .* s and was killed"):
        dry_run(config, max_completion_tokens=64, problem=PROBLEM)


def test_a_file_that_never_ends_does_not_hang_the_dry_run(tmp_path, monkeypatch):
    monkeypatch.setattr("rlcore.rewards.dry_run.START_SECONDS", 3.0)
    with pytest.raises(RewardError, match="did not answer within 3 s"):
        dry_run(user(tmp_path, "while True: pass"), max_completion_tokens=64)


def test_the_trainer_never_runs_the_users_file(tmp_path):
    """The file marks the process that runs it, and returns which one that is."""
    config = user(tmp_path, f"import os, sys\nsys.rlflow_user_file_ran = True\n{BODY}return os.getpid()")
    dry_run(config, max_completion_tokens=8)
    scores, _ = grade(config, "text")
    assert scores[0].graded
    assert scores[0].reward not in (0, os.getpid())
    assert not hasattr(sys, "rlflow_user_file_ran")
