"""Notify people of failed or finished runs, with one automation for each on the Prefect server that is set.

The automations send a message through a block of the user: a ``webhook``, or any notification block of Prefect
(slack-webhook, ms-teams-webhook, sendgrid-email and others). Only the block has the address and its secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events.actions import CallWebhook, SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

from infra.errors import ServerError
from infra.settings import Settings
from infra.stack.servers import check_prefect

FLOW = "train-grpo"  # the flow of all training deployments
_SUBJECT = "{{ flow_run.name }}: {{ flow_run.state.name }}"
_BODY = (
    "Run {{ flow_run.name }} of {{ flow.name }}: {{ flow_run.state.name }}. "
    "{{ (flow_run.state.message or '') | truncate(500) }} {{ flow_run | ui_url }}"
)
# Filters before `tojson` keep quotes in an error's text from breaking the JSON.
_PAYLOAD = (
    '{"run": {{ flow_run.name | tojson }}, "flow": {{ flow.name | tojson }}, '
    '"state": {{ flow_run.state.name | tojson }}, '
    '"message": {{ (flow_run.state.message or "") | truncate(500) | tojson }}, '
    '"experiment": {{ (flow_run.parameters.get("experiment") or "") | tojson }}, '
    '"url": {{ flow_run | ui_url | tojson }}, "text": {{ (flow_run.name + ": " + flow_run.state.name) | tojson }}}'
)


OCCASIONS: Mapping[str, frozenset[str]] = {
    "failed": frozenset({"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"}),
    "finished": frozenset({"prefect.flow-run.Completed"}),
}
"""Occasion to the events of a flow run that cause a message."""


def apply(client: SyncPrefectClient, block: str, occasions: Sequence[str], flows: Sequence[str] = (FLOW,)) -> list[str]:
    """Create or update the automations of these occasions; others do not change.

    Args:
        block: TYPE/NAME of a block on the server.

    Returns:
        One line per automation.

    Raises:
        ServerError: there is no such block; the message lists the known ones.
    """
    kind, _, name = block.partition("/")
    document = _block_id(client, kind, name)
    lines = []
    for occasion in occasions:
        wanted = automation(occasion, kind, document, flows)
        found = client.read_automations_by_name(wanted.name)
        for spare in found[1:]:  # a copy would send every message twice
            client.delete_automation(spare.id)
        if found:
            client.update_automation(found[0].id, wanted)
        else:
            client.create_automation(wanted)
        lines.append(f"{wanted.name}: {'updated' if found else 'created'}, notifies {block}")
    return lines


def remove(client: SyncPrefectClient, occasions: Sequence[str]) -> list[str]:
    """Delete the automations of these occasions."""
    lines = []
    for occasion in occasions:
        for found in client.read_automations_by_name(f"rlflow-{occasion}"):
            client.delete_automation(found.id)
            lines.append(f"{found.name}: removed")
    return lines or ["there was none"]


def automation(occasion: str, kind: str, document: UUID, flows: Sequence[str]) -> AutomationCore:
    """The automation, with every field set explicitly, because an update sends only the fields that were set."""
    action = (
        CallWebhook(block_document_id=document, payload=_PAYLOAD)
        if kind == "webhook"
        else SendNotification(block_document_id=document, subject=_SUBJECT, body=_BODY)
    )
    core = AutomationCore(
        name=f"rlflow-{occasion}",
        description="Made by rlflow notify.",
        enabled=True,
        trigger=EventTrigger(
            posture=Posture.Reactive,
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related={"prefect.resource.role": "flow", "prefect.resource.name": list(flows)},
            expect=set(OCCASIONS[occasion]),
            for_each={"prefect.resource.id"},
            threshold=1,
        ),
        actions=[action],
    )
    return AutomationCore.model_validate(core.model_dump(exclude={"owner_resource"}))


def _block_id(client: SyncPrefectClient, kind: str, name: str) -> UUID:
    if not name:
        raise ServerError(f"block {kind!r}: write TYPE/NAME, for example webhook/team.")
    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound:
        documents = client.read_block_documents()
        known = sorted(f"{item.block_type.slug}/{item.name}" for item in documents if item.block_type and item.name)
        raise ServerError(
            f"no block {kind}/{name} on this Prefect server. Found: {', '.join(known) or 'none'}. Make it on Prefect's "
            "page under Blocks; docs/notifications.md has it as a command."
        ) from None


def notify_through(block: str | None, occasions: Sequence[str], flows: Sequence[str]) -> list[str]:
    """Create the automations on the Prefect server that is set; without a block, delete them."""
    url = PREFECT_API_URL.value()
    if not url:
        raise ServerError("no Prefect server is set: rlflow up starts one here, PREFECT_API_URL names another.")
    check_prefect(url, Settings().server_timeout_seconds, PREFECT_API_AUTH_STRING.value())
    with get_client(sync_client=True) as client:
        return remove(client, occasions) if block is None else apply(client, block, occasions, flows)
