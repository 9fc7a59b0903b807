from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import combinations

import numpy as np
import pyarrow.parquet as pq
import pytest

from rlcore.config import EvaluationConfig
from rlcore.errors import ConfigError, RewardError
from rlcore.evaluation.at_k import majority_at_k, pass_at_k
from rlcore.evaluation.intervals import bootstrap_difference, bootstrap_interval
from rlcore.evaluation.report import metrics_of, summarise
from rlcore.evaluation.rows import EvalRow, evaluate, read_rows, sample_seed, write_rows
from rlcore.types import Completion, Decoding, Problem, SampledGroup, SampleRequest, Score

# ---- bootstrap


def test_interval_of_equal_values_is_that_value():
    assert bootstrap_interval([0.25] * 7) == (0.25, 0.25)
    assert bootstrap_interval([0.5]) == (0.5, 0.5)


def test_interval_is_that_of_the_normal_approximation_and_repeats():
    values = [1.0] * 120 + [0.0] * 280
    low, high = bootstrap_interval(values)
    half = 1.96 * np.sqrt(0.3 * 0.7 / 400)
    assert low == pytest.approx(0.3 - half, abs=0.005)
    assert high == pytest.approx(0.3 + half, abs=0.005)
    assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval(values, seed=1) != (low, high)
    narrower = bootstrap_interval(values, confidence=0.5)
    assert low < narrower[0] < 0.3 < narrower[1] < high


def test_a_paired_difference_cancels_how_hard_problems_are():
    hard = np.random.default_rng(0).random(50)
    low, high = bootstrap_difference(hard.tolist(), (hard + 0.1).tolist())
    assert low == pytest.approx(0.1)
    assert high == pytest.approx(0.1)
    alone = bootstrap_interval(hard.tolist())
    assert alone[1] - alone[0] > 0.1


def test_no_problems_and_unpaired_problems_are_refused():
    with pytest.raises(ValueError, match="no problems"):
        bootstrap_interval([])
    with pytest.raises(ValueError, match="2 and 1 problems"):
        bootstrap_difference([0.0, 1.0], [1.0])


# ---- evaluate


class FakeSampler:
    """Completion text is the request's seed; the last token of the last problem is cut off by length."""

    def __init__(self) -> None:
        self.requests: list[SampleRequest] = []

    def generate(self, requests: Sequence[SampleRequest]) -> Iterator[dict[int, SampledGroup]]:
        self.requests += requests
        groups = [
            SampledGroup(
                prompt_token_ids=np.zeros(2, np.int32),
                completions=tuple(
                    Completion.one_turn(
                        token_ids=np.zeros(3, np.int32),
                        logprobs=np.zeros(3, np.float32),
                        text=str(request.seed),
                        finish_reason="length" if request.problem.problem_id == "p2" else "stop",
                        policy_version=7,
                    )
                    for _ in range(request.count)
                ),
            )
            for request in requests
        ]
        yield from ({place: groups[place]} for place in reversed(range(len(groups))))


class FakeGrader:
    """p0 is right, p1 wrong, p2 never gets a verdict."""

    def __init__(self, parts: tuple[str, ...] = ("accuracy", "format")) -> None:
        self.parts = parts

    def last_failures(self) -> list[str]:
        return []

    def take_metrics(self) -> dict[str, float]:
        return {}

    def submit(self, problems: Sequence[Problem], completions: Sequence[Completion]) -> Future[list[Score]]:
        scores = []
        for problem in problems:
            right = float(problem.problem_id == "p0")
            graded = problem.problem_id != "p2"
            parts = dict.fromkeys(self.parts, right) if graded else {}
            scores.append(Score(reward=0.9 * right if graded else 0.0, parts=parts, graded=graded))
        future: Future[list[Score]] = Future()
        future.set_result(scores)
        return future

    def close(self) -> None: ...


def _problems(count: int) -> list[Problem]:
    return [Problem(f"p{i}", f"question {i}", (), f"answer {i}", "test") for i in range(count)]


def test_one_row_per_completion_problem_by_problem():
    rows = evaluate(FakeSampler(), FakeGrader(), _problems(4), EvaluationConfig(problems=3, samples=2))
    assert [(row.problem_id, row.sample) for row in rows] == [(f"p{i}", s) for i in range(3) for s in range(2)]
    assert rows[0] == EvalRow(
        problem_id="p0",
        sample=0,
        question="question 0",
        answer="answer 0",
        completion=str(sample_seed(0, "p0", 0)),
        reward=0.9,
        accuracy=1.0,
        format=1.0,
        graded=True,
        finish_reason="stop",
        num_tokens=3,
    )
    assert [(row.accuracy, row.format, row.graded) for row in rows[2::2]] == [
        (0.0, 0.0, True),
        (None, None, False),
    ]


def test_seeds_are_distinct_stable_and_do_not_depend_on_what_else_is_sampled():
    few, many, other = FakeSampler(), FakeSampler(), FakeSampler()
    evaluate(few, FakeGrader(), _problems(2), EvaluationConfig(samples=1))
    evaluate(many, FakeGrader(), _problems(4), EvaluationConfig(samples=3))
    evaluate(other, FakeGrader(), _problems(2), EvaluationConfig(samples=1, seed=1))
    seeds = {(r.problem.problem_id, i % 3): r.seed for i, r in enumerate(many.requests)}
    assert len(set(seeds.values())) == 12
    assert [r.seed for r in few.requests] == [seeds["p0", 0], seeds["p1", 0]]
    assert {r.seed for r in other.requests}.isdisjoint(seeds.values())
    assert all(r.count == 1 and 0 <= r.seed < 2**31 for r in many.requests)
    assert sample_seed(0, "p0", 0) == 748166489  # must never change, or old reports cannot be repeated


def test_every_request_has_the_decoding_of_the_evaluation():
    sampler = FakeSampler()
    evaluate(sampler, FakeGrader(), _problems(2), EvaluationConfig(temperature=0.6, top_p=0.95, samples=2))
    assert [request.decoding for request in sampler.requests] == [Decoding(temperature=0.6, top_p=0.95)] * 4


def _summary(rows):
    return summarise(rows, policy="ckpt", step=20, dataset_digest="d", table="t.parquet", seconds=1.5, at=9.0)


def test_the_report_by_hand():
    rows = evaluate(FakeSampler(), FakeGrader(), _problems(3), EvaluationConfig(samples=2))
    rows[0] = replace(rows[0], accuracy=0.0, reward=0.0)  # p0 right in one of two
    report = _summary(rows)
    assert (report.num_problems, report.samples_per_problem) == (3, 2)
    assert report.accuracy == pytest.approx((0.5 + 0 + 0) / 3)  # without a verdict: not right
    assert report.reward == pytest.approx(0.45 / 3)
    assert report.ungraded == report.truncated == pytest.approx(2 / 6)
    assert 0 == report.accuracy_low < report.accuracy < report.accuracy_high <= 0.5
    assert report.reward_low <= report.reward <= report.reward_high
    assert (report.policy, report.step, report.table, report.seconds, report.at) == ("ckpt", 20, "t.parquet", 1.5, 9.0)


def _row(problem: str, sample: int, accuracy: float | None, tokens: int = 3, group: str | None = None) -> EvalRow:
    return EvalRow(problem, sample, "q", "a", "c", 0.0, accuracy, None, accuracy is not None, "stop", tokens, group)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for samples, right, k in [(4, 1, 2), (6, 2, 3), (5, 0, 2), (5, 4, 2), (3, 3, 3)]:
        subsets = list(combinations(range(samples), k))
        having = sum(any(place < right for place in subset) for subset in subsets)
        assert pass_at_k(samples, right, k) == pytest.approx(having / len(subsets))


@pytest.mark.parametrize(("right", "wrong", "silent"), [(2, [1, 1], 1), (3, [3, 2], 0), (1, [4], 2), (4, [2, 2, 1], 1)])
def test_majority_at_k_is_the_share_of_subsets_whose_most_frequent_answer_is_right(right, wrong, silent):
    answers = ["right"] * right + [f"wrong {i}" for i, n in enumerate(wrong) for _ in range(n)] + [None] * silent
    for k in range(1, len(answers) + 1):
        shares = []
        for subset in combinations(answers, k):
            votes = Counter(answer for answer in subset if answer)
            leaders = [answer for answer, count in votes.items() if count == max(votes.values())]
            shares.append(("right" in leaders) / len(leaders) if leaders else 0.0)
        assert majority_at_k(right, wrong, silent, k) == pytest.approx(np.mean(shares))


def test_majority_at_k_by_hand():
    assert majority_at_k(2, [2], 0, 4) == 0.5  # a tie is chosen half the time
    assert majority_at_k(2, [1, 1], 0, 4) == 1.0  # two wrong answers do not add up
    assert majority_at_k(1, [3], 0, 1) == 0.25  # of one sample it is the accuracy
    assert majority_at_k(0, [1], 3, 4) == majority_at_k(0, [], 4, 4) == 0.0  # nobody gives the right answer
    assert majority_at_k(1, [], 3, 2) == 0.5  # of 6 pairs, 3 have no answer
    assert majority_at_k(700, [700], 0, 700) == pytest.approx(0.5)  # numbers of subsets beyond a float


def test_votes_are_answers_as_the_reward_read_them_and_all_right_ones_are_one():
    def given(*answers: tuple[str | None, float | None]) -> list[EvalRow]:
        return [replace(_row("a", i, right), given=text) for i, (text, right) in enumerate(answers)]

    metrics = metrics_of(_summary(given(("1/2", 1.0), ("0.5", 1.0), ("2", 0.0), ("2", 0.0))))
    assert (metrics["majority_at_4"], metrics["majority_at_2"]) == (0.5, 0.5)
    assert metrics_of(_summary(given(("1", 1.0), ("3", 0.0), ("4", 0.0), (None, None))))["majority_at_4"] == (
        pytest.approx(1 / 3)
    )
    untold = metrics_of(_summary([_row("a", 0, 1.0), _row("a", 1, 0.0)]))  # a reward that tells no answer
    assert not [name for name in untold if name.startswith("majority")]


def test_details_by_hand():
    rows = [_row("a", i, right, 10) for i, right in enumerate([1.0, 0.0, 0.0, 0.0, None, 0.0])]
    rows += [_row("b", i, right, 40) for i, right in enumerate([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])]
    metrics = metrics_of(_summary(rows))
    # of 15 pairs, 5 hold the one right sample of a; 1 - 6/15 = 9 hold one of the two of b
    assert metrics["pass_at_2"] == pytest.approx((5 / 15 + 9 / 15) / 2)
    assert metrics["pass_at_4"] == pytest.approx((4 / 6 + (1 - 1 / 15)) / 2)  # of b, 1 of 15 has neither
    assert metrics["pass_at_6"] == 1.0
    assert (metrics["pass_at_2_low"], metrics["pass_at_2_high"]) == pytest.approx((5 / 15, 9 / 15))
    assert metrics["completion_tokens_mean"] == 25
    assert {name for name in metrics if name.startswith("pass_at_")} == {
        f"pass_at_{k}{end}" for k in (2, 4, 6) for end in ("", "_low", "_high")
    }
    assert metrics["accuracy"] == pytest.approx((1 / 6 + 2 / 6) / 2)
    one_each = metrics_of(_summary([_row("a", 0, 1.0), _row("b", 0, 0.0)]))
    assert not [name for name in one_each if name.startswith("pass_at_")]  # pass@1 is the accuracy


def test_each_group_has_its_accuracy_and_a_name_that_mlflow_takes():
    rows = [
        _row("a", 0, 1.0, group="algebra"), _row("b", 0, 0.0, group="geo/2d: x"),
        _row("c", 0, 0.0, group="algebra"), _row("d", 0, 1.0),
    ]  # fmt: skip
    metrics = metrics_of(_summary(rows))
    groups = {name: value for name, value in metrics.items() if name.startswith("group/")}
    assert {name for name in groups if name.endswith("accuracy")} == {
        "group/algebra/accuracy", "group/geo_2d_ x/accuracy"
    }  # fmt: skip
    assert groups["group/algebra/accuracy"] == 0.5
    assert (groups["group/algebra/accuracy_low"], groups["group/algebra/accuracy_high"]) == (0.0, 1.0)
    assert groups["group/geo_2d_ x/accuracy"] == 0.0


def test_groups_are_read_from_the_column_and_a_wrong_one_is_named():
    problems = [replace(p, extra={"level": n % 2}) for n, p in enumerate(_problems(2))]
    rows = evaluate(FakeSampler(), FakeGrader(), problems, EvaluationConfig(group_column="level"))
    assert [row.group for row in rows] == ["0", "1"]
    with pytest.raises(ConfigError, match=r"'levle', and no validation problem has this column.*own: level\."):
        evaluate(FakeSampler(), FakeGrader(), problems, EvaluationConfig(group_column="levle"))


def test_uneven_or_no_rows_are_refused():
    rows = evaluate(FakeSampler(), FakeGrader(), _problems(2), EvaluationConfig(samples=2))
    with pytest.raises(ValueError, match=r"same number of samples, found \[1, 2\]"):
        _summary(rows[:-1])
    with pytest.raises(ValueError, match="no rows"):
        _summary([])


def test_rows_survive_parquet(tmp_path):
    rows = evaluate(FakeSampler(), FakeGrader(("accuracy",)), _problems(3), EvaluationConfig(samples=2))
    path = tmp_path / "evaluation" / "rows.parquet"
    write_rows(rows, path)
    assert read_rows(path) == rows
    assert [file.name for file in path.parent.iterdir()] == ["rows.parquet"]


def test_a_table_from_before_there_were_groups_is_read(tmp_path):
    rows = evaluate(FakeSampler(), FakeGrader(("accuracy",)), _problems(2), EvaluationConfig())
    write_rows(rows, tmp_path / "new.parquet")
    old = pq.read_table(tmp_path / "new.parquet").drop_columns(["group"])
    pq.write_table(old, tmp_path / "old.parquet")
    assert read_rows(tmp_path / "old.parquet") == rows


def test_a_reward_without_accuracy_is_named():
    with pytest.raises(RewardError, match=r"parts \['format'\]; evaluation needs"):
        evaluate(FakeSampler(), FakeGrader(("format",)), _problems(1), EvaluationConfig())
