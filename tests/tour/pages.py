"""Prefect's and MLflow's pages in a headless browser."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort

from infra.stack.login import Login
from infra.tracking.results import RunData
from tasks.champion import ARTIFACT as LEADERBOARD

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ViewportSize

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MOST_MS = 60_000
_DRAWING_MS = 5_000  # plots draw themselves after their data came
# On a browser's first visit MLflow opens its assistant over a third of the page.
_SEEN_BEFORE = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"


@dataclass(frozen=True, slots=True)
class Page:
    name: str
    address: str
    texts: Sequence[str]  # have to appear
    opened: str = ""  # selector of what is clicked on first
    searched: str = ""  # what MLflow's field for charts gets


def find_browser() -> str:
    """
    Raises:
        FileNotFoundError: there is none.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(f"no {' or '.join(BROWSERS)} on the PATH")
    return browser


def logged_in(browser: Browser, login: Login, viewport: ViewportSize) -> BrowserContext:
    """As after a person has typed the login: MLflow's into the browser's own question, Prefect's into its page."""
    context = browser.new_context(
        viewport=viewport, http_credentials={"username": login.user, "password": login.password}
    )
    stored = base64.b64encode(login.text.encode()).decode()
    context.add_init_script(f"localStorage.setItem('prefect-password', '{stored}')")
    return context


def take_pictures(prefect: str, mlflow: str, login: Login, runs: Sequence[RunData], folder: Path) -> list[str]:
    """One picture of each page, ``tour_*.png``, once it shows what it is there for; their names.

    Args:
        runs: of one experiment, the newest first, those of an ablation among them.

    Raises:
        FileNotFoundError: there is no browser.
        playwright.sync_api.Error: a page does not show what it should.
    """
    browser = find_browser()
    from playwright.sync_api import sync_playwright

    found: list[str] = []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = logged_in(chromium, login, {"width": 1720, "height": 1050}).new_page()
        page.add_init_script(_SEEN_BEFORE)
        for shown in (*prefect_pages(prefect, login, runs), *mlflow_pages(mlflow, runs)):
            page.goto(shown.address)
            if shown.opened:
                page.locator(shown.opened).first.click(timeout=_MOST_MS)
            if shown.searched:
                page.get_by_placeholder("Search metric charts").fill(shown.searched, timeout=_MOST_MS)
            for text in shown.texts:
                page.get_by_text(text).first.wait_for(timeout=_MOST_MS)
            page.wait_for_timeout(_DRAWING_MS)  # some pages ask again and again, so silence is no sign
            page.screenshot(path=str(folder / f"tour_{shown.name}.png"))
            found.append(f"tour_{shown.name}.png")
        chromium.close()
    return found


def prefect_pages(address: str, login: Login, runs: Sequence[RunData]) -> list[Page]:
    ablation = next(run.tags["rlflow.ablation"] for run in runs if "rlflow.ablation" in run.tags)
    with SyncPrefectClient(api=f"{address}/api", auth_string=login.text) as client:
        deployment = client.read_deployment_by_name("train-grpo/grpo-geo3k-tiny")
        board, report = (_artifact(client, key) for key in (LEADERBOARD, f"{ablation}-report"))
    return [
        Page("prefect_runs", f"{address}/runs", ["grpo-geo3k-tiny", "evaluate-latest"]),
        Page("prefect_form", f"{address}/deployments/deployment/{deployment.id}/run", ["learning_rate", "overrides"]),
        Page("prefect_leaderboard", f"{address}/artifacts/artifact/{board}", ["champion"]),
        Page("prefect_ablation", f"{address}/artifacts/artifact/{report}", ["minus base"]),
    ]


def mlflow_pages(address: str, runs: Sequence[RunData]) -> list[Page]:
    points = [run for run in runs if "rlflow.ablation" in run.tags]
    first = next(run for run in runs if "rlflow.ablation" not in run.tags)
    ids, experiments = (quote(json.dumps(item)) for item in ([run.mlflow_run_id for run in points], ["1"]))
    experiment = f"{address}/#/experiments/1/runs"
    return [
        # it folds the points of an ablation away
        Page("mlflow_runs", experiment, [first.name, points[0].name], opened=".ag-row button"),
        Page(
            "mlflow_curves",
            f"{experiment}/{first.mlflow_run_id}/model-metrics",
            ["reward"],
            searched="reward/|tokens_mean",
        ),
        Page("mlflow_compare", f"{address}/#/compare-runs?runs={ids}&experiments={experiments}", [points[0].name]),
    ]


def _artifact(client: SyncPrefectClient, key: str) -> str:
    """The newest one of this key."""
    (found,) = client.read_artifacts(
        artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])), sort=ArtifactSort.CREATED_DESC, limit=1
    )
    return str(found.id)
