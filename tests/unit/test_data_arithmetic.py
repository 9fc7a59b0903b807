"""Synthetic sums and countdown games: the same every time, always solvable, none in two splits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rlcore.config import CountdownConfig, DataConfig
from rlcore.data.synthetic import PUBLIC_SPLITS, SPLITS
from rlcore.data.synthetic.arithmetic import ArithmeticProblem, generate_countdown, generate_sum
from rlcore.data.synthetic.sources import COUNTDOWN, SUMS, check_synthetic, write_synthetic
from rlcore.errors import DataError
from rlcore.rewards.arithmetic import countdown_reward
from rlcore.types import Problem

SOME = 80
SMALL = CountdownConfig(numbers=(2, 5), max_number=12, max_target=40)
Draw = Callable[[str, int, int], ArithmeticProblem]
DRAWS = [pytest.param(generate_sum, id="sums"), pytest.param(partial(generate_countdown, config=SMALL), id="countdown")]


def content(problem: ArithmeticProblem) -> tuple[object, ...]:
    """What makes two games the same: the numbers in any order and the target; the text of a sum."""
    if problem.question.endswith("="):
        return (problem.question,)
    return (*sorted(problem.numbers), problem.target)


@pytest.mark.parametrize("draw", DRAWS)
def test_same_arguments_same_problem(draw: Draw) -> None:
    assert draw("test", 5, 3) == draw("test", 5, 3)
    assert len({draw("test", index, seed).question for index in range(9) for seed in (0, 1)}) > 15


@pytest.mark.parametrize("draw", DRAWS)
def test_splits_share_no_problem_even_across_seeds(draw: Draw) -> None:
    seen = {split: {content(draw(split, i, seed)) for seed in (0, 1) for i in range(SOME)} for split in SPLITS}
    for split, problems in seen.items():
        others = set().union(*(seen[other] for other in SPLITS if other != split))
        assert not problems & others
        assert len(problems) > SOME


def test_a_sum_is_right_and_worked_out_step_by_step() -> None:
    for index in range(SOME):
        problem = generate_sum("train", index, 0)
        assert eval(problem.question.removesuffix("=")) == int(problem.answer) == sum(problem.numbers)
        steps = problem.reasoning.split(",")
        assert len(steps) == len(problem.numbers) - 1
        assert all(eval(left) == int(right) for left, right in (step.split("=") for step in steps))
        assert steps[-1].endswith(f"={problem.answer}")


@pytest.mark.parametrize("config", [CountdownConfig(), SMALL], ids=["default", "small"])
def test_every_game_is_solvable_as_its_reward_sees_it(config: CountdownConfig) -> None:
    for index in range(SOME):
        game = generate_countdown("train", index, 0, config)
        assert config.numbers[0] <= len(game.numbers) <= config.numbers[1]
        assert max(game.numbers) <= config.max_number
        assert 1 <= game.target <= config.max_target
        assert game.question == f"Make {game.answer} from {', '.join(map(str, game.numbers))}."
        problem = Problem("p", game.question, (), game.answer, "s", {"nums": list(game.numbers), "target": game.target})
        text = f"<answer>{game.solution}</answer>"
        assert countdown_reward(text, problem, 0, "stop", format_score=0.1).reward == 1


def test_a_game_is_worked_out_in_whole_numbers() -> None:
    for index in range(SOME):
        game = generate_countdown("test", index, 1, SMALL)
        steps = [step.split("=") for step in game.reasoning.split(",")]
        assert len(steps) == len(game.numbers) - 1
        assert all(eval(left) == int(right) >= 1 for left, right in steps)  # 7/2 is 3.5, and no whole number
        assert int(steps[-1][1]) == game.target


def test_a_game_uses_the_configured_operations() -> None:
    config = CountdownConfig(numbers=(3, 4), max_number=12, max_target=40, operations=("+", "-"))
    games = [generate_countdown("test", index, 0, config) for index in range(SOME)]
    assert {symbol for game in games for symbol in game.solution if symbol in "+-*/"} == {"+", "-"}
    with pytest.raises(ValueError, match=r"data.countdown.operations is \['-', '/'\].*Add \+ or \*"):
        CountdownConfig(operations=("-", "/"))


def test_files_have_the_columns_that_the_rewards_need(tmp_path: Path) -> None:
    data = DataConfig(synthetic_problems=24, countdown=SMALL)
    sums, games = (pq.read_table(write_synthetic(tmp_path / name, name, "test", data)) for name in (SUMS, COUNTDOWN))
    assert sums.column_names == ["id", "problem", "answer"]
    assert games.column_names == ["id", "problem", "answer", "nums", "target"]
    assert sums.num_rows == games.num_rows == 3  # an eighth of training
    assert games.to_pylist()[1]["nums"] == list(generate_countdown("test", 1, 0, SMALL).numbers)


@pytest.mark.parametrize("name", [SUMS, COUNTDOWN])
def test_a_file_is_the_same_byte_for_byte(tmp_path: Path, name: str) -> None:
    first, again = (
        write_synthetic(tmp_path / folder, name, "train", DataConfig(synthetic_problems=9)) for folder in "ab"
    )
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("name", [SUMS, COUNTDOWN])
def test_the_warm_start_split_is_not_public(name: str) -> None:
    for split in PUBLIC_SPLITS:
        check_synthetic(name, split, DataConfig())
    with pytest.raises(DataError, match="no split 'warmup'. Allowed: train, validation, test"):
        check_synthetic(name, "warmup", DataConfig())


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ({"numbers": (4, 3)}, r"data.countdown.numbers is \[4, 3\]"),
        ({"numbers": (1, 3)}, "at least 2"),
        ({"numbers": (2, 2), "max_number": 1, "max_target": 1}, "Raise data.countdown.max_target"),
    ],
)
def test_settings_without_any_game_are_refused(game: dict[str, object], message: str) -> None:
    def check_every_split() -> None:
        for split in PUBLIC_SPLITS:
            check_synthetic(COUNTDOWN, split, DataConfig(countdown=CountdownConfig(**game)))

    with pytest.raises(DataError, match=message):
        check_every_split()
