"""make up again after an edit of prefect.yaml: what is there no more goes from a real Prefect server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.settings import Settings
from infra.stack import services
from infra.stack.servers import prefect_server
from infra.stack.services import AppliedDeployments, Layout

ENTRYPOINT = "flows/evaluate_latest.py:evaluate_latest"


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layout]:
    folder = tmp_path_factory.mktemp("applied")
    Settings(data_dir=folder).stack_dir.mkdir(parents=True)
    with prefect_server(Settings(data_dir=folder)) as address:
        yield Layout.of(Settings(data_dir=folder, prefect_port=int(address.rpartition(":")[2])))


def deploy(layout: Layout, name: str, entrypoint: str = ENTRYPOINT) -> str:
    """A deployment with an hourly schedule and an automation of its own, as ``prefect deploy`` makes it."""
    flow = layout.api("POST", "/flows/", {"name": "evaluate-latest"})
    schedule = {"schedule": {"cron": "0 * * * *"}, "active": True}
    made = layout.api(
        "POST",
        "/deployments/",
        {"name": name, "flow_id": flow["id"], "entrypoint": entrypoint, "schedules": [schedule]},
    )
    layout.api(
        "POST",
        "/automations/",
        {
            "name": f"of-{name}",
            "trigger": {"type": "event", "expect": ["nothing"], "posture": "Reactive", "threshold": 1, "within": 0},
            "actions": [{"type": "run-deployment", "source": "selected", "deployment_id": made["id"]}],
            "owner_resource": f"prefect.deployment.{made['id']}",
        },
    )
    return str(made["id"])


def names(layout: Layout, what: str) -> set[str]:
    return {item["name"] for item in layout.api("POST", f"/{what}/filter", {})}


def test_a_deployment_that_prefect_yaml_has_lost_goes_with_its_schedule_and_automation(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = AppliedDeployments(digest="as it is", deployments=frozenset({("kept", ENTRYPOINT)}))
    monkeypatch.setattr(services, "_wanted", lambda: wanted)
    for name in ("kept", "gone", "busy", "of-somebody-else"):
        deploy(layout, name)
    busy = next(item["id"] for item in layout.api("POST", "/deployments/filter", {}) if item["name"] == "busy")
    run = layout.api("POST", f"/deployments/{busy}/create_flow_run", {"state": {"type": "RUNNING"}})
    before = wanted.model_copy(
        update={"deployments": wanted.deployments | {("gone", ENTRYPOINT), ("busy", ENTRYPOINT)}}
    )
    Path(layout.settings.prefect_home / "deployed").write_text(before.model_dump_json())

    layout.apply()
    assert names(layout, "deployments") == {"kept", "busy", "of-somebody-else"}
    assert names(layout, "automations") == {"of-kept", "of-of-somebody-else"}
    assert layout.api("GET", f"/deployments/{busy}")["paused"]

    layout.api("POST", f"/flow_runs/{run['id']}/set_state", {"state": {"type": "COMPLETED"}, "force": True})
    layout.apply()
    assert names(layout, "deployments") == {"kept", "of-somebody-else"}


def test_a_record_of_an_older_version_removes_nothing(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = AppliedDeployments(digest="as it is", deployments=frozenset())
    monkeypatch.setattr(services, "_wanted", lambda: wanted)
    monkeypatch.setattr(Layout, "command", lambda *_: None)  # there is nothing to deploy
    deploy(layout, "unknown")
    Path(layout.settings.prefect_home / "deployed").write_text("0123456789abcdef-0123456789abcdef")
    layout.apply()
    assert "unknown" in names(layout, "deployments")
