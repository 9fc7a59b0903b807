import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from rlcore.config.reward import MathReward
from rlcore.errors import RewardError
from rlcore.rewards import make_reward
from rlcore.rewards.pool import UNGRADED, GradingPool
from rlcore.types import Completion, Score
from tests.left import command_of
from tests.unit.graders import WAIT, completion, problem, puppet

MATH = make_reward(MathReward(), max_completion_tokens=64)


class Loud:
    """A reward that cannot be loaded in another process."""

    def __reduce__(self):
        return (int, ("not a number",))

    def __call__(self, *_: object) -> Score:
        raise AssertionError("nobody gets this far")


def grade(pool: GradingPool, *texts: str, answer: str = "5") -> list[Score]:
    future = pool.submit([problem(answer)] * len(texts), [completion(t) for t in texts])
    return future.result(timeout=WAIT)


def workers() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if "rlcore.rewards.worker" in command_of(p)}


@pytest.fixture(scope="module")
def math_pool():
    with GradingPool(MATH, processes=1, deadline_seconds=10) as pool:
        yield pool


@pytest.fixture
def pool():
    with GradingPool(puppet, processes=1, deadline_seconds=1.0) as pool:
        yield pool


def test_scores_have_the_order_of_the_completions(math_pool):
    texts = [rf"<think>a</think> \boxed{{{i % 7}}}" for i in range(100)]
    scores = grade(math_pool, *texts)
    assert [s.reward == 1 for s in scores] == [i % 7 == 5 for i in range(100)]
    assert scores[5] == Score(1.0, {"accuracy": 1.0, "format": 1.0}, True)
    assert grade(math_pool) == []


def test_the_reward_gets_tokens_and_finish_reason(pool):
    cut = Completion.one_turn(np.zeros(7, np.int32), np.zeros(7, np.float32), "", "length", 0)
    assert pool.submit([problem()], [cut]).result(WAIT) == [Score(7.0, {"long": 1.0}, True)]


def test_a_megabyte_travels_and_is_graded(math_pool):
    text = "<think>" + "x{" * 500_000 + r"</think> \boxed{5}"
    assert grade(math_pool, text, text)[1].parts == {"accuracy": 1.0, "format": 1.0}


def test_a_tower_of_powers_that_hangs_sympy_is_killed_at_the_deadline():
    # a tower that is small until sympy simplifies it (the brackets are 1); one of plain numbers is refused at once
    right, hanging = r"\boxed{21\sqrt{3}}", r"\boxed{9**(9**9*(sqrt(2)+1)*(sqrt(2)-1))}"
    with GradingPool(MATH, processes=1, deadline_seconds=1.5) as pool:
        scores = grade(pool, right, hanging, right, answer=r"21 \sqrt { 3 }")
        assert [s.graded for s in scores] == [True, False, True]
        assert scores[1] == UNGRADED
        assert pool.ungraded == {"timeout": 1}


def test_the_deadline_is_for_each_completion_not_for_what_is_sent_with_it(pool):
    scores = grade(pool, *["sleep 0.4"] * 12)  # sent three at a time, which take 1.2 s; the deadline is 1 s
    assert all(s.graded for s in scores)
    assert pool.ungraded["timeout"] == 0


def test_only_the_culprits_of_a_batch_are_ungraded(pool, caplog):
    texts = [
        "ok",
        "sleep 60",
        "ok",
        "raise no such luck",
        "ok",
        "die",
        "ok",
        "exit",
        "nan",
        "text hello",
        "sleep 60",
        "ok",
    ]
    assert [s.graded for s in grade(pool, *texts)] == [text == "ok" for text in texts]
    assert pool.ungraded == {"timeout": 2, "error": 4, "death": 1}
    assert "ValueError: no such luck" in caplog.text


def test_the_first_loss_of_each_kind_is_logged(pool, caplog):
    grade(pool, "raise one", "raise two", "die")
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "error, problem p1" in messages[0]
    assert "ValueError: one" in messages[0]
    assert "death, problem p1" in messages[1]


def test_other_workers_continue_while_one_hangs():
    with GradingPool(puppet, processes=2, deadline_seconds=2 * WAIT) as pool:
        hanging = pool.submit([problem()], [completion(f"sleep {4 * WAIT}")])
        assert all(s.graded for s in grade(pool, *["ok"] * 50))
        assert not hanging.done()


@pytest.mark.parametrize("kills", [1, 2])
def test_a_completion_is_lost_when_its_process_is_killed_twice(kills, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the pool makes its scratch folders
    with GradingPool(puppet, processes=1, deadline_seconds=WAIT) as patient:
        texts = ["ok", "say_pid_and_sleep", "ok"]
        future = patient.submit([problem()] * 3, [completion(t) for t in texts])
        killed = set()
        while not future.done():
            with contextlib.suppress(FileNotFoundError):  # the next process begins with an empty folder
                for note in tmp_path.glob("*/*/pid"):
                    if not (pid := note.read_text()) or pid in killed:
                        continue
                    if len(killed) == kills:
                        note.with_name("wake").touch()
                    else:
                        os.kill(int(pid), signal.SIGKILL)
                        killed.add(pid)
            time.sleep(0.01)
        assert [s.graded for s in future.result()] == [True, kills == 1, True]
        assert patient.ungraded == ({"death": 1} if kills == 2 else {})


def test_killing_an_idle_worker_loses_no_completion(pool):
    first = grade(pool, "pid")[0].reward
    worker = psutil.Process(int(first))
    worker.kill()
    while worker.status() != psutil.STATUS_ZOMBIE:  # only the pool collects it
        time.sleep(0.01)
    second = grade(pool, "pid")[0]
    assert second.graded
    assert second.reward != first
    assert pool.ungraded["death"] == 0


def test_a_reward_that_asks_for_all_memory_is_refused(pool):
    assert not grade(pool, "hog")[0].graded
    assert "MemoryError" in pool.last_failures()[-1]


def test_a_problem_that_is_not_json_affects_only_its_own_completions(pool):
    problems = [problem(), problem(lock=threading.Lock()), problem()]
    scores = pool.submit(problems, [completion("ok")] * 3).result(WAIT)
    assert [s.graded for s in scores] == [True, False, True]
    assert pool.ungraded["error"] == 1


def test_many_threads_may_submit_at_once(pool):
    results: dict[int, list[Score]] = {}

    def one(size: int) -> None:
        results[size] = pool.submit([problem()] * size, [completion("ok", n) for n in range(size)]).result(WAIT)

    threads = [threading.Thread(target=one, args=(size,)) for size in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert all([s.reward for s in results[size]] == list(range(size)) for size in range(1, 9))


def test_close_leaves_no_process_and_fails_what_was_running(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the pool makes its scratch folders
    before = workers()
    pool = GradingPool(puppet, processes=2, deadline_seconds=WAIT)
    assert len(workers() - before) == 2
    futures = [pool.submit([problem()], [completion("say_pid_and_sleep")]) for _ in range(3)]
    deadline = time.monotonic() + WAIT
    while len(list(tmp_path.glob("*/*/pid"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    start = time.perf_counter()
    pool.close()
    pool.close()
    assert time.perf_counter() - start < WAIT / 2  # it waited for none of them
    assert workers() == before
    for future in futures:
        with pytest.raises(RewardError, match="closed"):
            future.result(timeout=1)
    with pytest.raises(RewardError, match="closed"):
        pool.submit([problem()], [completion("ok")])
    assert pool.ungraded == {}


def test_workers_die_with_a_trainer_that_is_killed(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(
        textwrap.dedent("""
        import time
        from rlcore.rewards.pool import GradingPool
        from tests.unit.graders import completion, problem, puppet
        pool = GradingPool(puppet, processes=1, deadline_seconds=600)
        pool.submit([problem()], [completion("sleep 600")])
        print("started", flush=True)
        time.sleep(600)
        """)
    )
    root = Path(__file__).parents[2]
    trainer = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}
    )
    with trainer:
        assert trainer.stdout.readline() == b"started\n"
        children = psutil.Process(trainer.pid).children()
        assert len(children) == 1
        trainer.kill()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_a_reward_that_cannot_travel_is_refused_at_once():
    before = workers()
    with pytest.raises(RewardError, match="cannot be sent to a grading process"):
        GradingPool(lambda *_: UNGRADED, processes=1, deadline_seconds=1)
    with pytest.raises(RewardError, match=r"could not load the reward(.|\n)*invalid literal"):
        GradingPool(Loud(), processes=2, deadline_seconds=1)
    assert workers() == before


def test_one_problem_for_each_completion(pool):
    with pytest.raises(ValueError, match="zip"):
        pool.submit([problem()], [])
