"""make ui: both pages show a run, in a real browser, and refuse those who are not meant."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from infra import environment, processes
from infra.settings import Settings
from infra.stack.login import Login, login_file, login_of
from infra.stack.servers import answers
from infra.tracking.tracker import Tracker
from rlcore.segment.journal import StepRecord
from tests.hostile_text import HOSTILE
from tests.ports import reserved_port
from tests.tour.pages import find_browser, logged_in

ROOT = Path(__file__).resolve().parents[2]


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
    prefect, mlflow = reserved_port(), reserved_port()
    command = [
        *(sys.executable, "-m", "tasks.cli", "ui"),
        *("--prefect-port", str(prefect), "--mlflow-port", str(mlflow)),
    ]
    with (folder / "ui.log").open("wb") as log:
        process = processes.start(command, env=env, mark="ui-test", output=log, ends_with_parent=True)
    addresses = f"http://127.0.0.1:{prefect}", f"http://127.0.0.1:{mlflow}"
    deadline = time.monotonic() + 600
    while not (answers(f"{addresses[0]}/api/health", 2) and answers(f"{addresses[1]}/health", 2)):
        assert time.monotonic() < deadline, (folder / "ui.log").read_text()
        time.sleep(0.2)
    yield *addresses, folder
    process.terminate()
    assert process.wait(timeout=30) == 0
    processes.kill("ui-test")  # its temporary folder
    assert not answers(f"{addresses[0]}/api/health", 1), "the Prefect server outlived make ui"
    assert not answers(f"{addresses[1]}/health", 1), "the MLflow server outlived make ui"


Ask = Callable[..., tuple[int, str, bytes]]


@pytest.fixture(scope="module")
def ask(pages: tuple[str, str, Path]) -> Ask:
    """``_ask`` with the login: a browser whose user has logged in adds it to what a foreign page asks."""
    return partial(_ask, Authorization=login_of(Settings(data_dir=pages[2] / "data")).header)


def _write_mlflow_run(settings: Settings) -> None:
    tracker = Tracker.open(
        uri=settings.tracking_uri,
        artifacts_uri=settings.artifacts_uri,
        experiment="ui-experiment",
        run_id="ui-run",
        run_dir=settings.runs_dir / "ui-run",
    )
    steps = [StepRecord(step, 1_700_000_000_000 + step, {"reward/mean": step / 5}) for step in range(1, 6)]
    tracker.publish(steps, through_step=5)
    tracker.finish("FINISHED")


def _run_a_flow(env: dict[str, str]) -> None:
    code = (
        "from prefect import flow\nfrom infra.settings import Settings\nfrom tasks.cli.foreground import prefect_api\n"
        "from prefect.artifacts import create_markdown_artifact\nfrom tasks.report.page import as_text\n"
        f"hostile = {' '.join(HOSTILE)!r}\n"
        "@flow(name='train-grpo', flow_run_name='ui-run')\ndef shown():\n"
        "    create_markdown_artifact('the end of it: ' + as_text(hostile), key='as-text')\n"
        "    create_markdown_artifact(f'the end of it\\n\\n![x](http://evil.example/p.png)', key='as-markup')\n"
        "with prefect_api(Settings()): shown()\n"
    )
    subprocess.run([sys.executable, "-c", code], env=env, check=True, cwd=ROOT)


def test_both_pages_show_the_run(pages: tuple[str, str, Path]) -> None:
    browser = find_browser()
    from playwright.sync_api import sync_playwright

    prefect, mlflow, folder = pages
    login = login_of(Settings(data_dir=folder / "data"))
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(
            viewport={"width": 1400, "height": 900},
            http_credentials={"username": login.user, "password": login.password},  # what a person types for MLflow
        )
        for name, address in (("prefect", f"{prefect}/runs"), ("mlflow", f"{mlflow}/#/experiments/1/runs")):
            page.goto(address)
            if name == "prefect":
                page.get_by_placeholder("admin:pass").fill(login_file(Settings(data_dir=folder / "data")).read_text())
                page.get_by_role("button", name="Login").click()
            page.get_by_text("ui-run").first.wait_for(timeout=60_000)
            page.screenshot(path=str(folder / f"{name}.png"))
        chromium.close()
    for name in ("prefect", "mlflow"):
        assert (folder / f"{name}.png").stat().st_size > 10_000


def test_a_completion_on_prefects_page_asks_nobody(pages: tuple[str, str, Path]) -> None:
    browser = find_browser()
    from playwright.sync_api import sync_playwright

    prefect, _, folder = pages
    login = login_of(Settings(data_dir=folder / "data"))
    asked: list[str] = []
    with (
        sync_playwright() as playwright,
        SyncPrefectClient(api=f"{prefect}/api", auth_string=login.text) as client,
    ):
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = logged_in(chromium, login, {"width": 1400, "height": 900}).new_page()
        page.on("request", lambda request: asked.append(request.url))

        def hosts_asked(key: str) -> set[str | None]:
            (artifact,) = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
            asked.clear()
            page.goto(f"{prefect}/artifacts/artifact/{artifact.id}")
            page.get_by_text("the end of it").first.wait_for(timeout=60_000)
            page.wait_for_timeout(2_000)
            return {urlsplit(url).hostname for url in asked if urlsplit(url).scheme in ("http", "https")}

        assert "evil.example" in hosts_asked("as-markup"), "the page loads the pictures that it is given"
        assert hosts_asked("as-text") == {"127.0.0.1"}
        links = page.locator("a").evaluate_all("links => links.map(link => link.href)")
        assert not [link for link in links if "evil" in link]
        chromium.close()


def _ask(url: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, str, bytes]:
    """Status, the origin that may read the answer, and the answer."""
    request = urllib.request.Request(url, method=method, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, reply.headers.get("Access-Control-Allow-Origin", ""), reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("Access-Control-Allow-Origin", ""), error.read()


def test_nobody_asks_or_changes_anything_without_the_login(pages: tuple[str, str, Path], ask: Ask) -> None:
    """Loopback belongs to every user of the machine, and a flow run is code that runs as the stack's owner."""
    prefect, mlflow, _ = pages
    json_type = {"Content-Type": "application/json"}
    wrong = {"Authorization": Login("rlflow", "not-the-password-of-this").header}
    for url, method, body in (
        (f"{prefect}/api/admin/version", "GET", None),
        (f"{prefect}/api/deployments/filter", "POST", b"{}"),
        (f"{prefect}/api/flows/", "POST", b'{"name": "made-by-another-user"}'),
        (f"{mlflow}/api/2.0/mlflow/experiments/search?max_results=5", "GET", None),
        (f"{mlflow}/ajax-api/2.0/mlflow/experiments/search?max_results=5", "GET", None),
        (f"{mlflow}/api/2.0/mlflow/experiments/create", "POST", b'{"name": "made-by-another-user"}'),
        (f"{mlflow}/api/2.0/mlflow-artifacts/artifacts", "GET", None),
        (f"{mlflow}/", "GET", None),
    ):
        assert _ask(url, method, body, **json_type)[0] == 401, url
        assert _ask(url, method, body, **json_type, **wrong)[0] == 401, url
        assert ask(url, method, body, **json_type)[0] in (200, 201), url


def test_pages_answer_to_their_own_names_only(pages: tuple[str, str, Path], ask: Ask) -> None:
    """A foreign page may have its own name resolved to loopback, and then ask what it likes."""
    prefect, mlflow, _ = pages
    for address, asked in (
        (prefect, ("/", "/api/health", "/api/admin/version")),
        (mlflow, ("/", "/ajax-api/2.0/mlflow/experiments/search?max_results=5")),
    ):
        port = address.rpartition(":")[2]
        for path in asked:
            for name in ("127.0.0.1", "localhost", f"localhost:{port}"):
                assert ask(address + path, Host=name)[0] == 200, (path, name)
            for name in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example"):
                assert ask(address + path, Host=name)[0] in (400, 403), (path, name)


def test_a_foreign_page_can_read_nothing_and_change_nothing(pages: tuple[str, str, Path], ask: Ask) -> None:
    prefect, mlflow, _ = pages
    evil = {"Origin": "http://evil.example"}
    # what a page may send without asking first, and then read only if it is named
    assert ask(f"{prefect}/api/flow_runs/filter", "POST", b"{}", **{"Content-Type": "text/plain"}, **evil)[1] == ""
    assert ask(f"{prefect}/api/admin/version", **evil)[1] == ""
    own = {"Origin": f"http://localhost:{prefect.rpartition(':')[2]}"}
    assert ask(f"{prefect}/api/admin/version", **own)[1] == own["Origin"], "its own page by its other name"
    flow = b'{"name": "made-by-a-foreign-page"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded"):  # JSON needs the preflight that is refused
        status, _, answer = ask(f"{prefect}/api/flows/", "POST", flow, **{"Content-Type": kind}, **evil)
        assert status in (403, 415, 422), answer
    experiment = b'{"name": "made-by-a-foreign-page"}'
    asked = f"{mlflow}/api/2.0/mlflow/experiments/create"
    assert ask(asked, "POST", experiment, **{"Content-Type": "application/json"}, **evil)[0] == 403


@pytest.mark.parametrize(
    "path",
    [
        "../outside.txt",
        "../../outside.txt",
        "%2e%2e/outside.txt",
        "..%2foutside.txt",
        "%252e%252e%252foutside.txt",
        "{absolute}",
        "%2f{absolute}",
        "file:{absolute}",
        "a/../../outside.txt",
        "..%5coutside.txt",
    ],
)
def test_artifacts_cannot_be_read_or_written_outside_their_folder(
    pages: tuple[str, str, Path], ask: Ask, path: str
) -> None:
    _, mlflow, folder = pages
    root = folder / "data" / "mlflow"
    outside = root / "outside.txt"
    outside.write_text("not an artifact")
    asked = f"{mlflow}/api/2.0/mlflow-artifacts/artifacts/{path.format(absolute=outside)}"
    status, _, answer = ask(asked)
    assert b"not an artifact" not in answer
    assert status >= 400 or b"<html" in answer  # a path that the client's side resolves leads to the page
    before = sorted(item for item in folder.rglob("*") if "artifacts" not in item.parts and item.suffix == ".txt")
    ask(asked, "PUT", b"written from outside")
    after = sorted(item for item in folder.rglob("*") if "artifacts" not in item.parts and item.suffix == ".txt")
    assert after == before
    assert outside.read_text() == "not an artifact"


def test_a_link_among_the_artifacts_leads_nowhere(pages: tuple[str, str, Path], ask: Ask) -> None:
    _, mlflow, folder = pages
    asked = f"{mlflow}/api/2.0/mlflow-artifacts/artifacts"
    assert ask(f"{asked}/inside.txt", "PUT", b"an artifact")[0] == 200
    assert ask(f"{asked}/inside.txt")[2] == b"an artifact", "what is meant to be read can be"
    root = folder / "data" / "mlflow"
    outside = root / "outside.txt"
    outside.write_text("not an artifact")
    (root / "artifacts" / "link.txt").symlink_to(outside)
    (root / "artifacts" / "folder").symlink_to(root)
    for path in ("link.txt", "folder/outside.txt"):
        status, _, answer = ask(f"{asked}/{path}")
        assert status >= 400, answer
        assert ask(f"{asked}/{path}", "PUT", b"written from outside")[0] >= 400
    assert outside.read_text() == "not an artifact"
