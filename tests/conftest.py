"""Shared fixtures: a tiny policy with random weights, data and servers for runs of it, and the stack that flow-level
tests run on."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RLFLOW_SYSTEM_METRICS_SECONDS", "0")  # tests that look at them ask for them
# A shell's & ignores both; what tests start is interrupted with Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

import hypothesis
import pytest

from rlcore.process import making_what_stays
from tests.data_sets import DataSets, kinds, open_data_sets, real_folder
from tests.durations import recorded
from tests.ports import refusing

if TYPE_CHECKING:
    from rlcore.config.policy import TinyFamily
    from rlcore.segment.journal import StepRecord
    from tests.stores import Parts

pytest_plugins = ["tests.skips"]

hypothesis.settings.register_profile("rlflow", deadline=None)  # no test measures time: the machine may be busy
hypothesis.settings.load_profile("rlflow")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "what tests marked stacks keep their databases and files in"
    parser.addoption("--stack", choices=["sqlite-local", "postgres-s3"], default="sqlite-local", help=text)


def pytest_report_header() -> str:
    return f"data sets: made here, and those of {real_folder()}" if real_folder() else "data sets: made here"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with making_what_stays():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # --random-order shuffles them afterwards
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, then the order of the source.

    The cases of one test are sorted by id. Cases that come from a set have another order in each process, and xdist
    refuses processes that differ.
    """
    seconds = recorded()

    def place(item: pytest.Item) -> tuple[float, str, int, str]:
        file, line, _ = item.location
        return -seconds.get(file, 0.0), file, line or 0, item.nodeid

    items.sort(key=place)


@pytest.fixture(scope="session")
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    """Databases and a bucket for those who ask, or nothing but the data folder."""
    from tests.stores import embedded_parts, postgres_and_s3  # nobody else needs their drivers

    if request.config.getoption("--stack") == "sqlite-local":
        yield embedded_parts()
        return
    with postgres_and_s3(tmp_path_factory.mktemp("stores")) as found:
        yield found


@pytest.fixture(scope="session", params=kinds())
def data_sets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DataSets:
    """Geometry3K, GSM8K and MATH: small files made here, and the real ones where they are."""
    return open_data_sets(request.param, tmp_path_factory.mktemp("data_sets"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy with random weights, as a Hugging Face folder. Its LM head is tied to the embedding."""
    return _random_tiny(tmp_path_factory, tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with an LM head of its own."""
    return _random_tiny(tmp_path_factory, tied=False)


@pytest.fixture
def refusing_port() -> Iterator[int]:
    """Nobody answers there for as long as the test runs."""
    with refusing() as port:
        yield port


@pytest.fixture(scope="session")
def deepstack_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-VL with random weights, whose vision features enter two decoder layers more."""
    return _random_tiny(tmp_path_factory, tied=True, family="qwen3_vl")


@pytest.fixture(scope="session")
def experts_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with experts, and with an LM head of its own: with a tied one the random weights repeat one token."""
    return _random_tiny(tmp_path_factory, tied=False, family="qwen3_vl_moe")


@pytest.fixture(scope="session", params=["tiny_model", "deepstack_model"])
def each_model(request: pytest.FixtureRequest) -> Path:
    """The tiny policy of each family."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


def _random_tiny(
    factory: pytest.TempPathFactory,
    *,
    tied: bool,
    family: TinyFamily | None = None,
) -> Path:
    from rlcore.config import TinyModelConfig
    from rlcore.models.tiny import create_tiny_policy

    folder = factory.mktemp("model") / ("tied" if tied else "untied")
    create_tiny_policy(folder, TinyModelConfig(warm_start_steps=0, family=family), tied=tied)
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 synthetic problems with one picture each, prepared and resized for ``tiny_run.experiment``."""
    from tests.integration.tiny_run import experiment, prepared

    return prepared(tmp_path_factory.mktemp("datasets"), experiment(), None)


@pytest.fixture(scope="session")
def mixed_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve problems with no picture, one, or two."""
    from tests.integration.tiny_run import experiment, mixed_problems

    return mixed_problems(tmp_path_factory.mktemp("mixed"), experiment())


@pytest.fixture(scope="session")
def mixed_deepstack_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with pictures resized for ``deepstack_model``."""
    from tests.integration.tiny_run import experiment, mixed_problems

    config = experiment(**{"model.tiny.family": "qwen3_vl"})
    return mixed_problems(tmp_path_factory.mktemp("mixed_deepstack"), config)


@pytest.fixture(scope="session")
def plain(tiny_model: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> list[StepRecord]:
    """Four steps of ``tiny_run.experiment`` as it stands, with Ray."""
    from tests.integration.tiny_run import experiment, journal, run

    folder = tmp_path_factory.mktemp("plain") / "run"
    run(folder, tiny_model, dataset, experiment(), until=4, through_ray=True)
    return journal(folder)


@pytest.fixture(scope="session")
def _prefect() -> Iterator[None]:
    """One Prefect server for all flows that a process runs."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=300):
        yield


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs: making its tables takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def data_dir(_prefect: None, empty_mlflow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, with the fake interpreter as the trainer's."""
    from tests.flows.interpreter import fake_interpreter

    (tmp_path / "data" / "mlflow").mkdir(parents=True)
    shutil.copy(empty_mlflow, tmp_path / "data" / "mlflow" / "mlflow.db")
    interpreter = fake_interpreter(tmp_path)
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RLFLOW_TRAINER_PYTHON", str(interpreter))
    monkeypatch.setenv("RLFLOW_RETRY_DELAY_SCALE", "0")
    return tmp_path / "data"
