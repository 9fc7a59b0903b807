"""``rlflow clean`` in a terminal."""

from __future__ import annotations

from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

from infra.errors import StorageError
from infra.processes import alone
from infra.settings import Settings
from infra.stack.servers import check_prefect
from tasks.clean.act import clean, look
from tasks.clean.report import json_of, text_of


def clean_here(settings: Settings, older_than_days: int | None, *, act: bool, json: bool) -> str:
    """The report, as a table or as JSON. Removes something only with ``act``.

    Raises:
        StorageError: there is no data folder, or another process cleans it.
        ServerError: MLflow or the Prefect server that is set does not answer.
    """
    if not settings.data_dir.is_dir():
        raise StorageError(f"there is no data folder {settings.data_dir}. Set RLFLOW_DATA_DIR to an existing one.")
    if url := PREFECT_API_URL.value():
        check_prefect(url, settings.server_timeout_seconds, PREFECT_API_AUTH_STRING.value())
    days = older_than_days or settings.clean_days
    if not act:
        report = look(settings, days)
        return json_of(report) if json else text_of(report)
    with alone(settings, "clean") as mine:
        if not mine:
            raise StorageError(f"another clean is at work on {settings.data_dir}. Try again when it has ended.")
        report = clean(settings, days)
    return json_of(report) if json else text_of(report)
