"""clean: remove from the data folder what nobody needs. Started by a schedule, every night."""

from __future__ import annotations

from prefect import flow

from infra.processes import alone
from infra.settings import Settings
from tasks import experiments as form
from tasks.clean.act import clean_data, show_cleaning


@flow(name="clean")
def clean(older_than: form.OlderThan = None) -> None:
    """Acts, with the same rules as ``rlflow clean --yes``; only one runs at a time over a data folder."""
    settings = Settings()
    with alone(settings, "clean") as mine:
        if mine:
            show_cleaning(clean_data(older_than or settings.clean_days))
