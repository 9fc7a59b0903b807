"""Starting a Ray of our own on a machine that has other work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rlcore.distributed.cluster import start_local_ray

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


class Starts:
    """Takes the place of ``ray.init``: fails with each message in turn, then succeeds."""

    def __init__(self, *failures: str) -> None:
        self.failures, self.options = list(failures), []

    def __call__(self, **options: Any) -> None:
        self.options.append(options)
        if self.failures:
            raise Exception(self.failures.pop(0))


@pytest.fixture
def neighbour() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that is not Ray's."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_one_that_takes_too_long_is_started_again(
    monkeypatch: pytest.MonkeyPatch, neighbour: subprocess.Popen[bytes]
) -> None:
    starts = Starts(SLOW, SLOW)
    monkeypatch.setattr(ray, "init", starts)
    start_local_ray(3)
    assert [options["num_cpus"] for options in starts.options] == [3, 3, 3]
    assert neighbour.poll() is None


@pytest.mark.parametrize(("failures", "message", "tries"), [([SLOW] * 3, "timed out", 3), (["no disk"], "no disk", 1)])
def test_one_that_never_starts_or_cannot_says_so(
    monkeypatch: pytest.MonkeyPatch, failures: list[str], message: str, tries: int
) -> None:
    starts = Starts(*failures)
    monkeypatch.setattr(ray, "init", starts)
    with pytest.raises(Exception, match=message):
        start_local_ray(1)
    assert len(starts.options) == tries
