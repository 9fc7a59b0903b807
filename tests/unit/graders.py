"""Rewards that do what a completion tells them, for the grading processes to bear."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from rlcore.rewards import sandbox
from rlcore.types import Completion, Problem, Score

WAIT = 60  # seconds for what should take one: a test must fail, not hang


def puppet(text: str, problem: Problem, num_tokens: int, finish_reason: str) -> Score:
    """Does what the completion says; the reward is the last word."""
    verb, _, rest = text.partition(" ")
    match verb:
        case "sleep":
            time.sleep(float(rest))
        case "raise":
            raise ValueError(rest)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(3)
        case "nan":
            return Score(float("nan"), {}, True)
        case "text":
            return rest
        case "pid":
            return Score(float(os.getpid()), {}, True)
        case "say_pid_and_sleep":
            scratch = Path(os.environ["TMPDIR"])
            (scratch / "pid").write_text(str(os.getpid()))
            until = time.monotonic() + WAIT
            while not (scratch / "wake").exists() and time.monotonic() < until:
                time.sleep(0.01)
        case "hog":
            bytearray(1 << 40)
    return Score(float(num_tokens), {"long": float(finish_reason == "length")}, True)


def problem(answer: str = "5", **extra: object) -> Problem:
    return Problem(problem_id="p1", question="?", images=(), answer=answer, source="test", extra=extra)


def completion(text: str, num_tokens: int = 1) -> Completion:
    return Completion.one_turn(np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.float32), text, "stop", 0)


def burglar(text: str, problem: Problem, num_tokens: int, finish_reason: str) -> Score:
    """Tries what the completion names; the reward is 1 if it worked."""
    verb, _, path = text.partition(" ")
    own = Path(os.environ["TMPDIR"])
    match verb:
        case "environment":
            return Score(1.0, {f"{name}={value}": 0.0 for name, value in os.environ.items()}, True)
        case "socket":
            socket.create_server(("127.0.0.1", 0))
        case "unix":
            socket.socket(socket.AF_UNIX)
        case "connect":
            socket.create_connection(("127.0.0.1", int(path)), timeout=5)
        case "fork":
            if os.fork() == 0:
                os._exit(0)
        case "exec":
            os.execv(sys.executable, [sys.executable, "-c", "pass"])
        case "run":
            subprocess.run([sys.executable, "-c", "pass"], check=True)
        case "spawn":
            multiprocessing.get_context("spawn").Process(target=print).start()
        case "write":
            Path(path, "made").write_text("x")
        case "append":
            os.open(Path(path, "kept"), os.O_WRONLY | os.O_APPEND)
        case "truncate":
            os.truncate(Path(path, "kept"), 0)
        case "remove":
            Path(path, "kept").unlink()
        case "rename":
            Path(path, "kept").rename(Path(path, "gone"))
        case "rename_into":
            Path(path, "kept").rename(own / "kept")
        case "chmod":
            Path(path, "kept").chmod(0o777)
        case "touch":
            os.utime(Path(path, "kept"), (0, 0))
        case "mkdir":
            Path(path, "folder").mkdir()
        case "link":
            Path(path, "link").symlink_to("kept")
        case "through_a_link":
            (own / "link").symlink_to(path)
            Path(own, "link", "made").write_text("x")
        case "kill":
            os.kill(os.getppid(), 0)
        case "limits":
            resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (9, 9))
        case "read":
            Path(path, "kept").read_text()
        case "list":
            os.listdir(path)
        case "users":
            Path("/etc/passwd").read_text()
        case "parents_environment":
            Path(f"/proc/{os.getppid()}/environ").read_bytes()
        case "parents_memory":
            os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY)
        case "huge_file":
            (own / "huge").write_bytes(bytes(sandbox.MAX_FILE_BYTES + 1))
        case "scratch":
            (own / "folder").mkdir()
            (own / "folder" / "note").write_text("x")
            (own / "folder" / "note").rename(own / "note")
            return Score(float((own / "note").read_text() == "x"), {}, True)
        case "temporary_file":
            with tempfile.NamedTemporaryFile() as file:
                return Score(float(Path(file.name).is_relative_to(own)), {}, True)
        case "thread":
            done = threading.Event()
            threading.Thread(target=done.set).start()
            return Score(float(done.wait(WAIT)), {}, True)
        case "files_left":
            return Score(float(len(list(own.iterdir()))), {}, True)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
    return Score(1.0, {}, True)


if __name__ == "__main__":  # the worker of a system without network namespaces and filters of system calls
    from rlcore.rewards import worker

    sandbox._leave_network = lambda: False
    sandbox.install_filter = lambda *, deny_writing: False
    sys.exit(worker.main())
