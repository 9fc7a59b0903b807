"""The automations that tell people of runs, as they are sent to Prefect's server."""

from __future__ import annotations

import json
import uuid
from types import SimpleNamespace

import jinja2
import pytest
import typer
from prefect.events.actions import CallWebhook, SendNotification
from prefect.events.schemas.automations import AutomationCore, Posture
from prefect.exceptions import ObjectNotFound

from infra.errors import ServerError
from tasks.cli import app
from tasks.cli.notify import apply, automation, remove

DOCUMENT = uuid.uuid4()


class Client:
    """Keeps automations as the server does, and knows one block."""

    def __init__(self) -> None:
        self.automations: dict[uuid.UUID, AutomationCore] = {}

    def read_block_document_by_name(self, name: str, kind: str) -> SimpleNamespace:
        if (name, kind) != ("team", "webhook"):
            raise ObjectNotFound(Exception("404"))
        return SimpleNamespace(id=DOCUMENT)

    def read_block_documents(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(block_type=SimpleNamespace(slug=kind), name=name)
            for kind, name in (("webhook", "team"), ("slack-webhook", "all"), ("json", None))
        ]

    def read_automations_by_name(self, name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(id=key, name=name) for key, item in self.automations.items() if item.name == name]

    def create_automation(self, wanted: AutomationCore) -> None:
        self.automations[uuid.uuid4()] = wanted

    def update_automation(self, key: uuid.UUID, wanted: AutomationCore) -> None:
        assert key in self.automations
        self.automations[key] = wanted

    def delete_automation(self, key: uuid.UUID) -> None:
        del self.automations[key]


def names(client: Client) -> list[str]:
    return sorted(item.name for item in client.automations.values())


def test_one_automation_for_each_occasion_however_often_they_are_applied() -> None:
    client = Client()
    made = apply(client, "webhook/team", ["failed", "finished"])  # type: ignore[arg-type]
    assert made == ["rlflow-failed: created, notifies webhook/team", "rlflow-finished: created, notifies webhook/team"]
    client.create_automation(automation("failed", "webhook", uuid.uuid4(), ["other"]))
    again = apply(client, "webhook/team", ["failed"], ["evaluate-latest"])  # type: ignore[arg-type]
    assert again == ["rlflow-failed: updated, notifies webhook/team"]
    assert names(client) == ["rlflow-failed", "rlflow-finished"], "the copy is gone"
    failed, finished = sorted(client.automations.values(), key=lambda item: item.name)
    assert failed.trigger.match_related.model_dump() == {
        "prefect.resource.role": "flow", "prefect.resource.name": ["evaluate-latest"],
    }  # fmt: skip
    assert finished.trigger.match_related.model_dump()["prefect.resource.name"] == ["train-grpo"]
    assert remove(client, ["finished"]) == ["rlflow-finished: removed"]  # type: ignore[arg-type]
    assert names(client) == ["rlflow-failed"]
    assert remove(client, ["finished"]) == ["there was none"]  # type: ignore[arg-type]


def test_what_an_automation_waits_for_and_sends() -> None:
    failed = automation("failed", "webhook", DOCUMENT, ["a", "b"])
    assert (failed.name, failed.enabled) == ("rlflow-failed", True)
    trigger = failed.trigger
    assert trigger.expect == {"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"}
    assert (trigger.posture, trigger.threshold, trigger.for_each) == (Posture.Reactive, 1, {"prefect.resource.id"})
    assert trigger.match.model_dump() == {"prefect.resource.id": "prefect.flow-run.*"}
    (action,) = failed.actions
    assert isinstance(action, CallWebhook)
    assert action.block_document_id == DOCUMENT
    finished = automation("finished", "slack-webhook", DOCUMENT, ["a"])
    assert finished.trigger.expect == {"prefect.flow-run.Completed"}
    (told,) = finished.actions
    assert isinstance(told, SendNotification)
    assert told.block_document_id == DOCUMENT
    assert told.subject == "{{ flow_run.name }}: {{ flow_run.state.name }}"


def test_a_message_is_json_whatever_an_error_says() -> None:
    (action,) = automation("failed", "webhook", DOCUMENT, ["a"]).actions
    environment = jinja2.Environment()
    environment.filters["ui_url"] = lambda run: f"http://prefect/{run['name']}"
    run = {
        "name": "run-1", "parameters": {"experiment": "toy"},
        "state": {"name": "Failed", "message": 'it said: "no"\n' + "x " * 300},
    }  # fmt: skip
    said = json.loads(environment.from_string(action.payload).render(flow_run=run, flow={"name": "train-grpo"}))
    assert said.pop("message").startswith('it said: "no"\nx x')
    assert said == {
        "run": "run-1", "flow": "train-grpo", "state": "Failed", "experiment": "toy", "url": "http://prefect/run-1",
        "text": "run-1: Failed",
    }  # fmt: skip
    run["state"]["message"], run["parameters"] = None, {}
    said = json.loads(environment.from_string(action.payload).render(flow_run=run, flow={"name": "f"}))
    assert (said["message"], said["experiment"]) == ("", "")


def test_a_block_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ServerError, match=r"no block webhook/others .*Found: slack-webhook/all, webhook/team\."):
        apply(Client(), "webhook/others", ["failed"])  # type: ignore[arg-type]
    with pytest.raises(ServerError, match="write TYPE/NAME"):
        apply(Client(), "webhook", ["failed"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["webhook/team", "--on", "ended"], "'ended' is not one of 'failed', 'finished'"),
        ([], "name the block to notify"),
    ],
)
def test_a_command_that_says_too_little_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(typer.BadParameter, match=said):
        app(["notify", *words], standalone_mode=False)
