"""Jobs: ``python -m rlcore.jobs.NAME spec.json`` writes the result, or the error, where the spec says."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from rlcore import errors
from rlcore.failures import EXIT_BAD_CONFIG
from rlcore.files import write_json_atomically
from rlcore.specs import JobError, JobSpec

S = TypeVar("S", bound=JobSpec)


def job_main(run: Callable[[S], BaseModel], spec_type: type[S]) -> None:
    """Read the spec that the command line names, run the job, and write its result or its error."""
    spec = spec_type.model_validate_json(spec_file(run.__module__).read_text())
    try:
        result = run(spec)
    except Exception as error:  # noqa: BLE001 - the process boundary: the caller gets every failure
        report = JobError(kind=type(error).__name__, message=str(error), traceback=traceback.format_exc())
        write_json_atomically(Path(f"{spec.result}.error"), report.model_dump_json())
        traceback.print_exc()
        sys.exit(EXIT_BAD_CONFIG if isinstance(error, errors.ConfigError | errors.DataError) else 1)
    write_json_atomically(spec.result, result.model_dump_json())


def spec_file(module: str) -> Path:
    """The one argument of the command line."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python -m {module} SPEC.json")
    return Path(sys.argv[1])
