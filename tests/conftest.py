"""Shared fixtures: a tiny policy with random weights, and the stack that flow-level tests run on."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A shell's & ignores both; what tests start is interrupted with Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

import pytest

from rlcore.startup import making_what_stays

if TYPE_CHECKING:
    from tests.stores import Parts


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "what tests marked stacks keep their databases and files in"
    parser.addoption("--stack", choices=["sqlite-local", "postgres-s3"], default="sqlite-local", help=text)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with making_what_stays():
        return (yield)


@pytest.fixture(scope="session")
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """Databases and a bucket for those who ask, or nothing but the data folder."""
    from tests.stores import embedded_parts, postgres_and_s3  # nobody else needs their drivers

    if request.config.getoption("--stack") == "sqlite-local":
        yield embedded_parts()
        return
    with postgres_and_s3(tmp_path_factory.mktemp("stores")) as found:
        yield found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy with random weights, as a Hugging Face folder. Its LM head is tied to the embedding."""
    return _random_tiny(tmp_path_factory, tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an LM head of its own."""
    return _random_tiny(tmp_path_factory, tied=False)


def _random_tiny(factory: pytest.TempPathFactory, *, tied: bool) -> Path:
    from rlcore.config import TinyModelConfig
    from rlcore.models.tiny import create_tiny_policy

    folder = factory.mktemp("model") / ("tied" if tied else "untied")
    create_tiny_policy(folder, TinyModelConfig(warm_start_steps=0), tied=tied)
    return folder
