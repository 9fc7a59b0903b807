"""make ui: both pages show a run, in a real browser."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import environment, processes
from infra.servers import answers, free_port
from infra.settings import Settings
from infra.tracking import Tracker
from rlcore.segment.journal import StepRecord

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """(Prefect's address, MLflow's address, folder for screenshots) over a folder that holds one run of each."""
    folder = tmp_path_factory.mktemp("ui")
    settings = Settings(data_dir=folder / "data")
    _write_mlflow_run(settings)
    env = {**environment.for_children(settings), "RLFLOW_DATA_DIR": str(settings.data_dir)}
    env.pop("PREFECT_API_URL", None)
    env["PREFECT_HOME"] = str(settings.prefect_home)
    _run_a_flow(env)
    prefect, mlflow = free_port(), free_port()
    command = [
        *(sys.executable, "-m", "infra.ui"),
        *("--prefect-port", str(prefect), "--mlflow-port", str(mlflow)),
    ]
    with (folder / "ui.log").open("wb") as log:
        process = processes.start(command, env=env, mark="ui-test", output=log, ends_with_parent=True)
    addresses = f"http://127.0.0.1:{prefect}", f"http://127.0.0.1:{mlflow}"
    deadline = time.monotonic() + 120
    while not (answers(f"{addresses[0]}/api/health", 2) and answers(f"{addresses[1]}/health", 2)):
        assert time.monotonic() < deadline, (folder / "ui.log").read_text()
        time.sleep(0.2)
    yield *addresses, folder
    process.terminate()
    assert process.wait(timeout=30) == 0
    processes.kill("ui-test")  # its temporary folder
    assert not answers(f"{addresses[0]}/api/health", 1), "the Prefect server outlived make ui"
    assert not answers(f"{addresses[1]}/health", 1), "the MLflow server outlived make ui"


def _write_mlflow_run(settings: Settings) -> None:
    tracker = Tracker.open(
        uri=settings.tracking_uri,
        artifacts_dir=settings.artifacts_dir,
        experiment="ui-experiment",
        run_id="ui-run",
        run_dir=settings.runs_dir / "ui-run",
    )
    steps = [StepRecord(step, 1_700_000_000_000 + step, {"reward/mean": step / 5}) for step in range(1, 6)]
    tracker.publish(steps, through_step=5)
    tracker.finish("FINISHED")


def _run_a_flow(env: dict[str, str]) -> None:
    code = (
        "from prefect import flow\nfrom infra.settings import Settings\nfrom tasks.foreground import prefect_api\n"
        "@flow(name='grpo-geo3k', flow_run_name='ui-run')\ndef shown(): return 1\n"
        "with prefect_api(Settings()): shown()\n"
    )
    subprocess.run([sys.executable, "-c", code], env=env, check=True, cwd=ROOT)


def test_both_pages_show_the_run(pages: tuple[str, str, Path]) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser on this machine: install one of {', '.join(BROWSERS)} to run this test")
    from playwright.sync_api import sync_playwright

    prefect, mlflow, folder = pages
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        for name, address in (("prefect", f"{prefect}/runs"), ("mlflow", f"{mlflow}/#/experiments/1/runs")):
            page.goto(address)
            page.get_by_text("ui-run").first.wait_for(timeout=60_000)
            page.screenshot(path=str(folder / f"{name}.png"))
        chromium.close()
    for name in ("prefect", "mlflow"):
        assert (folder / f"{name}.png").stat().st_size > 10_000
