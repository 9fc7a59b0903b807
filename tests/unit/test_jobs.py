"""Jobs: results, errors of the right class, and no process left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from asyncio import CancelledError
from pathlib import Path

import psutil
import pytest
from prefect import flow, task
from prefect.states import Failed

from infra import environment, processes
from infra.errors import RegistryError, ServerError
from infra.settings import Settings
from rlcore import errors
from rlcore.artifacts import ModelRef
from rlcore.config import ModelConfig
from rlcore.specs import BootstrapSpec, JobError
from tasks.driver.jobs import describe_exit, error_from, new_result_path, run_job, worth_retrying
from tasks.retries import step

GOOD = """
import json, os, pathlib, sys
spec = json.loads(pathlib.Path(sys.argv[3]).read_text())
model = {"path": os.environ["RLFLOW_PROCESS_MARK"], "digest": "d", "source": "s", "num_parameters": 1}
pathlib.Path(spec["result"]).write_text(json.dumps(model))
"""
BAD = """
import json, pathlib, sys
spec = json.loads(pathlib.Path(sys.argv[3]).read_text())
error = {"kind": "DataError", "message": "no column 'answer'", "traceback": "line 7"}
pathlib.Path(spec["result"] + ".error").write_text(json.dumps(error))
sys.exit(78)
"""
# A stubborn one, with a child in another session: both have to go.
STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
pathlib.Path(sys.argv[3]).with_name("child.pid").write_text(str(child.pid))
time.sleep(60)
"""


def settings_with(interpreter_code: str, tmp_path: Path) -> Settings:
    """Settings whose trainer interpreter runs ``interpreter_code`` whatever module is asked for."""
    code = tmp_path / "fake.py"
    code.write_text(interpreter_code)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{code}" "$@"\n')
    script.chmod(0o755)
    return Settings(data_dir=tmp_path / "data", trainer_python=script)


def spec_in(settings: Settings) -> BootstrapSpec:
    return BootstrapSpec(result=new_result_path(settings, "test"), model=ModelConfig(), models_dir=settings.models_dir)


def test_the_result_comes_back(tmp_path: Path) -> None:
    settings = settings_with(GOOD, tmp_path)
    assert run_job("any.module", spec_in(settings), ModelRef, settings).path.startswith("job-")


def test_an_error_keeps_its_class_message_and_traceback(tmp_path: Path) -> None:
    settings = settings_with(BAD, tmp_path)
    with pytest.raises(errors.DataError, match="^no column 'answer'") as caught:
        run_job("any.module", spec_in(settings), ModelRef, settings)
    assert "line 7" in caught.value.__notes__[0]


def test_a_job_without_a_word_is_named(tmp_path: Path) -> None:
    settings = settings_with("import os; os.kill(os.getpid(), 9)", tmp_path)
    with pytest.raises(errors.TrainerFailedError, match=r"any\.module ended with SIGKILL"):
        run_job("any.module", spec_in(settings), ModelRef, settings)


def test_errors_of_other_libraries_are_distinguished() -> None:
    report = JobError(kind="ZeroDivisionError", message="division by zero", traceback="t")
    error = error_from(report, "job ended with exit code 1")
    assert type(error) is errors.TrainerFailedError
    assert str(error).startswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (errors.ConfigError("c"), False),
        (errors.DataError("d"), False),
        (errors.ModelError("m"), False),
        (errors.RewardError("r"), False),
        (RegistryError("r"), False),
        (ZeroDivisionError("a mistake of ours"), False),
        (errors.TrainerFailedError("t"), True),
        (errors.StorageError("s"), True),
        (ServerError("mlflow"), True),
        (OSError("anything of the machine"), True),
    ],
)
def test_what_is_wrong_with_the_experiment_is_never_retried(error: Exception, retried: bool) -> None:
    @task
    def step() -> None:
        return

    assert worth_retrying(step, None, Failed(data=error)) is retried


def test_exit_codes_in_words() -> None:
    assert [describe_exit(code) for code in (1, -15)] == ["exit code 1", "signal 15"]


def test_an_interrupt_ends_the_job_and_everything_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.driver.jobs._STOP_GRACE_SECONDS", 0.3)
    settings = settings_with(STUBBORN, tmp_path)
    spec = spec_in(settings)
    pid_file = spec.result.with_name("child.pid")

    def interrupt() -> None:
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_job("any.module", spec, ModelRef, settings)
    assert ends(int(pid_file.read_text()))


@pytest.mark.usefixtures("_prefect")
def test_a_flow_that_fails_ends_the_jobs_of_the_tasks_that_it_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.driver.jobs._STOP_GRACE_SECONDS", 0.3)
    settings = settings_with(STUBBORN, tmp_path)
    spec = spec_in(settings)
    pid_file = spec.result.with_name("child.pid")
    cancelled: list[BaseException] = []

    @step("stubborn", others=(0, 0))
    def stubborn() -> ModelRef:
        with pytest.raises(CancelledError) as caught:
            run_job("any.module", spec, ModelRef, settings)
        cancelled.append(caught.value)
        raise caught.value

    @flow
    def fails() -> None:
        stubborn.submit()
        while not (pid_file.exists() and pid_file.read_text()):
            time.sleep(0.05)
        raise errors.DataError("no rows")

    with pytest.raises(errors.DataError, match="no rows"):
        fails()  # returns when its tasks have ended
    assert len(cancelled) == 1
    assert ends(int(pid_file.read_text()))


def is_running(pid: int) -> bool:
    """A zombie that init has not collected yet does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ends(pid: int) -> bool:
    """Whether the process is gone within 10 seconds. A killed process stays in the table for a moment."""
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(pid)


def test_a_job_ends_with_the_thread_that_waits_for_it(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    env = environment.for_children(settings)
    started: list[int] = []

    def start_and_die() -> None:
        args = [sys.executable, "-c", "import time; time.sleep(60)"]
        started.append(processes.start(args, env=env, mark="parent-test", ends_with_parent=True).pid)

    thread = threading.Thread(target=start_and_die)
    thread.start()
    thread.join()
    assert ends(started[0])
    processes.kill("parent-test")


def test_a_program_that_is_missing_is_said_by_its_name(tmp_path: Path) -> None:
    for ends_with_parent in (True, False):
        with pytest.raises(FileNotFoundError, match="no-such-program"):
            processes.start(
                ["no-such-program"], env=dict(os.environ), mark="missing-test", ends_with_parent=ends_with_parent
            )
    assert not processes.marked("missing-test")
    processes.kill("missing-test")


# Every Python program ignores these two; a program that it starts should not.
_IGNORED_BY_PYTHON = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)


def _ignored_here() -> int:
    """The signals that this process ignores, as a mask: a child inherits what nohup or a container ignores."""
    (line,) = re.findall(r"^SigIgn:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(line, 16)


@pytest.mark.parametrize("ends_with_parent", [True, False])
def test_a_started_program_has_nothing_of_the_one_that_launched_it(tmp_path: Path, ends_with_parent: bool) -> None:
    """Arguments, session, folder, exit code, signals and open files are as if it had been started at once."""
    code = (
        "import json, os, signal, sys; print(json.dumps([sys.argv[1:], os.getsid(0) == os.getpid(), os.getcwd(),"
        " open('/proc/self/status').read().split('SigIgn:')[1].split()[0], sorted(os.listdir('/proc/self/fd'))]));"
        " sys.exit(7)"
    )
    words = ["a b", "--option", ""]
    with (tmp_path / "out").open("wb") as output:
        process = processes.start(
            ["/usr/bin/env", "python3", "-c", code, *words], env=dict(os.environ), mark="launch-test", output=output,
            cwd=tmp_path, ends_with_parent=ends_with_parent,
        )  # fmt: skip
    assert process.wait(30) == 7
    processes.kill("launch-test")
    got, leads, folder, ignored, descriptors = json.loads((tmp_path / "out").read_text())
    assert (got, leads, folder) == (words, True, str(tmp_path))
    assert int(ignored, 16) & ~_IGNORED_BY_PYTHON == _ignored_here() & ~_IGNORED_BY_PYTHON
    assert descriptors == ["0", "1", "2", "3"]  # 3 is the listing's


def test_a_shell_started_by_us_takes_sigpipe_as_usual(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as output:
        args = ["/bin/sh", "-c", "grep SigIgn /proc/self/status"]
        process = processes.start(args, env=dict(os.environ), mark="pipe-test", output=output, ends_with_parent=True)
    assert process.wait(30) == 0
    processes.kill("pipe-test")
    assert int((tmp_path / "out").read_text().split()[1], 16) == _ignored_here() & ~_IGNORED_BY_PYTHON


def test_marked_processes_are_ours_alone() -> None:
    assert processes.marked("a mark that nobody carries") == []
