"""Things that code in a grading process cannot do. Here a reward plays the hostile code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlcore.config.reward import MathReward, OverlongPenalty, UserReward
from rlcore.errors import RewardError
from rlcore.rewards import make_reward, sandbox
from rlcore.rewards.dry_run import dry_run
from rlcore.rewards.pool import ENVIRONMENT, GradingPool
from rlcore.rewards.protocol import answer_from_json, answer_to_json, jobs_from_json, jobs_to_json
from rlcore.types import Completion, ImageRef, Problem, Score
from tests.unit.graders import WAIT, burglar

CHECKOUT = Path(__file__).parents[2]


def completion(text: str) -> Completion:
    return Completion.one_turn(np.zeros(1, np.int32), np.zeros(1, np.float32), text, "stop", 0)


def grade(pool: GradingPool, *texts: str) -> list[Score]:
    problem = Problem("p", "?", (), "5", "test", {})
    return pool.submit([problem] * len(texts), [completion(t) for t in texts]).result(WAIT)


@pytest.fixture(scope="module")
def pool():
    with GradingPool(burglar, processes=1, deadline_seconds=WAIT) as pool:
        yield pool


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "kept").write_text("kept")
    return tmp_path


REFUSED = (
    *("socket", "unix", "fork", "exec", "run", "spawn"),
    *("write", "append", "truncate", "remove", "rename", "rename_into", "chmod", "touch", "mkdir", "link"),
    *("through_a_link", "kill", "limits", "parents_environment", "parents_memory"),
    *("read", "list", "users"),
)


@pytest.mark.parametrize("verb", REFUSED)
def test_a_grader_may_not(pool, folder, verb):
    before = pool.ungraded["error"]
    assert not grade(pool, f"{verb} {folder}")[0].graded
    assert pool.ungraded["error"] == before + 1
    assert "Permission" in pool.last_failures()[-1] or "not permitted" in pool.last_failures()[-1]
    assert [(path.name, path.read_text(), path.stat().st_mode & 0o777) for path in folder.iterdir()] == [
        ("kept", "kept", 0o644)
    ]


def test_the_same_works_without_the_sandbox(folder):
    """The test above proves something: this user may do all of it."""
    script = (
        "import os, sys, tempfile\n"
        "os.environ['TMPDIR'] = tempfile.mkdtemp()\n"
        "from tests.unit.graders import burglar\n"
        "for verb in sys.argv[2:]: print(burglar(f'{verb} {sys.argv[1]}', None, 1, 'stop').reward)\n"
    )
    verbs = (
        "socket",
        "unix",
        "fork",
        "run",
        "read",
        "list",
        "users",
        "write",
        "append",
        "chmod",
        "touch",
        "mkdir",
        "link",
        "kill",
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), *verbs, "parents_environment", "truncate", "remove"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["1.0"] * (len(verbs) + 3)


def test_a_server_of_this_machine_is_out_of_reach(pool):
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not grade(pool, f"connect {server.getsockname()[1]}")[0].graded


@pytest.mark.parametrize("verb", ["scratch", "temporary_file", "thread"])
def test_what_a_grader_may_do(pool, verb):
    assert grade(pool, verb) == [Score(1.0, {}, True)]


def test_a_users_reward_may_read_its_files(tmp_path):
    (tmp_path / "words.txt").write_text("7")
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\ndef reward(*_): return int(Path(__file__).with_name('words.txt').read_text())"
    )
    config = UserReward(file=tmp_path / "mine.py", overlong=OverlongPenalty(buffer_tokens=1))
    assert dry_run(config, max_completion_tokens=9999, problem=Problem("p", "?", (), "5", "test"))[0].reward == 7


def test_a_file_ends_at_its_limit(pool):
    assert not grade(pool, "huge_file")[0].graded


def test_a_new_process_finds_an_empty_folder(pool):
    grade(pool, "scratch", "die")
    assert grade(pool, "files_left")[0].reward == 0


def test_no_folder_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with GradingPool(burglar, processes=2, deadline_seconds=WAIT) as pool:
        grade(pool, "scratch")
        assert len(list(tmp_path.glob("*/*"))) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_environment_holds_no_secret(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "planted")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "planted")
    with GradingPool(burglar, processes=1, deadline_seconds=WAIT) as pool:
        parts = grade(pool, "environment")[0].parts
    names = {part.partition("=")[0] for part in parts}
    assert not any("planted" in part for part in parts)
    given = {"PYTHONPATH", "TMPDIR", "HOME", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LC_CTYPE", *ENVIRONMENT}
    assert names <= given  # LC_CTYPE: Python's own, where there is no LANG


def test_a_reward_gets_the_variables_that_it_asks_for(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "7")
    monkeypatch.setenv("OTHER_KEY", "8")
    file = tmp_path / "mine.py"
    file.write_text("import os\ndef reward(*_): return float(os.environ['JUDGE_KEY']) + ('OTHER_KEY' in os.environ)")
    config = UserReward(file=file, environment=("JUDGE_KEY",))
    assert dry_run(config, max_completion_tokens=8, problem=Problem("p", "?", (), "5", "test"))[0].reward == 7
    with pytest.raises(RewardError, match="reward.environment names ABSENT, which is not set"):
        dry_run(config.model_copy(update={"environment": ("JUDGE_KEY", "ABSENT")}), max_completion_tokens=8)


@pytest.mark.parametrize("name", ["", "A B", "A=1", "1A", "A-B"])
def test_a_name_of_a_variable_is_checked(name):
    with pytest.raises(ValueError, match="environment"):
        UserReward(file=Path("mine.py"), environment=(name,))


def test_the_error_of_a_reward_that_uses_the_network_explains_the_sandbox(tmp_path):
    file = tmp_path / "judge.py"
    file.write_text(
        "import urllib.request\ndef reward(*_): return urllib.request.urlopen('http://127.0.0.1:9/judge').status"
    )
    with pytest.raises(RewardError, match=r"(?s)failed on its dry run.*A reward has no network.*own-reward\.md"):
        dry_run(UserReward(file=file), max_completion_tokens=8, problem=Problem("p", "?", (), "5", "test"))


def test_the_log_says_what_is_missing(monkeypatch, caplog):
    monkeypatch.setattr("rlcore.rewards.pool.WORKER", "tests.unit.graders")  # a worker on a poorer system
    with GradingPool(make_reward(MathReward(), max_completion_tokens=8), processes=2, deadline_seconds=WAIT) as pool:
        assert grade(pool, r"\boxed{5}")[0].graded
    (message,) = [record.getMessage() for record in caplog.records]
    assert "without protection of: network, processes" in message


# what travels


def test_a_job_travels_as_json():
    problem = Problem("p", "q\ud800", (ImageRef("ab", 3, 4),), "5", "test", {"nums": [1, 2.5, None], "ü": {"a": "b"}})
    switched = replace(problem, source_name="a", chat_template_arguments={"effort": 1.5}, opens_thought=False)
    jobs = [("text\x00\udfff", problem, 7, "length"), ("", switched, 0, "stop")]
    assert jobs_from_json(jobs_to_json(jobs)) == jobs


@pytest.mark.parametrize("answer", [Score(0.5, {"a": 1.0}, True), Score(0.0, {}, False), "Traceback: \ud800"])
def test_an_answer_travels_as_json(answer):
    assert answer_from_json(answer_to_json(answer)) == answer


def test_the_answer_of_a_score_travels_and_can_be_written():
    for given, arrives in [("1/2", "1/2"), (None, None), ("\ud800", "?"), ("x" * 9999, "x" * 2000)]:
        found = answer_from_json(answer_to_json(Score(1.0, {}, True, given)))
        assert isinstance(found, Score)
        assert found.answer == arrives


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x80\x04.", b"null", b"[]", b"1", b"{}", b"\xff", b"[" * 100_000, b"9" * 5000),
        *(b'{"error": 1}', b'{"reward": 1, "parts": {}}', b'{"reward": "1", "parts": {}, "graded": true}'),
        *(b'{"reward": NaN, "parts": {}, "graded": true}', b'{"reward": 1, "parts": {"a": Infinity}, "graded": true}'),
        *(b'{"reward": true, "parts": {}, "graded": true}', b'{"reward": 1, "parts": [], "graded": true}'),
        *(b'{"reward": 1, "parts": {}, "graded": 1}', b'{"reward": 1' + b"0" * 400 + b', "parts": {}, "graded": true}'),
    ],
    ids=lambda data: data[:20].decode(errors="replace"),
)
def test_an_answer_that_is_none_is_refused(data):
    with pytest.raises(ValueError, match="neither a score nor an error"):
        answer_from_json(data)


# the filter, by running it here for both processors


def verdict(program: list[sandbox.Instruction], audit: int, number: int, *arguments: int) -> int:
    """What the kernel would return for a system call: the few instructions of classic BPF that the filter uses."""
    data = {0: number, 4: audit} | {16 + 8 * index: value & 0xFFFFFFFF for index, value in enumerate(arguments)}
    accumulator = place = 0
    while True:
        code, if_true, if_false, value = program[place]
        match code:
            case 0x20:
                accumulator, jump = data.get(value, 0), 0
            case 0x15:
                jump = if_true if accumulator == value else if_false
            case 0x35:
                jump = if_true if accumulator >= value else if_false
            case 0x45:
                jump = if_true if accumulator & value else if_false
            case 0x06:
                return value
        place += 1 + jump


ALLOW, DENY, ABSENT = 0x7FFF0000, 0x00050001, 0x00050026
PID = 4242
READ, OPENAT, CLONE, KILL, IOCTL, PRLIMIT, CLONE3 = (
    *((0, 63), (257, 56), (56, 220), (62, 129), (16, 29)),
    *((302, 261), (435, 435)),
)
CALLS = [
    (READ, (), ALLOW, ALLOW),
    (CLONE, (0x11,), DENY, DENY),
    (CLONE, (0x10000 | 0x100,), ALLOW, ALLOW),
    (CLONE3, (), ABSENT, ABSENT),
    (KILL, (PID,), ALLOW, ALLOW),
    (KILL, (PID + 1,), DENY, DENY),
    (KILL, (-1,), DENY, DENY),
    (KILL, (0,), DENY, DENY),
    (PRLIMIT, (0,), ALLOW, ALLOW),
    (PRLIMIT, (PID,), ALLOW, ALLOW),
    (PRLIMIT, (1,), DENY, DENY),
    (IOCTL, (0, 0x5401), ALLOW, ALLOW),
    (IOCTL, (0, 0x5412), DENY, DENY),
    (OPENAT, (0, 0, os.O_RDONLY), ALLOW, ALLOW),
    (OPENAT, (0, 0, os.O_WRONLY | os.O_CREAT), ALLOW, DENY),
    (OPENAT, (0, 0, os.O_RDWR), ALLOW, DENY),
    (OPENAT, (0, 0, os.O_RDONLY | os.O_TRUNC), ALLOW, DENY),
]


@pytest.mark.parametrize("name", sandbox.MACHINES)
def test_the_filter_of_each_processor(name):
    machine = sandbox.MACHINES[name]
    landlock, bare = (sandbox.filter_program(machine, PID, deny_writing=deny) for deny in (False, True))
    for pair, arguments, with_landlock, without in CALLS:
        number = pair[machine.column]
        assert verdict(landlock, machine.audit, number, *arguments) == with_landlock, (pair, arguments)
        assert verdict(bare, machine.audit, number, *arguments) == without, (pair, arguments)
    for table, program in ((sandbox.DENIED, landlock), (sandbox.DENIED | sandbox.DENIED_WRITES, bare)):
        for call, pair in table.items():
            if (number := pair[machine.column]) is not None:
                assert verdict(program, machine.audit, number) == DENY, call
    assert verdict(landlock, 0x40000003, READ[machine.column]) == DENY  # another set of system calls
    assert len(bare) < 4096


def test_32_bit_numbers_in_64_bits_are_denied():
    machine = sandbox.MACHINES["x86_64"]
    program = sandbox.filter_program(machine, PID, deny_writing=False)
    assert verdict(program, machine.audit, 0x40000000 + 41) == DENY


def test_without_landlock_no_file_can_be_written(folder):
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from rlcore.rewards import sandbox\n"
        "sandbox.restrict_writing = lambda paths: False\n"
        "print(sandbox.enter(Path(sys.argv[1])))\n"
        "def refused(act):\n"
        "    try: act()\n"
        "    except PermissionError: return True\n"
        "path = Path(sys.argv[1])\n"
        "print(all(map(refused, (lambda: (path / 'a').write_text('x'), (path / 'b').mkdir, (path / 'kept').unlink,\n"
        "    lambda: os.truncate(path / 'kept', 0), lambda: (path / 'kept').rename(path / 'c')))))\n"
        "print((path / 'kept').read_text())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["['reading files']", "True", "kept"]
