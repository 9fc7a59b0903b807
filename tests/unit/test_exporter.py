"""The Prometheus endpoint: a real server over real run folders, and what the dashboard and the alerts ask it for."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from prometheus_client.parser import text_string_to_metric_families

from infra.settings import Settings
from infra.stack.login import login_of
from infra.stack.servers import free_port, metrics_command
from infra.stack.services import Layout
from infra.stack.supervisor import Supervisor
from rlcore.files import write_json_atomically
from rlcore.segment.journal import MetricJournal
from rlcore.segment.lease import Lease
from tasks.cli import app
from tasks.experiments import load_experiment
from tasks.run import open_run
from tasks.watch.exporter import endpoint
from tasks.watch.facts import State

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "infra" / "deploy" / "monitoring"
EXPERIMENT = "grpo-geo3k-tiny"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A data folder with a quota, on a machine with a GPU."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '0, H100, 50, 1024, 2048'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    monkeypatch.setenv("RLFLOW_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("RLFLOW_MAX_GIB", "2")
    (tmp_path / "data").mkdir()
    return Settings()


def train(settings: Settings, name: str, *, ago: float = 0.0) -> Path:
    """Three steps, one second each, of which the last was ``ago`` seconds ago."""
    run = open_run(load_experiment(EXPERIMENT), name, settings)
    first = round((time.time() - ago - 2) * 1000)
    at = iter(range(first, first + 10_000, 1000))
    journal = MetricJournal(run.run_dir / "journal.jsonl", now_ms=lambda: next(at))
    for step in (1, 2, 3):
        journal.step(
            step, {"reward/mean": step / 4, "reward/accuracy": step / 8, "system/tokens_per_second": 100.0 * step}
        )  # fmt: skip
    return run.run_dir


@contextmanager
def serving(settings: Settings, *, login: bool) -> Iterator[str]:
    port = free_port()
    config = uvicorn.Config(endpoint(settings, login=login), host="127.0.0.1", port=port, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


def read(url: str, headers: Mapping[str, str] | None = None) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers or {})), timeout=30) as reply:
        return reply.read().decode()


def scrape(url: str) -> Series:
    found = list(text_string_to_metric_families(read(f"{url}/metrics")))
    assert all(family.documentation for family in found)
    return {(item.name, frozenset(item.labels.items())): item.value for family in found for item in family.samples}


def of_run(series: Series, name: str, run: str, **labels: str) -> float | None:
    return series.get((name, frozenset({"run": run, "experiment": EXPERIMENT, **labels}.items())))


def test_a_scrape_has_the_facts_of_the_run_folders(settings: Settings) -> None:
    folder = train(settings, "run")
    lease = Lease(folder / "lease.json")
    lease.acquire("token")
    write_json_atomically(folder / "health.jsonl", '["reward/mean below 2", 1, 0]\n["reward/mean below 2", 3, 0]\n')
    with serving(settings, login=False) as url:
        series = scrape(url)
        steps = load_experiment(EXPERIMENT).training.steps
        expected = {
            "rlflow_run_step": 3, "rlflow_run_steps": steps, "rlflow_run_reward": 0.75, "rlflow_run_accuracy": 0.375,
            "rlflow_run_tokens_per_second": 300, "rlflow_run_step_seconds": 1, "rlflow_run_left_seconds": steps - 3,
            "rlflow_run_health_warnings_total": 2, "rlflow_run_failures_total": 0,
        }  # fmt: skip
        assert {name: of_run(series, name, "run") for name in expected} == expected
        at = of_run(series, "rlflow_run_progress_timestamp_seconds", "run")
        assert at == pytest.approx(time.time(), abs=60)
        states = {state: of_run(series, "rlflow_run_state", "run", state=state.value) for state in State}
        assert states == {state: float(state is State.TRAINS) for state in State}
        assert series["rlflow_gpu_ratio", frozenset({("gpu", "0"), ("name", "H100")})] == 0.5
        assert series["rlflow_gpu_memory_used_bytes", frozenset({("gpu", "0"), ("name", "H100")})] == 2**30
        assert series["rlflow_data_quota_bytes", frozenset()] == 2 * 2**30
        lease.release()
        assert of_run(scrape(url), "rlflow_run_state", "run", state="prepares") == 1.0


def test_runs_that_ended_long_ago_have_no_series(settings: Settings) -> None:
    for name, ago in (("old", 3 * 86_400), ("new", 60)):
        folder = train(settings, name, ago=ago)
        driver = json.loads((folder / "drivers.jsonl").read_text()) | {"at": time.time() - ago}
        (folder / "drivers.jsonl").write_text(json.dumps(driver) + "\n")
        (folder / "finished").touch()
    with serving(settings, login=False) as url:
        series = scrape(url)
    assert of_run(series, "rlflow_run_step", "new") == 3
    assert of_run(series, "rlflow_run_step", "old") is None


def test_without_the_login_nothing_is_told(settings: Settings) -> None:
    train(settings, "run")
    with serving(settings, login=True) as url:
        assert read(f"{url}/health") == "OK\n"
        with pytest.raises(urllib.error.HTTPError) as refused:
            read(f"{url}/metrics")
        assert refused.value.code == 401
        assert "stack/login" in refused.value.read().decode()
        assert "rlflow_run_step" in read(f"{url}/metrics", {"Authorization": login_of(settings).header})
        with pytest.raises(urllib.error.HTTPError) as foreign:
            read(f"{url}/health", {"Host": "evil.example"})
        assert foreign.value.code == 400


def test_no_login_is_for_loopback_alone() -> None:
    with pytest.raises(Exception, match="allowed is loopback"):
        app(["metrics", "--host", "0.0.0.0", "--without-login"], standalone_mode=False)


def expressions() -> list[str]:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [item["definition"] for item in dashboard["templating"]["list"] if item["type"] == "query"]
    return [*(rule["expr"] for rule in rules), *targets, *variables]


def test_the_dashboard_and_the_alerts_ask_for_what_is_exported(settings: Settings) -> None:
    folder = train(settings, "run")
    Lease(folder / "lease.json").acquire("token")
    with serving(settings, login=False) as url:
        deadline = time.monotonic() + 60
        while ("rlflow_data_bytes", frozenset()) not in (series := scrape(url)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    exported = {name for name, _ in series}
    asked = {name for text in expressions() for name in re.findall(r"\brlflow_[a-z_]+", text)}
    assert len(asked) > 15
    assert asked <= exported
    assert exported == asked, "a metric that no panel and no alert shows"
    labels = {label for _, own in series for label, _ in own}
    used = {label for text in expressions() for label in re.findall(r"(\w+)=~?\"", text)} - {"job"}
    assert used <= labels
    states = {value for text in expressions() for value in re.findall(r"state=~?\"([\w|]+)\"", text)}
    assert {state for value in states for state in value.split("|")} <= {state.value for state in State}


def test_each_panel_has_its_own_place() -> None:
    panels: list[dict[str, Any]] = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_prometheus_asks_where_the_stack_listens(settings: Settings) -> None:
    scraped = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert metrics_command(settings) is None
    names = [service.name for service in Supervisor(settings)._services]
    assert "metrics" not in names
    on = settings.model_copy(update={"metrics_port": 9464})
    server = metrics_command(on)
    assert server is not None
    assert [server.address] == [f"http://{target}/metrics" for target in scraped["static_configs"][0]["targets"]]
    assert scraped["basic_auth"]["username"] == login_of(settings).user
    assert [service.server for service in Supervisor(on)._services if service.name == "metrics"] == [
        Layout.of(on).metrics
    ]
    assert any(f'job="{scraped["job_name"]}"' in text for text in expressions())
