"""Commands of programs that are not ours, held against what they say for ``--help``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.docs.finding import Finding

# Program to the commands of it that pages use; () where it has none.
OF_THE_ENVIRONMENT: dict[str, tuple[tuple[str, ...], ...]] = {
    "ray": (("start",), ("status",), ("stop",)),
    "tensorboard": ((),),
}
OF_OTHERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "createdb": ((),),
    "docker": (("compose", "up"), ("compose", "exec")),
    "kubectl": (("apply",), ("create", "namespace"), ("create", "secret", "generic")),
    "openssl": (("rand",),),
    "psql": ((),),
    "uv": (("venv",), ("pip", "install")),
}
GLOBAL_OPTIONS = {  # where the help of a command leaves out those that stand before it
    "docker": ("compose", "--help"),
    "kubectl": ("options",),
}
_OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


def check_program(program: str, arguments: Sequence[str]) -> None:
    """It has this command and these options. Of a program of others that is not installed, only the command is known.

    Raises:
        Finding: it has not, or the environment lacks one of its own programs.
    """
    plain = [word for word in arguments if not word.startswith("-")]
    commands = (OF_THE_ENVIRONMENT | OF_OTHERS)[program]
    command = next((words for words in commands if _within(words, plain)), None)
    if command is None:
        raise Finding(f"{program} with {' '.join(plain)!r}: no page has used that, known are {commands}")
    known = _known_options(program, command)
    if known is None:
        return
    for word in arguments:
        option = word.partition("=")[0]
        if _OPTION.fullmatch(option) and option not in known:
            raise Finding(f"{program} {' '.join(command)} has no option {option}".replace("  ", " "))


def _within(words: tuple[str, ...], plain: Sequence[str]) -> bool:
    """In this order; values of options may stand between."""
    rest = iter(plain)
    return all(word in rest for word in words)


@cache
def _known_options(program: str, command: tuple[str, ...]) -> frozenset[str] | None:
    """None: not installed, or without this part of it (docker's compose, say)."""
    path = str(Path(sys.executable).parent / program) if program in OF_THE_ENVIRONMENT else shutil.which(program)
    if path is None:
        return None
    if not Path(path).exists():
        raise Finding(f"the environment has no {program}")
    text = _said(path, [*command, "--help"])
    if text is None or " ".join(command) not in text:  # docker without compose shows its own help
        return None
    if further := GLOBAL_OPTIONS.get(program):
        text += _said(path, further) or ""
    return frozenset(_OPTION.findall(text))


def _said(path: str, words: Sequence[str]) -> str | None:
    answer = subprocess.run([path, *words], capture_output=True, text=True, check=False, timeout=60)
    return answer.stdout + answer.stderr if answer.returncode == 0 else None
