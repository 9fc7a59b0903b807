"""The notebooks over a real stack: Prefect and MLflow servers, workers, and the tiny policy in training; then the pages
that they leave behind, in a real browser."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import nbformat
import pytest
from nbclient import NotebookClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, FlowRunFilter, FlowRunFilterTags

from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.servers import mlflow_server
from infra.tracking.results import Results
from tasks.ablation.runners import tag_of
from tests.long.prefect_stack import ROOT, Stack, prefect_stack
from tests.tour.pages import find_browser, logged_in

pytestmark = pytest.mark.timeout(1200)
NOTEBOOKS = ROOT / "notebooks"
SMALL = [
    "training.steps=2", "segment.steps=2", "training.problems_per_batch=2", "rollout.group_size=4",
    "rollout.kv_cache_mib=16", "data.synthetic_problems=32", "model.tiny.warm_start_steps=30", "resources.workers=1",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    stack: Stack
    mlflow: str
    folder: Path

    def execute(self, name: str, parameters: str) -> str:
        """All that the notebook shows, with other values in its parameters cell."""
        book = nbformat.read(NOTEBOOKS / name, as_version=4)
        (cell,) = [cell for cell in book.cells if "parameters" in cell.metadata.get("tags", [])]
        cell.source = f"{cell.source}\n{parameters}"
        NotebookClient(book, timeout=900, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute(env=self.env())
        nbformat.write(book, self.folder / name)
        outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
        return "\n".join(str(output.get("text") or output.get("data")) for output in outputs)

    def env(self) -> dict[str, str]:
        return {**self.stack.env, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("notebooks")
    settings = Settings(data_dir=folder / "data")
    with mlflow_server(settings) as mlflow, pytest.MonkeyPatch.context() as patch:
        login = login_of(settings).for_mlflow()
        for name, value in login.items():
            patch.setenv(name, value)  # the test itself asks MLflow too
        variables = {"RLFLOW_MLFLOW_URI": mlflow, "RLFLOW_TRAINER_PYTHON": sys.executable, **login}
        with prefect_stack(folder, variables, ("ablate", "ablation-point")) as stack:
            stack.prefect("work-pool", "set-concurrency-limit", "gpu", "1")
            yield Place(stack, mlflow, folder)


@pytest.fixture(scope="module")
def shown(place: Place) -> str:
    """What the notebook that starts an ablation shows once the ablation has ended."""
    return place.execute(
        "ablation.ipynb",
        f"grid, seeds, rungs, overrides = ['training.learning_rate=[1e-3]'], [0], 1, {SMALL!r}",
    )


def test_an_ablation_is_started_compared_and_looked_at(place: Place, shown: str) -> None:
    assert "Completed: 100%" in shown
    assert shown.count("image/png") == 2
    assert "learning_rate=0.001" in shown
    name = shown.split("'text/plain': \"'")[1].split("'")[0]
    results = Results(place.mlflow)
    parent = results.run(name)
    runs = results.below(parent)
    assert [run.name for run in runs] == ["base, seed 0", "learning_rate=0.001, seed 0"]
    assert {run.tags["rlflow.ablation_status"] for run in runs} == {"finished"}
    first, second = sorted(
        place.stack.client.read_flow_runs(flow_run_filter=FlowRunFilter(tags=FlowRunFilterTags(all_=[tag_of(name)]))),
        key=lambda item: item.start_time,
    )
    assert first.end_time <= second.start_time, "one slot, so one point at a time"

    compared = place.execute("compare_runs.ipynb", "")
    assert "training.learning_rate" in compared
    assert "on 4 problems" in compared
    assert "image/png" in compared

    inspected = place.execute("inspect_rollouts.ipynb", f"run_id = '{name}-p01-s0'")
    assert inspected.count("data:image/png;base64,") >= 4
    assert "answer: <b>" in inspected
    assert "tokens, " in inspected


@pytest.mark.usefixtures("shown")
def test_the_pages_show_the_ablation(place: Place) -> None:
    """MLflow's compare page: names, what differs, rewards in its first plot. Prefect's: the report with its plots."""
    browser = find_browser()
    from playwright.sync_api import sync_playwright

    runs = Results(place.mlflow).latest("grpo-geo3k-tiny", 4)
    ids, experiments = (quote(json.dumps(item)) for item in ([run.mlflow_run_id for run in runs], ["1"]))
    ablation = runs[0].tags["rlflow.ablation"]
    (report,) = place.stack.client.read_artifacts(
        artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[f"{ablation}-report"]))
    )
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = logged_in(chromium, login_of(place.stack.settings), {"width": 1500, "height": 1700}).new_page()
        page.goto(f"{place.mlflow}/#/compare-runs?runs={ids}&experiments={experiments}")
        for text in ("base, seed 0", "learning_rate=0.001, seed 0", "algorithm.advantage.name", "eval/accuracy"):
            page.get_by_text(text).first.wait_for(timeout=60_000)
        page.get_by_role("switch").first.click()  # show only the parameters that differ
        page.get_by_text("algorithm.advantage.name").first.wait_for(state="hidden")
        assert page.get_by_text("training.learning_rate").count() >= 2  # the plot's axis and the table's row
        page.screenshot(path=str(place.folder / "compare.png"))

        page.goto(f"{place.stack.env['PREFECT_API_URL'].removesuffix('/api')}/artifacts/artifact/{report.id}")
        page.get_by_text("minus base").first.wait_for(timeout=60_000)
        pictures = page.locator("img[alt='learning curves'], img[alt='differences to the base']")
        pictures.nth(1).wait_for()
        assert all(pictures.nth(index).evaluate("picture => picture.naturalWidth") > 500 for index in range(2))
        page.screenshot(path=str(place.folder / "report.png"))
        chromium.close()
